"""kvhost: what is true without a host. Nothing in this package imports pyinfra."""

__version__ = "0.1.0"
