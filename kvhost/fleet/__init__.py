"""fleet.yaml and its hosts: addresses, keys, what a look at one found. No pyinfra in it."""
