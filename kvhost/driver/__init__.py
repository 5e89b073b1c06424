"""Whether a GPU's driver is good for a lock, and what may be done about it. Pure."""
