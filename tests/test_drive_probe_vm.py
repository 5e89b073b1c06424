"""The probe on NVMe drives of a virtual machine: health, sharing, and layers of its kernel."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvhost.onhost import DRIVE_SCRIPTS, drive_probe
from kvhost.report import parse_drives
from tests.lab.qemu import Machine
from tests.lab.vm import Lab

pytestmark = [
    pytest.mark.drives,
    pytest.mark.full,
    pytest.mark.skipif(os.geteuid() != 0, reason="the image of the test host is made as root"),
]
ONHOST = Path(drive_probe.__file__).parent
DRIVES = ("KVDRIVE1", "KVDRIVE2", "KVDRIVE3")


@pytest.fixture(scope="module")
def host() -> Iterator[Machine]:
    with Lab() as lab:
        machine = lab.host("probe", drives=DRIVES)
        machine.ssh("mkdir -p /root/p")
        for name in DRIVE_SCRIPTS:
            machine.put((ONHOST / name).read_text(), f"/root/p/{name}")
        yield machine


def looked_at(host: Machine) -> dict[str, tuple[dict[str, Any], set[str], str]]:
    """Serial -> device, kinds, details in a line."""
    told = parse_drives(host.ssh("python3 /root/p/report_drives.py --mount /srv/x").stdout)
    assert [drive.why for drive in told.drives] == [None] * len(told.drives)
    return {
        str(drive.device.serial): (
            drive.device.model_dump(),
            {found.kind for found in drive.findings},
            "; ".join(found.detail for found in drive.findings),
        )
        for drive in told.drives
        if drive.device
    }


def test_blank_drives_and_the_systems_own(host: Machine) -> None:
    found = looked_at(host)
    assert set(found) == {*DRIVES, "ROOT"}
    assert {"system", "mounted", "busy", "fstab"} <= found["ROOT"][1]
    for serial in DRIVES:
        device, kinds, _ = found[serial]
        assert (device["transport"], kinds) == ("nvme", set())
        assert device["by_id"] == f"/dev/disk/by-id/nvme-QEMU_NVMe_Ctrl_{serial}"
        assert device["wwn"].startswith("nvme.1b36-")


def test_the_health_is_what_nvme_cli_reads(host: Machine) -> None:
    device, _, _ = looked_at(host)["KVDRIVE1"]
    mine = device["health"]["data"]
    theirs = json.loads(host.ssh(f"nvme smart-log -o json {device['path']}").stdout)
    assert mine["critical_warning"] == theirs["critical_warning"]
    assert mine["percentage_used"] == theirs["percent_used"]
    assert mine["available_spare_percent"] == theirs["avail_spare"]
    assert mine["spare_threshold_percent"] == theirs["spare_thresh"]
    assert abs(mine["temperature_c"] - (theirs["temperature"] - 273)) <= 1
    assert mine["bytes_written"] == int(theirs["data_units_written"]) * 512_000
    assert mine["media_errors"] == int(theirs["media_errors"])
    link = device["pcie"]["data"]
    assert link["width"] >= 1 and link["address"].startswith("0000:")


LAYERS = [
    ("lvm", "pvcreate -y -ff {d}; vgcreate v {d}; lvcreate -y -l 8 -n l v", "vgremove -ff -y v",
     {"holder", "busy"}, "(lvm) is built on it"),
    ("md", "mdadm --create /dev/md9 --run --force --level=1 --raid-devices=1 {d}",
     "mdadm --stop /dev/md9", {"holder", "busy"}, "(md raid1) is built on it"),
    ("swap", "mkswap {d}; swapon {d}", "swapoff {d}", {"swap", "busy"}, "in use as swap"),
    ("a mount over LVM", "pvcreate -y -ff {d}; vgcreate w {d}; lvcreate -y -l 100 -n l w;"
     " mkfs.ext4 -q /dev/w/l; mount /dev/w/l /mnt", "umount /mnt; vgremove -ff -y w",
     {"mounted", "holder", "busy"}, "at /mnt (ext4)"),
    ("btrfs over two", "mkfs.btrfs -q -f {d} {e}; btrfs device scan; mount {e} /mnt",
     "umount /mnt", {"mounted", "busy"}, "at /mnt (btrfs)"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "make", "end", "kinds", "words"), LAYERS, ids=[row[0] for row in LAYERS]
)
def test_layers(
    host: Machine, name: str, make: str, end: str, kinds: set[str], words: str
) -> None:  # fmt: skip
    found = looked_at(host)
    paths = {"d": found["KVDRIVE2"][0]["path"], "e": found["KVDRIVE3"][0]["path"]}
    tool = make.split()[0]
    if host.ssh(f"command -v {tool}", check=False).returncode:
        pytest.skip(f"the test host has no {tool}")
    host.ssh(f"set -e; {make.format(**paths)}")
    try:
        _, seen, details = looked_at(host)["KVDRIVE2"]
        assert kinds <= seen and words in details, details
    finally:
        host.ssh(end.format(**paths))
        host.ssh("wipefs -qa {d} {e}; blkdiscard -f {d} 2>/dev/null; true".format(**paths))
