"""What a run would do to a host, what it costs, and every reason not to. Pure."""
