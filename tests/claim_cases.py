"""Drives as a host reports them, and claims on them: what tests of the claim are made of."""

from __future__ import annotations

from typing import Any

from kvhost.drives.claim import Claim, claim
from kvhost.drives.types import Drives
from kvhost.onhost.drive_probe import token
from kvhost.settings import Settings

MACHINE = "0123456789abcdef0123456789abcdef"
MOUNT = "/var/lib/kvhost/drive"
SERIAL = "S7KHNJ0W123456A"
LINK = f"/dev/disk/by-id/nvme-Samsung_SSD_990_PRO_2TB_{SERIAL}"
NOTHING: dict[str, Any] = {"status": "absent", "why": "not there", "data": None}
LOG = {"critical_warning": 0, "temperature_c": 40, "available_spare_percent": 100,
       "spare_threshold_percent": 10, "percentage_used": 3, "bytes_written": 1,
       "power_on_hours": 1, "unsafe_shutdowns": 0, "media_errors": 0}  # fmt: skip


def ok(data: Any) -> dict[str, Any]:
    return {"status": "ok", "why": None, "data": data}


def device(**changes: Any) -> dict[str, Any]:
    """A healthy blank NVMe drive of 2 TB, as its maker counts."""
    return {
        "name": "nvme0n1", "path": "/dev/nvme0n1", "maj_min": "259:0", "diskseq": 9,
        "size_bytes": 2_000_398_934_016, "transport": "nvme", "model": "Samsung SSD 990 PRO 2TB",
        "serial": SERIAL, "wwn": "eui.0025385b71b00001", "by_id": LINK,
        "by_ids": [LINK, "/dev/disk/by-id/nvme-eui.0025385b71b00001"], "backing": None,
        "logical_bytes": 512, "physical_bytes": 512, "discard_bytes": 512, "rotational": False,
        "removable": False, "hidden": False, "read_only": False, "zoned": "none",
        "partitions": [], "contents": [], "kvhost": None, "health": ok(dict(LOG)), "pcie": NOTHING,
        "notes": [], **changes,
    }  # fmt: skip


def drive(*findings: tuple[str, str], why: str | None = None, **changes: Any) -> dict[str, Any]:
    rows = [{"kind": kind, "detail": detail} for kind, detail in findings]
    status = "unreadable" if why else "ok"
    return {"status": status, "why": why, "device": device(**changes), "findings": rows}


def other(*findings: tuple[str, str], **changes: Any) -> dict[str, Any]:
    """A SATA drive of 500 GB beside it, with the system on it unless other findings are given."""
    link = "/dev/disk/by-id/ata-CT500MX500SSD1_2012E295ABCD"
    mine: dict[str, Any] = {"name": "sda", "path": "/dev/sda", "maj_min": "8:0", "diskseq": 1,
            "size_bytes": 500_107_862_016, "transport": "sata", "model": "CT500MX500SSD1",
            "serial": "2012E295ABCD", "wwn": "naa.500a0751e295abcd", "by_id": link,
            "by_ids": [link], "health": NOTHING}  # fmt: skip
    return drive(*(findings or (("system", "the running system lies on it"),)), **mine | changes)


def place(**changes: Any) -> dict[str, Any]:
    """A mount point that is not there yet."""
    return ok({
        "path": MOUNT, "real_path": MOUNT, "kind": "none", "entries": [], "mounts": [],
        "filesystem": None, "drives": [], "fstab": [], "marker": NOTHING, **changes,
    })  # fmt: skip


def drives(*rows: dict[str, Any], **changes: Any) -> Drives:
    found = {"machine_id": MACHINE, "drives": list(rows), "mount_point": place(),
             "journal": NOTHING, **changes}  # fmt: skip
    return Drives.model_validate(found)


def own(**changes: Any) -> dict[str, Any]:
    """What tells a drive that kvhost formatted, not mounted."""
    return {"partition": "/dev/nvme0n1p1", "filesystem": "xfs", "encrypted": False,
            "uuid": "8ad9b906-7389-43ef-bf41-d7b7727b055b", "mounted_at": [], "marker": NOTHING,
            **changes}  # fmt: skip


OWN_FINDINGS = (
    ("partition_table", "gpt 4fb5c278"),
    ("signature", "partition 1: xfs, label kvhost"),
)
OWN_MOUNTED = (*OWN_FINDINGS, ("busy", "nvme0n1p1 is held"), ("mounted", f"nvme0n1p1 at {MOUNT}"))
MARKER = ok({"schema": 1, "uuid": "8ad9b906-7389-43ef-bf41-d7b7727b055b", "machine_id": MACHINE})
FOREIGN_MOUNT = (("busy", "nvme0n1 is held"), ("mounted", f"nvme0n1 at {MOUNT} (xfs)"),
                 ("signature", "xfs 1234 at 0"))  # fmt: skip


def token_for(row: dict[str, Any], machine: str = MACHINE) -> str:
    return token(row["device"], machine, row["findings"])


def claimed(found: Drives, **settings: Any) -> Claim:
    return claim(Settings(**settings), found)
