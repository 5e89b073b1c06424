"""What one disk tells of itself: model, way, link, health, heat, wear. Reads only, as root."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or __package__:
    from kvhost.onhost import bounded, drive_sys
else:  # they lie beside this file on a host, where there is no package kvhost
    import bounded
    import drive_sys

#: a disk that sleeps takes a quarter of a minute to answer; one that is broken never may
SMARTCTL_S = 30.0


def look_at(name: str) -> dict[str, Any]:
    """Model, way, link, health and time spent too hot of one disk. What cannot be read says why."""
    found: dict[str, Any] = {"name": name, "model": None, "serial": None, "transport": "unknown",
                             "link": None, "rotational": False, "health": None, "thermal": None,
                             "why": None}  # fmt: skip
    with contextlib.suppress(OSError, ValueError):
        identity = drive_sys.identity(name)
        found.update(model=identity["model"], serial=identity["serial"])
    try:
        found["transport"] = drive_sys.transport(name)
        found["link"] = drive_sys.pcie(name) if name.startswith("nvme") else None
        found["rotational"] = drive_sys.text(drive_sys.block(name, "queue/rotational")) == "1"
        if name.startswith("nvme"):
            found["health"], found["thermal"] = nvme_health(name)
        else:
            found["smartctl"] = smartctl(name)
    except (OSError, ValueError) as why:
        found["why"] = str(why)
    return found


def nvme_health(name: str) -> tuple[dict[str, Any], dict[str, int]]:
    """The SMART log; seconds and transitions of thermal management (NVMe base, log page 02h)."""
    fd = os.open(f"/dev/{name}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        log = drive_sys.smart_log(fd)
    finally:
        os.close(fd)
    warning, critical = struct.unpack_from("<II", log, 192)  # minutes
    first, second, first_s, second_s = struct.unpack_from("<IIII", log, 216)
    thermal = {"warning_min": warning, "critical_min": critical, "throttled": first + second,
               "throttled_s": first_s + second_s}  # fmt: skip
    return drive_sys.parse_smart(log), thermal


def smartctl(name: str) -> dict[str, Any] | None:
    """What smartctl says, as JSON; None where it is not installed. Raises OSError, ValueError."""
    program = shutil.which("smartctl", path="/usr/sbin:/usr/bin:/sbin:/bin")
    if program is None:
        return None
    try:
        loaded = json.loads(bounded.run([program, "-j", "-a", f"/dev/{name}"], SMARTCTL_S).out)
    except bounded.TooMuch as why:
        raise bounded.TooMuch(f"smartctl: {why}") from None
    except (ValueError, RecursionError):
        loaded = None
    if not isinstance(loaded, dict):
        raise ValueError("smartctl did not print a JSON object")
    kept = ("device", "smart_status", "temperature", "power_on_time", "ata_smart_attributes",
            "ata_device_statistics", "logical_block_size", "endurance_used", "smartctl",
            "nvme_smart_health_information_log", "interface_speed")  # fmt: skip
    return {key: loaded[key] for key in kept if key in loaded}


def written_to(disk: Mapping[str, Any]) -> int | None:
    """Bytes written to a disk since it was made, of what look_at() found; None: not told."""
    if disk.get("health"):
        return _whole(disk["health"].get("bytes_written"))
    return read_smartctl(disk.get("smartctl") or {})[0]


def read_smartctl(told: Mapping[str, Any]) -> tuple[int | None, int | None, int | None]:
    """Bytes written, hours, percent used, of `smartctl -j -a` (ATA and NVMe); None: not told.

    Of ATA, the device statistics count, whose units are a standard (ACS-4, log 04h); attribute 241
    only where its name says that its unit is a sector: makers use others too.
    """
    log = told.get("nvme_smart_health_information_log")
    if isinstance(log, Mapping):
        units = log.get("data_units_written")
        written = units * 512_000 if isinstance(units, int) else None
        return written, _whole(log.get("power_on_hours")), _whole(log.get("percentage_used"))
    sector = _whole(told.get("logical_block_size")) or 512
    hours = _whole(told.get("power_on_time", {}).get("hours"))
    sectors = _statistic(told, "Logical Sectors Written")
    if sectors is None:
        sectors = next(
            (
                _whole(row.get("raw", {}).get("value"))
                for row in told.get("ata_smart_attributes", {}).get("table", [])
                if row.get("id") == 241 and row.get("name") == "Total_LBAs_Written"
            ),
            None,
        )
    percent = _statistic(told, "Percentage Used Endurance Indicator")
    return sectors * sector if sectors is not None else None, hours, percent


def _statistic(told: Mapping[str, Any], name: str) -> int | None:
    """A value of ATA's device statistics that is marked valid."""
    for page in told.get("ata_device_statistics", {}).get("pages", []):
        for row in page.get("table", []):
            if row.get("name") == name and row.get("flags", {}).get("valid", True):
                return _whole(row.get("value"))
    return None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
