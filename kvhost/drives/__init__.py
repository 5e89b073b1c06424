"""Which drive is claimed, what may be done to it, and whether it is worth it. Pure."""
