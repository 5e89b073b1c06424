"""Drive settings that are each fine and together are not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from kvhost.schema.drive_values import bytes_of
from kvhost.schema.drives import CRITERIA, DriveSettings
from kvhost.schema.problems import Problem

if TYPE_CHECKING:
    from kvhost.schema.settings import Settings

_Found = Iterator[tuple[frozenset[str], Problem]]
_NEEDS_A_CLAIM = tuple(key for key in DriveSettings.model_fields if key not in CRITERIA)
_CLAIM = "drive_by_id = '/dev/disk/by-id/…' (kvhost drives shows the links)"


def drive_problems(s: Settings) -> _Found:
    """Yield the keys that a rule looks at, and what is wrong with them together."""
    rules = (
        (_sizes, _places, _tier, _adopt, _several, _ephemeral)
        if s.claims_a_drive
        else (_unclaimed,)
    )
    for rule in rules:
        yield from rule(s)


def _found(keys: tuple[str, ...], what: str, write: str) -> tuple[frozenset[str], Problem]:
    return frozenset(keys), Problem(", ".join(keys), what, write)


def _unclaimed(s: Settings) -> _Found:
    fields = type(s).model_fields
    said = tuple(key for key in _NEEDS_A_CLAIM if getattr(s, key) != fields[key].default)
    if said:
        what = "says what to do with a drive, and no drive is claimed"
        yield _found(said, what, f"{_CLAIM}, or this left out")


def _sizes(s: Settings) -> _Found:
    low, high = s.drive_min_size, s.drive_max_size
    if low and high and bytes_of(low) > bytes_of(high):
        yield _found(
            ("drive_min_size", "drive_max_size"),
            f"no drive has at least {low} ({bytes_of(low):,} bytes) and at most {high} "
            f"({bytes_of(high):,} bytes)",
            f"drive_min_size = {high!r} and drive_max_size = {low!r}",
        )


def _places(s: Settings) -> _Found:
    from kvhost.schema.combinations import names_in_base  # it imports this module

    base, mount = PurePosixPath(s.base_dir), PurePosixPath(s.resolved_drive_mount)
    if base.is_relative_to(mount):
        yield _found(
            ("drive_mount", "base_dir"),
            f"{mount} is or holds base_dir, which must not come and go with the drive",
            f"drive_mount = '{base}/drive'",
        )
    elif mount.is_relative_to(base) and mount.relative_to(base).parts[0] in names_in_base():
        yield _found(
            ("drive_mount", "base_dir"),
            f"{mount} lies in {base / mount.relative_to(base).parts[0]}, where kvhost keeps "
            "something else",
            f"drive_mount = '{base}/drive'",
        )
    if PurePosixPath(s.model_source).is_relative_to(mount):
        yield _found(
            ("model_source", "drive_mount"),
            f"the model ({s.model_source}) lies where the drive is mounted",
            "model_source = '/srv/models/llama'",
        )


def _tier(s: Settings) -> _Found:
    mount, tier = PurePosixPath(s.resolved_drive_mount), PurePosixPath(s.resolved_tier_dir)
    if tier == mount or not tier.is_relative_to(mount):
        yield _found(
            ("tier_dir", "drive_mount"),
            f"a drive is claimed for the cache, and the cache ({tier}) would not lie in a "
            f"directory on it (it is mounted at {mount})",
            f"tier_dir = '{mount}/tier', or left out",
        )


def _adopt(s: Settings) -> _Found:
    for key, what in (
        ("drive_encrypt", "what is adopted is not formatted, and so not encrypted"),
        ("drive_erase", "what is adopted is not erased"),
        (
            "drive_ephemeral",
            "what is adopted is never formatted, not even when it comes back blank",
        ),
    ):
        if s.drive_adopt and getattr(s, key):
            yield _found(("drive_adopt", key), what, f"drive_adopt = False, or {key} left out")


def _ephemeral(s: Settings) -> _Found:
    for key in ("drive_by_id", "drive_serial", "drive_wwn"):
        if s.drive_ephemeral and getattr(s, key) is not None:
            yield _found(
                ("drive_ephemeral", key),
                f"an ephemeral drive is another one after a stop, and {key} names this one",
                f"drive_model = 'Amazon EC2 NVMe Instance Storage' in the place of {key}",
            )


def _several(s: Settings) -> _Found:
    if s.drive_count == 1:
        if s.drive_erase and "," in s.drive_erase:
            what = "several tokens are for several drives, and one drive is claimed"
            yield _found(("drive_erase", "drive_count"), what, "drive_erase = one of them")
        return
    if s.drive_adopt:
        yield _found(
            ("drive_count", "drive_adopt"),
            "one filesystem is adopted as it is; kvhost makes no RAID of it",
            "drive_count = 1",
        )
    for key in ("drive_by_id", "drive_serial", "drive_wwn"):
        if getattr(s, key) is not None:
            yield _found(
                ("drive_count", key),
                f"{key} names one drive, and drive_count is {s.drive_count}",
                "drive_model, drive_min_size or drive_transport in its place, or drive_count = 1",
            )
