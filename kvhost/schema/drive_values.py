"""Checks of the drive settings, one value at a time. Each returns the value or raises `Refusal`."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

from kvhost.schema.problems import Refusal, short
from kvhost.schema.values import one_line, tier_dir

BY_ID = "/dev/disk/by-id/"
UNITS = {
    **{word: 10**power for word, power in (("MB", 6), ("GB", 9), ("TB", 12), ("PB", 15))},
    **{word: 1 << bits for word, bits in (("MiB", 20), ("GiB", 30), ("TiB", 40), ("PiB", 50))},
}
_SIZE = re.compile(r"(\d{1,6}(?:\.\d{1,6})?) ?([A-Za-z]+)")
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9:+=_.@-]{2,254}")
_WWN = re.compile(r"[A-Za-z0-9][A-Za-z0-9:_. -]{5,127}")
_TOKEN = re.compile(r"erase-[0-9a-f]{32}(,erase-[0-9a-f]{32})*")


def by_id(value: str) -> str:
    """A link in /dev/disk/by-id, given whole or by its name alone."""
    one_line(value)
    name = value.removeprefix(BY_ID)
    if name.startswith("/dev/"):
        raise Refusal(
            f"is {short(value)}, a name that can be another drive's after the next boot; it must "
            "be a link in /dev/disk/by-id (kvhost drives shows them)"
        )
    if not _ID.fullmatch(name):
        raise Refusal(f"must be the name of a link in {BY_ID}, not {short(value)}")
    if re.search(r"-part\d+$", name):
        whole = re.sub(r"(-part\d+)+$", "", name)
        raise Refusal("is a partition, and kvhost takes whole drives", BY_ID + whole)
    return value


def serial(value: str) -> str:
    """A serial number, as it stands in `kvhost drives`; the file's path for a loop device."""
    one_line(value)
    if len(value) > 255:
        raise Refusal(f"has {len(value)} characters; at most 255 are allowed")
    if value != value.strip():
        raise Refusal("must have no blanks around it", value.strip())
    if set("*?[") & set(value):
        raise Refusal("is compared letter by letter; * ? [ are for drive_model alone")
    return value


def wwn(value: str) -> str:
    """A world-wide name, EUI-64 or NGUID, in any of the ways that tools write it."""
    one_line(value)
    if not _WWN.fullmatch(value):
        raise Refusal(
            f"must be a WWN, EUI or NGUID as tools print it (0x5000c500a1b2c3d4, "
            f"eui.0025385b71b00001), not {short(value)}"
        )
    return value


def model(value: str) -> str:
    """A model, with * and ? as in a shell."""
    one_line(value)
    if fnmatchcase("", value) or not re.search(r"[A-Za-z0-9]", value):
        raise Refusal("would be true of every drive")
    return value


def drive_size(value: str) -> str:
    """A number with its unit: "2TB" is 2,000,000,000,000 bytes, "1.8TiB" counts in 1024."""
    if re.fullmatch(r"[\d.]+", value):
        raise Refusal(
            f"is {short(value)} without a unit, and a drive of 2 TB has not 2 TiB: write TB, GB or "
            "MB (steps of 1000), or TiB, GiB or MiB (steps of 1024)",
            f"{value}TB",
        )
    found = _SIZE.fullmatch(value)
    if not found or found.group(2) not in UNITS:
        meant = _unit_meant(found.group(2)) if found else None
        raise Refusal(
            f"must be a number and one of {', '.join(UNITS)}, not {short(value)}",
            f"{found.group(1)}{meant}" if found and meant else None,
        )
    if float(found.group(1)) == 0:
        raise Refusal("is nothing")
    return value


def _unit_meant(word: str) -> str | None:
    return {unit.lower(): unit for unit in UNITS}.get(word.lower())


def bytes_of(value: str) -> int:
    """Bytes of an accepted size."""
    found = _SIZE.fullmatch(value)
    if found is None:
        raise ValueError(f"{value!r} is no size")
    unit: int = UNITS[found.group(2)]
    return round(float(found.group(1)) * unit)


def mount(value: str) -> str:
    """A directory for the drive alone."""
    return tier_dir(value)


def erase(value: str) -> str:
    """A token as a refusal prints it, or several with commas."""
    if not _TOKEN.fullmatch(value):
        raise Refusal(
            "must be the token that the refusal of the plan prints (erase- and 32 digits of "
            "0-9 a-f); there is no other way to allow it"
        )
    return value
