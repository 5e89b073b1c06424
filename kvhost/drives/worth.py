"""Is the drive worth it: from what drive_measure.py found, and what the model asks. Pure.

Times are seconds, sizes bytes, speeds bytes a second.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from kvhost.drives.cloud import is_network_volume, is_virtual
from kvhost.drives.smart import Wear, wear_of
from kvhost.drives.types import Health, Link
from kvhost.sizing.kv_bytes import Times
from kvhost.sizing.view import seconds, verdict_words

#: below this part of the first speed, a drive's writes have fallen: the cache of its cells is full
FALLEN = 0.6
YEAR_HOURS = 24 * 365.25
#: what a SATA link of 6 Gbit/s carries at most, after its 8b/10b coding
SATA_LIMIT = 600e6
#: what is written a day is that of so many days, if as much is known
MONTH_DAYS = 31


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Rate(_Model):
    bytes: int
    seconds: float
    bytes_per_s: float
    p99_s: float | None
    series: tuple[tuple[float, float], ...] = ()


class Thermal(_Model):
    """Since the drive was made: minutes too hot, and how often and long it slowed itself."""

    warning_min: int
    critical_min: int
    throttled: int
    throttled_s: int


class Disk(_Model):
    """One disk below the tier, at one moment."""

    name: str
    model: str | None
    serial: str | None
    transport: str
    link: Link | None
    rotational: bool
    health: Health | None
    thermal: Thermal | None
    why: str | None
    smartctl: dict[str, Any] | None = None


class Counted(_Model):
    """What drives counted as written at one moment: Unix seconds, bytes by serial number."""

    time: int
    written: dict[str, int]


class Memory(Counted):
    """The end of an earlier measurement."""

    schema_: Literal[1] = Field(alias="schema")


class Measured(_Model):
    """What onhost/drive_measure.py prints."""

    schema_: Literal[1] = Field(alias="schema")
    time: int
    previous: Memory | None
    fio: str
    filesystem: str
    network: bool
    disks: tuple[str, ...]
    file_bytes: int
    direct: bool
    write: Rate
    read_files: Rate
    read: Rate
    before: tuple[Disk, ...]
    after: tuple[Disk, ...]


def parse_measured(data: dict[str, Any]) -> Measured:
    """Raises pydantic.ValidationError (a ValueError) for another form."""
    return Measured.model_validate(data)


@dataclass(frozen=True)
class Finding:
    """Something about the drive that a person should know. ``bad``: it costs speed or the drive."""

    code: str
    words: str
    bad: bool = True


@dataclass(frozen=True)
class Judged:
    """``worth``: None where what the model asks, or what computing takes, is not known."""

    worth: bool | None
    words: str
    times: Times | None
    findings: tuple[Finding, ...]
    wear: tuple[tuple[str, Wear], ...]


def judge_drive(
    measured: Measured,
    *,
    bytes_per_token: int | None,
    prefill: float | None,
    tokens: int,
    tbw: float | None = None,
    earlier: tuple[Counted, ...] = (),
) -> Judged:
    """``bytes_per_token``: of all ranks; ``prefill``: tokens a second; ``tbw``: bytes that the
    maker rates each drive for; ``earlier``: what the drives counted at runs before."""
    speed = measured.read_files.bytes_per_s
    counts = (*earlier, *([measured.previous] if measured.previous else []))
    since = {disk.name: _since(measured.time, disk, counts) for disk in measured.before}
    wear = tuple(
        (disk.name, wear_of(disk.health, disk.smartctl, tbw, since.get(disk.name)))
        for disk in measured.after
    )
    findings = tuple(_findings(measured, wear))
    if bytes_per_token is None:
        words = f"reads whole files at {mb(speed)}; the model's KV per token is not known here"
        return Judged(None, words, None, findings, wear)
    size = bytes_per_token * tokens
    if prefill is None:
        words = (
            f"restores {tokens:,} tokens in {seconds(size / speed)}; how long computing them "
            "takes is not known: give --prefill, or run the restart test first"
        )
        return Judged(None, words, None, findings, wear)
    times = Times(tokens, size, size / speed, tokens / prefill)
    worth, words = verdict_words(times)
    return Judged(worth, words, times, findings, wear)


def _since(time: int, before: Disk, counts: tuple[Counted, ...]) -> tuple[int, float] | None:
    """Bytes written, and the days that they were written in, up to the beginning of a measurement:
    of the last month if something is known of it, else since it was last read; None where that is
    less than a day."""
    now = wear_of(before.health, before.smartctl).written
    if now is None or before.serial is None:
        return None
    known = [
        ((time - one.time) / 86400, now - one.written[before.serial])
        for one in counts
        if before.serial in one.written
    ]
    known = [(days, written) for days, written in known if days >= 1 and written >= 0]
    month = [one for one in known if one[0] <= MONTH_DAYS]
    if not known:
        return None
    days, written = max(month) if month else min(known)
    return written, days


def mb(speed: float) -> str:
    return f"{speed / 1e6:,.0f} MB/s"


def _findings(measured: Measured, wear: tuple[tuple[str, Wear], ...]) -> list[Finding]:
    found = []
    if measured.network:
        words = f"the tier is a network volume ({measured.filesystem}): its speed is the network's"
        found.append(Finding("network_volume", words + ", and others' load changes it"))
    if not measured.direct:
        words = f"{measured.filesystem} takes no direct reads: memory may have answered a part"
        found.append(Finding("not_direct", words))
    before = {disk.name: disk for disk in measured.before}
    for disk in measured.after:
        found += _of_disk(before.get(disk.name), disk)
    fall = fallen(measured.write)
    if fall:
        first, last, after = fall
        words = f"writes fall from {mb(first)} to {mb(last)} after {after / 1e9:.1f} GB: the fast "
        found.append(Finding("writes_fall", words + "part of its cells is full"))
    for name, one in wear:
        found += [Finding(code, f"{name}: {words}") for code, words in one.warnings]
    return found


def _of_disk(before: Disk | None, disk: Disk) -> list[Finding]:
    found = []
    name = f"{disk.name} ({disk.model})" if disk.model else disk.name
    if disk.link is not None and disk.link.is_slower:
        link = disk.link
        now = f"{link.speed_gts:g} GT/s x{link.width}" if link.speed_gts else f"x{link.width}"
        words = f"{name}: its PCIe link runs at {now}, and it can do "
        words += f"{link.max_speed_gts:g} GT/s x{link.max_width}: another slot"
        found.append(Finding("link_slower", words))
    if disk.transport == "sata":
        words = f"{name}: SATA carries at most {mb(SATA_LIMIT)}; an NVMe drive several times that"
        found.append(Finding("sata", words))
    if disk.transport == "usb":
        found.append(Finding("usb", f"{name}: on USB, which is slow and may be pulled"))
    if disk.transport.startswith("nvme-") or disk.transport in ("iscsi", "fc"):
        words = f"{name}: over {disk.transport}, so its speed is the network's"
        found.append(Finding("network_drive", words))
    if is_network_volume(disk.model):
        words = f"{name}: a network volume of the cloud, so its speed is the network's"
        found.append(Finding("network_volume", words + ", and others' load changes it"))
    elif is_virtual(disk.model, disk.transport):
        words = f"{name}: a virtual disk: whether a drive or the network is below it cannot be seen"
        found.append(Finding("virtual_drive", words, bad=False))
    # what is made by software says that it rotates, whatever lies below it
    elif disk.rotational and disk.transport in ("sata", "sas", "scsi", "usb"):
        found.append(Finding("rotational", f"{name}: a rotating disk"))
    if before and before.thermal and disk.thermal:
        found += _heat(name, before.thermal, disk)
    if disk.why:
        found.append(Finding("health_unknown", f"{name}: its health: {disk.why}", bad=False))
    return found


def _heat(name: str, before: Thermal, disk: Disk) -> list[Finding]:
    """What its counts say of heat while it was measured. Not every drive counts all of them."""
    now = disk.thermal or before
    times, slow = now.throttled - before.throttled, now.throttled_s - before.throttled_s
    hot = max(now.warning_min - before.warning_min, now.critical_min - before.critical_min)
    degrees = f", {disk.health.temperature_c} °C" if disk.health else ""
    if times > 0 or slow > 0:
        how = f"{times} times" if times > 0 else f"for {slow} s"
        words = f"{name}: it slowed itself {how} because of heat{degrees}: cool it"
        return [Finding("throttled", words)]
    if hot > 0:
        words = f"{name}: it was too hot for {hot} min{degrees}, and counts no slowing: cool it"
        return [Finding("too_hot", words)]
    return []


def fallen(write: Rate) -> tuple[float, float, float] | None:
    """Speed at first and at last, and the bytes between; None where it held, or was too short.

    Medians of a quarter of the samples each, so that one slow sample decides nothing.
    """
    if len(write.series) < 8:
        return None
    speeds = [speed for _, speed in write.series]
    part = len(speeds) // 4
    first, last = statistics.median(speeds[:part]), statistics.median(speeds[-part:])
    if last >= FALLEN * first:
        return None
    slow = (
        i for i in range(len(speeds)) if statistics.median(speeds[i : i + part]) < FALLEN * first
    )
    at = next(slow)
    return first, last, write.bytes * sum(speeds[: at + part // 2]) / (sum(speeds) or 1)
