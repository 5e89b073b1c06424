"""A rented container without systemd: root by SSH on an odd port, a network volume.

    bin/up --inventory inventories/pod.py

All that kvhost keeps lies on the volume; a path off it is refused. After a stop, the same command
brings everything back, and so does, as the container's start command (docs/fleets.md):
    python3 /workspace/kvhost/bin/pod_start.py --base /workspace/kvhost
"""

pods = [
    (
        "pod-1",
        {
            "ssh_hostname": "203.0.113.7",
            "ssh_port": 40022,
            "ssh_user": "root",
            "ssh_key": "~/.ssh/id_ed25519",
            "ssh_known_hosts_file": "known_hosts",
            "volume_dir": "/workspace",
            "base_dir": "/workspace/kvhost",
            "cache_limit_gib": 20,
        },
    ),
]
