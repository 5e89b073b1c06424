"""Test hosts with NVMe drives, and what is asked of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.drive_runs import Ran, on, run
from tests.lab.qemu import Drive, Machine
from tests.lab.recipe import run as tool
from tests.lab.vm import Lab

SETTINGS = {"cache_limit_gib": 0.2, "free_floor_gib": 0.05}
MOUNT = "/var/lib/kvhost/drive"


def storage(folder: Path, hosts: dict[Machine, dict[str, Any]]) -> Ran:
    """`pyinfra inventory.py storage.py` over these hosts, each with its own claim."""
    named = {m.name: on(m, {**SETTINGS, **claim}) for m, claim in hosts.items()}
    return run(folder, "storage.py", named)


def full_drive(lab: Lab, serial: str) -> Drive:
    """A drive with somebody's ext4 and a file in it, made outside of any host."""
    drive = lab.drive(serial, "1G")
    letter = lab.folder / "letters"
    letter.mkdir(exist_ok=True)
    (letter / "letter.txt").write_text("do not lose this\n" * 100)
    tool("mkfs.ext4", "-q", "-F", "-d", letter, drive.image)
    return drive


def mounted_from(machine: Machine) -> str:
    """Serial of the drive that is mounted at MOUNT once the boot is over, empty if nothing is."""
    # sshd does not wait for a drive: it answers before all is mounted
    machine.ssh("systemctl is-system-running --wait", check=False)
    line = f"findmnt -no SOURCE --mountpoint {MOUNT} || exit 0"
    source = machine.ssh(line).stdout.strip()
    if not source:
        return ""
    parent = machine.ssh(f"lsblk -no PKNAME {source}").stdout.strip()
    return {name: serial for serial, name in machine.names().items()}[parent]
