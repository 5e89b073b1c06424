"""The command `kvhost`, a module a command; what reaches a host is pyinfra, run by these."""
