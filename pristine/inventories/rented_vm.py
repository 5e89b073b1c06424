"""A rented virtual machine with systemd: reached by SSH, its driver often installed already.

    bin/up --inventory inventories/rented_vm.py --dry      # then without --dry

An instance store (a drive that is blank again after each stop) is claimed with drive_ephemeral;
other drives with drive_serial or drive_by_id (docs/drives.md). Several hosts, jump hosts and sudo
with a password: fleet.yaml (docs/fleets.md).
"""

vms = [
    (
        "vm-1",
        {
            "ssh_hostname": "192.0.2.20",
            "ssh_user": "ubuntu",
            "ssh_key": "~/.ssh/id_ed25519",
            # keys of rented hosts are kept apart from those in ~/.ssh
            "ssh_known_hosts_file": "known_hosts",
            "_sudo": True,
            "cache_limit_gib": 50,
        },
    ),
]
