"""Did the cache survive? Evidence in, a verdict with its causes out. Pure."""
