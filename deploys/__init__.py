"""What happens to a host. Only this package knows pyinfra; what is decided lives in kvhost/."""
