"""One box at home: the machine that you are on, or one that you reach by SSH.

    bin/up --inventory inventories/home.py

Edit the lines below; docs/settings.md has every setting, docs/drives.md how a drive is claimed.
"""

hosts = [
    (
        "@local",
        {
            # nothing set: a directory is the tier, and no drive is touched. For an NVMe drive of
            # its own, by what `kvhost drives` shows of it:
            # "drive_serial": "S7KHNJ0W123456A",
            "cache_limit_gib": 20,
        },
    ),
    # another machine instead: its address, and a user who may use sudo without a password
    # ("192.0.2.10", {"ssh_user": "ann", "_sudo": True, "cache_limit_gib": 200}),
]
