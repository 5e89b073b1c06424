"""Hosts over SSH: `bin/up --inventory inventories/ssh.py`. Copy it and put your own hosts in.

A group's settings go into group_data/GROUP.py, a host's own beside its name.
"""

# (address, data): pyinfra's own keys (ssh_user, ssh_port, ssh_key, _sudo) and kvhost's settings
cpu_hosts = [
    ("192.0.2.10", {"ssh_user": "admin", "_sudo": True}),
    ("192.0.2.11", {"ssh_user": "root", "ssh_port": 40022, "tier_dir": "/workspace/kvcache"}),
]
