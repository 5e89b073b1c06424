"""Whether a drive is the one that the settings mean, criterion by criterion. Pure."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase

from kvhost.drives.types import Device, Drives
from kvhost.schema.drive_values import BY_ID, UNITS, bytes_of
from kvhost.schema.drives import CRITERIA
from kvhost.settings import Settings

_NEAR = 0.8  # of difflib's ratio: one digit wrong in ten, or two that changed places
_PREFIX = re.compile(r"^(nvme-|wwn-|scsi-)?(0x|naa\.|eui\.|uuid\.|3(?=[0-9a-f]{16,32}$))?")


def wanted(settings: Settings) -> str:
    """The criteria, as a refusal says them: "drive_model 'X*' and drive_transport 'nvme'"."""
    given = [(key, getattr(settings, key)) for key in CRITERIA]
    return " and ".join(f"{key} {value!r}" for key, value in given if value is not None)


def wwn_digits(value: str) -> str:
    """One spelling of the many that tools use: naa.5000c…, 0x5000c…, wwn-0x5000C…, 50:00:c…."""
    plain = value.strip().lower()
    return re.sub(r"[-: ]", "", _PREFIX.sub("", plain))


def mismatches(settings: Settings, device: Device) -> dict[str, str]:
    """Criterion -> why it is not true of this drive; empty when it is the claimed one."""
    return dict(_mismatches(settings, device))


def _mismatches(s: Settings, d: Device) -> Iterator[tuple[str, str]]:
    links = {link.removeprefix(BY_ID) for link in d.by_ids}
    if s.drive_by_id is not None and s.drive_by_id.removeprefix(BY_ID) not in links:
        yield "drive_by_id", f"its links are {', '.join(sorted(links)) or 'none'}"
    if s.drive_serial is not None and s.drive_serial != d.serial:
        yield "drive_serial", f"is {d.serial or 'none'}"
    if s.drive_wwn is not None and (d.wwn is None or wwn_digits(s.drive_wwn) != wwn_digits(d.wwn)):
        yield "drive_wwn", f"is {d.wwn or 'none'}"
    if s.drive_model is not None and not fnmatchcase(d.model or "", s.drive_model):
        yield "drive_model", f"is {d.model or 'none'}"
    if s.drive_min_size is not None and d.size_bytes < bytes_of(s.drive_min_size):
        yield "drive_min_size", f"it has {sizes(d.size_bytes)}, less than {s.drive_min_size}"
    if s.drive_max_size is not None and d.size_bytes > bytes_of(s.drive_max_size):
        yield "drive_max_size", f"it has {sizes(d.size_bytes)}, more than {s.drive_max_size}"
    if s.drive_transport is not None and s.drive_transport != d.transport:
        yield "drive_transport", f"is {d.transport}"
    elif d.transport == "loop" and s.drive_transport != "loop":
        yield "drive_transport", "a loop device is taken only with drive_transport = 'loop'"


def sizes(count: int) -> str:
    """A size as its maker and as an operating system says it: 2.000 TB (1.819 TiB)."""
    if count < 10**11:
        return f"{count / 1e9:.3f} GB ({count / (1 << 30):.3f} GiB)"
    return f"{count / 1e12:.3f} TB ({count / (1 << 40):.3f} TiB)"


def near_misses(settings: Settings, drives: Drives) -> list[str]:
    """Drives that fail by little, in a sentence each."""
    found = []
    for row in drives.drives:
        if row.device is None:
            continue
        wrong = mismatches(settings, row.device)
        said = [hint for key in wrong if (hint := _hint(settings, row.device, key))]
        if said and len(said) == len(wrong):
            found += [f"near: {row.device.path}: {hint}" for hint in said]
    return found


def _hint(s: Settings, d: Device, key: str) -> str | None:
    given = str(getattr(s, key))
    if key in ("drive_min_size", "drive_max_size"):
        return _other_unit(given, key, d)
    if key == "drive_transport":
        return "it is a loop device" if d.transport == "loop" else None
    if key == "drive_model":
        model = d.model or ""
        if fnmatchcase(model.lower(), given.lower()) or fnmatchcase(model, f"{given}*"):
            return f"drive_model = {model!r}"
        return None
    theirs: list[str | None] = [d.serial if key == "drive_serial" else d.wwn]
    if key == "drive_by_id":
        theirs = [*d.by_ids]
    for one in (word for word in theirs if word):
        mine = given.removeprefix(BY_ID)
        their = one.removeprefix(BY_ID)
        if difflib.SequenceMatcher(None, mine.lower(), their.lower()).ratio() >= _NEAR:
            return f"{key} is {their}, and {mine} is asked for"
    return None


def _other_unit(given: str, key: str, d: Device) -> str | None:
    """A size that would be true in the other kind of unit: 2 TB is 1.819 TiB."""
    number, unit = re.sub(r"[^\d.]", "", given), re.sub(r"[\d. ]", "", given)
    other = unit[0] + ("B" if unit.endswith("iB") else "iB")
    if other not in UNITS:
        return None
    meant = bytes_of(f"{number}{other}")
    fits = d.size_bytes >= meant if key == "drive_min_size" else d.size_bytes <= meant
    if not fits:
        return None
    return f"it has {sizes(d.size_bytes)}: {key} = '{number}{other}' would be true of it"
