"""Which drive of a host the settings mean, and what may be done to it. Pure.

All criteria that are set must be true of a drive, and exactly `drive_count` drives may be left.
What is left is kept, mounted, adopted or formatted, or refused, with all drives in a table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from kvhost.basics import counted
from kvhost.drives.claim_match import mismatches, near_misses, wanted
from kvhost.drives.claim_reasons import device_of, foreign, formatted, mount_point, no, right_token
from kvhost.drives.claim_table import drive_lines, listed, title
from kvhost.drives.types import Device, Drive, Drives
from kvhost.onhost import drive_journal
from kvhost.plan.types import Refusal, unreadable
from kvhost.settings import Settings

Kind = Literal["keep", "mount", "adopt", "format"]
#: what is said of a drive of kvhost's own as well as of a foreign one
OF_OURS = frozenset({"mounted", "holder", "busy", "in_use", "partition_table", "signature",
                     "leftover", "health", "shareable"})  # fmt: skip


@dataclass(frozen=True)
class Claimed:
    """One drive and what is to happen to it. `token`: of the settings, when it is needed.

    `resumes`: a run that formatted it was cut off, and this one goes on.
    """

    drive: Drive
    action: Kind
    token: str | None = None
    resumes: bool = False

    @property
    def device(self) -> Device:
        return device_of(self.drive)


@dataclass(frozen=True)
class Claim:
    """The drives, or why not. With a refusal `claimed` is empty."""

    claimed: tuple[Claimed, ...]
    refusals: tuple[Refusal, ...]


def claim(settings: Settings, drives: Drives) -> Claim:
    """What the settings' criteria come to on this host. Settings that claim nothing: nothing."""
    if not settings.claims_a_drive:
        return Claim((), ())
    matching = [d for d in drives.drives if d.device and not mismatches(settings, d.device)]
    refusals = list(_counted(settings, drives, matching))
    claimed = []
    if not refusals:
        for drive in matching:
            found = list(_same_identity(drive, drives)) or _judged(settings, drives, drive)
            if isinstance(found, Claimed):
                claimed.append(found)
            else:
                refusals += found
    refusals += _one_set(claimed)
    if refusals:
        table = "all drives here:\n" + listed(settings, drives)
        refusals[0] = replace(refusals[0], found=f"{refusals[0].found}\n{table}")
        return Claim((), tuple(refusals))
    return Claim(tuple(claimed), ())


def _counted(settings: Settings, drives: Drives, matching: list[Drive]) -> Iterator[Refusal]:
    count, asked = settings.drive_count, wanted(settings)
    needed = f"{'exactly one drive' if count == 1 else f'exactly {count} drives'} with {asked}"
    if not matching:
        near = near_misses(settings, drives)
        yield no(
            "drive_not_found",
            "no drive of this host is the claimed one",
            needed,
            f"{counted(len(drives.drives), 'drive')}, none of them that"
            + "".join(f"\n{n}" for n in near),
            "copy the drive_by_id of the drive that you mean from the table"
            if any(drive.device and drive.device.by_id for drive in drives.drives)
            else "attach the drive, or correct the drive settings by the table",
        )
    elif len(matching) > count:
        names = ", ".join(title(device_of(drive)) for drive in matching)
        yield no(
            "drive_ambiguous",
            f"{len(matching)} drives fit the claim",
            needed,
            names,
            "add a criterion that is true of one alone; drive_by_id always is",
        )
    elif len(matching) < count:
        yield no(
            "drive_too_few",
            f"only {len(matching)} of {count} drives found",
            needed,
            ", ".join(title(device_of(drive)) for drive in matching),
            f"attach the others, or set drive_count = {len(matching)}",
        )


def _same_identity(drive: Drive, drives: Drives) -> Iterator[Refusal]:
    """Two rows of one identity: one drive on two paths, or copies; either way not one drive."""
    mine = device_of(drive)
    for row in drives.drives:
        other = row.device
        if other is None or other.name == mine.name:
            continue
        same_wwn = mine.wwn is not None and mine.wwn == other.wwn
        both = mine.serial is not None and (mine.serial, mine.model) == (other.serial, other.model)
        if same_wwn or (both and mine.wwn is None):
            yield no(
                "drive_not_unique",
                f"{mine.path} and {other.path} say that they are the same drive",
                "a drive whose WWN, or model and serial, no other drive has",
                f"both: {f'WWN {mine.wwn}' if same_wwn else f'serial {mine.serial}'}",
                "if it is one drive on two cables, take one off; if they are two, claim another",
            )


def _one_set(claimed: list[Claimed]) -> Iterator[Refusal]:
    """Several drives are all new, or all kvhost's: RAID 0 without one of its members is lost."""
    new = [title(one.device) for one in claimed if one.action == "format" and not one.resumes]
    old = [title(one.device) for one in claimed if one.action != "format"]
    if new and old:
        yield no(
            "drive_set_differs",
            "some of the claimed drives are kvhost's already, and some are not",
            "drives that are all new, or all of one array of kvhost's",
            f"kvhost's: {', '.join(old)}; new: {', '.join(new)}",
            "if a drive was replaced, what was on the array is lost: release the others, and wipe "
            "them with the token that kvhost release prints",
        )


def _judged(settings: Settings, drives: Drives, drive: Drive) -> Claimed | list[Refusal]:
    device = device_of(drive)
    if drive.status != "ok":
        row = unreadable("storage", f"what {title(device)} holds", drive.why)
        return [replace(row, found=f"{row.found}; {drive_lines(drive)}")]
    refusals: list[Refusal] = []
    if device.kvhost is not None:
        action: Kind = _own(settings, drives, drive, refusals)
    elif _is_mounted_there(drives, device):
        action = "adopt"
        refusals += _adopted(settings, drives, drive)
    else:
        action = "format"
    if action == "format":
        resumes = _is_cut_off(drives, device)
        refusals += formatted(settings, drives, drive, resumes)
        given = settings.drive_erase
        return refusals or Claimed(drive, "format", _token_of(settings, drives, drive, given),
                                   resumes)  # fmt: skip
    return refusals or Claimed(drive, action)


def _own(settings: Settings, drives: Drives, drive: Drive, refusals: list[Refusal]) -> Kind:
    """A drive that kvhost formatted before: kept as it is, whatever a token says."""
    device = device_of(drive)
    own, mount = device.kvhost, settings.resolved_drive_mount
    if own is None:
        raise ValueError("not a drive of kvhost's")
    refusals += foreign(drive, OF_OURS)
    if own.encrypted is not None and own.encrypted != settings.drive_encrypt:
        refusals.append(
            no(
                "drive_filesystem_differs",
                f"{title(device)} is {'' if own.encrypted else 'not '}encrypted",
                f"drive_encrypt = {settings.drive_encrypt}",
                f"{'a LUKS' if own.encrypted else 'a plain'} partition of kvhost's",
                f"drive_encrypt = {own.encrypted}, or release the drive first",
            )
        )
    known = own.filesystem not in (None, "crypto_LUKS", "linux_raid_member")
    if known and own.filesystem != settings.drive_filesystem:
        refusals.append(
            no(
                "drive_filesystem_differs",
                f"{title(device)} has another filesystem",
                f"drive_filesystem = {settings.drive_filesystem!r}",
                f"{own.filesystem}, made by kvhost",
                f"drive_filesystem = {own.filesystem!r}, or release the drive first",
            )
        )
    if own.mounted_at and mount not in own.mounted_at:
        refusals.append(
            no(
                "drive_in_use",
                f"{title(device)} is kvhost's and mounted elsewhere",
                f"drive_mount {mount}, or not mounted",
                ", ".join(own.mounted_at),
                f"drive_mount = {own.mounted_at[0]!r}, or release the drive first",
            )
        )
    if not own.mounted_at:
        refusals += mount_point(settings, drives)
        return "mount"
    if own.marker.status == "unreadable":
        refusals.append(unreadable("storage", f"kvhost's marker on {title(device)}",
                                   own.marker.why))  # fmt: skip
    return "keep" if own.marker.status == "ok" else "mount"


def _is_mounted_there(drives: Drives, device: Device) -> bool:
    place = drives.mount_point.data
    return place is not None and bool(place.mounts) and place.drives == [device.name]


def _adopted(settings: Settings, drives: Drives, drive: Drive) -> Iterator[Refusal]:
    """A foreign filesystem of the claimed drive, mounted where it should be."""
    device, place = device_of(drive), drives.mount_point.data
    if place is None:
        return
    mounted = [f for f in drive.findings if f.kind == "mounted"]
    yield from foreign(drive, OF_OURS - {"holder"} | {"fstab"})
    if len(mounted) > 1:
        yield from foreign(drive, OF_OURS - {"mounted"} | {"fstab"})
    entries = set(place.entries) - {"lost+found", ".kvhost-drive.json"}
    adopted_before = place.marker.status == "ok"
    if place.marker.status == "unreadable":
        yield unreadable("storage", f"kvhost's marker in {place.path}", place.marker.why)
    if not settings.drive_adopt:
        yield no(
            "drive_not_adoptable",
            f"{title(device)} is mounted at {place.path} already, and kvhost did not format it",
            "drive_adopt = True, or a drive that is not mounted",
            f"{place.filesystem} at {place.path}",
            "drive_adopt = True uses it as it is, if it is empty",
        )
    if place.filesystem != settings.drive_filesystem:
        yield no(
            "drive_not_adoptable",
            f"the filesystem at {place.path} is of another kind",
            f"drive_filesystem = {settings.drive_filesystem!r}",
            str(place.filesystem),
            f"drive_filesystem = {place.filesystem!r}, if kvhost can use it (xfs, ext4, btrfs)",
        )
    if place.root != "/":
        yield no(
            "drive_not_adoptable",
            f"what is mounted at {place.path} is a part of its filesystem",
            "the whole filesystem, from its root on",
            f"its directory {place.root}",
            "mount the filesystem itself there (no bind mount, no subvolume), or claim another",
        )
    if entries and not adopted_before:
        yield no(
            "drive_not_adoptable",
            f"the filesystem at {place.path} is not empty",
            "nothing in it but lost+found",
            ", ".join(sorted(entries)[:8]),
            "move what is there, or claim another drive",
        )


def _is_cut_off(drives: Drives, device: Device) -> bool:
    journal = drives.journal.data
    return drive_journal.unfinished(journal, device.model_dump(mode="json")) is not None


def _token_of(
    settings: Settings, drives: Drives, drive: Drive, given: str | None
) -> str | None:  # fmt: skip
    """Of several tokens the one that fits; a single one as it is (of data that was found by
    reading the whole drive the plan does not know, the step that writes does)."""
    if not given:
        return None
    right = right_token(drives, drive)
    return right if right in given.split(",") else given if "," not in given else None
