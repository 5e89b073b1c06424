"""Wear of a drive: from its own SMART log or from smartctl's JSON. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvhost.drives.types import Drives, Health
from kvhost.onhost.drive_health import read_smartctl

#: years that are left below which a drive's wear is warned of
FEW_YEARS = 3.0
WORN_PERCENT = 80
DAY = 24.0
YEAR_DAYS = 365.25


@dataclass(frozen=True)
class Wear:
    """None: the drive does not tell. ``per_day``: bytes; in the last ``days``, if it is
    ``recent``, else over its whole life so far.

    ``rated``: bytes it may be written, by its maker (``rated_from`` "given") or worked out from
    the share that it counts as used ("percentage used", at the most cautious).
    """

    written: int | None
    hours: int | None
    percent: int | None
    per_day: float | None
    recent: bool
    rated: float | None
    rated_from: str | None
    years_left: float | None
    warnings: tuple[tuple[str, str], ...]
    days: float | None = None


def counters(drives: Drives | None) -> dict[str, int]:
    """Bytes that drives count as written, by serial number, of those that tell (NVMe)."""
    devices = [drive.device for drive in drives.drives if drive.device] if drives else []
    return {one.serial: one.health.data.bytes_written
            for one in devices if one.serial and one.health.data}  # fmt: skip


def wear_of(
    health: Health | None,
    smartctl: Mapping[str, Any] | None,
    tbw: float | None = None,
    since: tuple[int, float] | None = None,
) -> Wear:
    """``tbw``: bytes that the maker rates the drive for; ``since``: bytes, and the days that they
    were written in, up to now."""
    written, hours, percent = None, None, None
    if health is not None:
        written, hours = health.bytes_written, health.power_on_hours
        percent = health.percentage_used
    elif smartctl:
        written, hours, percent = read_smartctl(smartctl)
    per_day = written / (hours / DAY) if written is not None and hours else None
    if since is not None:
        per_day = since[0] / since[1]
    rated, source = tbw, "given" if tbw else None
    if rated is None and written and percent:
        # the drive rounds: percent could be almost one more
        rated, source = written * 100 / (percent + 1), "percentage used"
    left = None
    if rated is not None and written is not None and per_day:
        left = max(0.0, rated - written) / per_day / YEAR_DAYS
    known = (written, hours, percent, per_day, since is not None, rated, source, left)
    days = since[1] if since is not None else None
    return Wear(*known, tuple(_warnings(health, smartctl, Wear(*known, ()))), days)


def _warnings(
    health: Health | None, smartctl: Mapping[str, Any] | None, wear: Wear
) -> Iterator[tuple[str, str]]:
    if health is not None and health.critical_warning:
        yield "failing", f"it warns of itself (critical warning {health.critical_warning:#x})"
    if smartctl and smartctl.get("smart_status", {}).get("passed") is False:
        yield "failing", "smartctl: its own test of its health fails"
    if health is not None and health.media_errors:
        yield "media_errors", f"{health.media_errors} times it could not read back what it held"
    if wear.percent is not None and wear.percent >= WORN_PERCENT:
        yield "worn", f"{wear.percent} % of its rated writes are used"
    if wear.years_left is not None and wear.years_left < FEW_YEARS and wear.per_day:
        yield (
            "few_years",
            f"{wear.years_left:.1f} years left: {wear.per_day / 1e12:.2f} TB are written a day, "
            f"{(wear.written or 0) / 1e12:.0f} of {(wear.rated or 0) / 1e12:.0f} TB so far",
        )
