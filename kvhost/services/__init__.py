"""What runs on a host, described once: services, their units, runners, the namespace. Pure."""
