"""All drives of a host as text: what each is, holds, and why it is not the claimed one. Pure."""

from __future__ import annotations

from kvhost.drives.claim_match import mismatches, sizes
from kvhost.drives.types import Device, Drive, Drives
from kvhost.settings import Settings

_ORDER = {"partition_table": 1, "signature": 2, "leftover": 3}  # after what is in use
_MOST = 6  # findings of one drive that a table shows


def title(device: Device) -> str:
    """The drive in a few words: path and serial."""
    return f"{device.path} (serial {device.serial})" if device.serial else device.path


def listed(settings: Settings | None, drives: Drives) -> str:
    """A block of lines for each drive, compared with the claim when settings are given."""
    rows = [drive for drive in drives.drives if _is_of_interest(settings, drive)]
    blocks = [_block(settings, drive) for drive in rows]
    if not rows:
        blocks = ["- none: the kernel shows no drive here"]
    if left := len(drives.drives) - len(rows):
        blocks.append(f"- and {left} loop devices, which are files")
    return "\n".join(blocks)


def _is_of_interest(settings: Settings | None, drive: Drive) -> bool:
    """Loop devices are many where snaps are; only who asks for one sees them."""
    loop = drive.device is not None and drive.device.transport == "loop"
    if settings is None or not loop or drive.device is None:
        return True
    serial = settings.drive_serial
    return settings.drive_transport == "loop" or (
        serial is not None and drive.device.serial == serial
    )


def _block(settings: Settings | None, drive: Drive) -> str:
    device = drive.device
    if device is None:
        return f"- unknown drive: {drive.why}"
    lines = [f"- {device.path}  {device.model or 'no model'}  {device.transport}",
             f"  serial {device.serial or 'none'}  {sizes(device.size_bytes)}"]  # fmt: skip
    if device.by_id:
        lines.append(f"  {device.by_id}")
    lines.append(f"  {drive_lines(drive)}")
    if settings is not None and settings.claims_a_drive:
        wrong = mismatches(settings, device)
        why = "; ".join(f"{key}: {reason}" for key, reason in wrong.items())
        lines.append(f"  not claimed: {why}" if wrong else "  FITS the claim")
    return "\n".join(lines)


def drive_lines(drive: Drive) -> str:
    """What a drive holds, in one line."""
    if drive.device and drive.device.kvhost:
        at = ", ".join(drive.device.kvhost.mounted_at) or "not mounted"
        return f"kvhost's own: {drive.device.kvhost.filesystem}, {at}"
    ranked = sorted(drive.findings, key=lambda f: _ORDER.get(f.kind, 0))
    found = [f"{f.kind}: {f.detail}" for f in ranked[:_MOST]]
    if len(drive.findings) > _MOST:
        found.append(f"and {len(drive.findings) - _MOST} more")
    if drive.status != "ok":
        found.append(f"NOT READ: {drive.why}")
    return "; ".join(found) or "nothing was found on it"
