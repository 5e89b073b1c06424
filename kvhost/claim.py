"""Which drive of a host the settings mean, and what may be done to it. Pure.

All criteria that are set must be true of a drive, and exactly `drive_count` drives may be left.
What is left is kept, mounted, adopted or formatted, or refused, with all drives in a table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from kvhost._drive_values import BY_ID
from kvhost.claim_match import mismatches, near_misses, wanted
from kvhost.claim_table import drive_lines, listed, title
from kvhost.drive_types import Device, Drive, Drives
from kvhost.onhost.drive_probe import ERASABLE, token
from kvhost.plan_types import Refusal, unreadable
from kvhost.settings import Settings

Kind = Literal["keep", "mount", "adopt", "format"]
#: the drive is somebody's at this moment
IN_USE = frozenset({"system", "mounted", "holder", "swap", "busy", "in_use", "fstab"})
#: what is said of a drive of kvhost's own as well as of a foreign one
OF_OURS = frozenset({"mounted", "holder", "busy", "in_use", "partition_table", "signature",
                     "leftover", "health", "shareable"})  # fmt: skip
_WHAT_TO_DO = {
    "system": "claim another drive: this one holds the running system",
    "mounted": "if it may go: umount it, take it out of /etc/fstab, run again",
    "holder": "if it may go: take apart what is built on it (vgchange -an, mdadm --stop, …)",
    "swap": "if it may go: swapoff, and take it out of /etc/fstab",
    "busy": "end what holds it: lsblk, mdadm --detail, zpool status, pvs show what it is",
    "in_use": "end the process that has it open",
    "fstab": "if it may go: take its line out of /etc/fstab",
    "read_only": "find out why it is read-only (dmesg); kvhost needs a drive that can be written",
    "health": "replace the drive",
    "no_identity": "claim a drive that can be told from others; a virtual one needs serial= set",
    "fabric": "claim a drive inside this machine: others can write to this one at any time",
    "multipath": "claim a drive with one path",
    "hidden": "claim the drive itself, not one of its paths",
    "zoned": "claim a drive without zones",
    "not_a_drive": "claim a whole drive",
}
# A filesystem keeps something for itself; below these its own tools refuse or nothing is left.
LEAST_BYTES = {"xfs": 320 << 20, "ext4": 64 << 20, "btrfs": 256 << 20}
FILESYSTEM_KEEPS = 0.05


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
        return _device(self.drive)


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
    if refusals:
        table = "all drives here:\n" + listed(settings, drives)
        refusals[0] = replace(refusals[0], found=f"{refusals[0].found}\n{table}")
        return Claim((), tuple(refusals))
    return Claim(tuple(claimed), ())


def _device(drive: Drive) -> Device:
    if drive.device is None:
        raise ValueError("a drive that is not known was claimed")
    return drive.device


def _no(code: str, what: str, needed: str, found: str, fix: str) -> Refusal:
    return Refusal("storage", code, what, needed, found, fix)


def _counted(settings: Settings, drives: Drives, matching: list[Drive]) -> Iterator[Refusal]:
    count, asked = settings.drive_count, wanted(settings)
    needed = f"{'exactly one drive' if count == 1 else f'exactly {count} drives'} with {asked}"
    if not matching:
        near = near_misses(settings, drives)
        yield _no(
            "drive_not_found",
            "no drive of this host is the claimed one",
            needed,
            f"{len(drives.drives)} drives, none of them that" + "".join(f"\n{n}" for n in near),
            "copy the drive_by_id of the drive that you mean from the table"
            if any(drive.device and drive.device.by_id for drive in drives.drives)
            else "attach the drive, or correct the drive settings by the table",
        )
    elif len(matching) > count:
        names = ", ".join(title(_device(drive)) for drive in matching)
        yield _no(
            "drive_ambiguous",
            f"{len(matching)} drives fit the claim",
            needed,
            names,
            "add a criterion that is true of one alone; drive_by_id always is",
        )
    elif len(matching) < count:
        yield _no(
            "drive_too_few",
            f"{len(matching)} of {count} drives are there",
            needed,
            ", ".join(title(_device(drive)) for drive in matching),
            f"attach the others, or set drive_count = {len(matching)}",
        )


def _same_identity(drive: Drive, drives: Drives) -> Iterator[Refusal]:
    """Two rows of one identity: one drive on two paths, or copies; either way not one drive."""
    mine = _device(drive)
    for row in drives.drives:
        other = row.device
        if other is None or other.name == mine.name:
            continue
        same_wwn = mine.wwn is not None and mine.wwn == other.wwn
        both = mine.serial is not None and (mine.serial, mine.model) == (other.serial, other.model)
        if same_wwn or (both and mine.wwn is None):
            yield _no(
                "drive_not_unique",
                f"{mine.path} and {other.path} say that they are the same drive",
                "a drive whose WWN, or model and serial, no other drive has",
                f"both: {f'WWN {mine.wwn}' if same_wwn else f'serial {mine.serial}'}",
                "if it is one drive on two cables, take one off; if they are two, claim another",
            )


def _judged(settings: Settings, drives: Drives, drive: Drive) -> Claimed | list[Refusal]:
    device = _device(drive)
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
        refusals += _formatted(settings, drives, drive, resumes)
        given = settings.drive_erase
        return refusals or Claimed(drive, "format", _token_of(settings, drives, drive, given),
                                   resumes)  # fmt: skip
    return refusals or Claimed(drive, action)


def _foreign(drive: Drive, allowed: frozenset[str]) -> Iterator[Refusal]:
    """Findings that nothing allows, one refusal a kind."""
    device, kinds = _device(drive), {f.kind for f in drive.findings}
    for kind in sorted(kinds - allowed, key=lambda kind: (kind != "system", kind)):
        details = "; ".join(f.detail for f in drive.findings if f.kind == kind)
        in_use = kind in IN_USE
        yield _no(
            "drive_in_use" if in_use else "drive_not_usable",
            f"{title(device)} {'is in use' if in_use else 'is not fit for it'} ({kind})",
            "a drive that nothing uses" if in_use else "a healthy drive of this machine alone",
            details,
            _WHAT_TO_DO.get(kind, "claim another drive"),
        )


def _own(settings: Settings, drives: Drives, drive: Drive, refusals: list[Refusal]) -> Kind:
    """A drive that kvhost formatted before: kept as it is, whatever a token says."""
    device = _device(drive)
    own, mount = device.kvhost, settings.resolved_drive_mount
    if own is None:
        raise ValueError("not a drive of kvhost's")
    refusals += _foreign(drive, OF_OURS)
    if own.encrypted != settings.drive_encrypt:
        refusals.append(
            _no(
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
            _no(
                "drive_filesystem_differs",
                f"{title(device)} has another filesystem",
                f"drive_filesystem = {settings.drive_filesystem!r}",
                f"{own.filesystem}, made by kvhost",
                f"drive_filesystem = {own.filesystem!r}, or release the drive first",
            )
        )
    if own.mounted_at and mount not in own.mounted_at:
        refusals.append(
            _no(
                "drive_in_use",
                f"{title(device)} is kvhost's and mounted elsewhere",
                f"drive_mount {mount}, or not mounted",
                ", ".join(own.mounted_at),
                f"drive_mount = {own.mounted_at[0]!r}, or release the drive first",
            )
        )
    if not own.mounted_at:
        refusals += _mount_point(settings, drives)
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
    device, place = _device(drive), drives.mount_point.data
    if place is None:
        return
    mounted = [f for f in drive.findings if f.kind == "mounted"]
    yield from _foreign(drive, OF_OURS - {"holder"} | {"fstab"})
    if len(mounted) > 1:
        yield from _foreign(drive, OF_OURS - {"mounted"} | {"fstab"})
    entries = set(place.entries) - {"lost+found", ".kvhost-drive.json"}
    adopted_before = place.marker.status == "ok"
    if place.marker.status == "unreadable":
        yield unreadable("storage", f"kvhost's marker in {place.path}", place.marker.why)
    if not settings.drive_adopt:
        yield _no(
            "drive_not_adoptable",
            f"{title(device)} is mounted at {place.path} already, and kvhost did not format it",
            "drive_adopt = True, or a drive that is not mounted",
            f"{place.filesystem} at {place.path}",
            "drive_adopt = True uses it as it is, if it is empty",
        )
    if place.filesystem != settings.drive_filesystem:
        yield _no(
            "drive_not_adoptable",
            f"the filesystem at {place.path} is of another kind",
            f"drive_filesystem = {settings.drive_filesystem!r}",
            str(place.filesystem),
            f"drive_filesystem = {place.filesystem!r}, if kvhost can use it (xfs, ext4, btrfs)",
        )
    if entries and not adopted_before:
        yield _no(
            "drive_not_adoptable",
            f"the filesystem at {place.path} is not empty",
            "nothing in it but lost+found",
            ", ".join(sorted(entries)[:8]),
            "move what is there, or claim another drive",
        )


def _is_cut_off(drives: Drives, device: Device) -> bool:
    from kvhost.onhost import drive_journal

    journal = drives.journal.data
    return drive_journal.unfinished(journal, device.model_dump(mode="json")) is not None


def _token_of(
    settings: Settings, drives: Drives, drive: Drive, given: str | None
) -> str | None:  # fmt: skip
    """Of several tokens the one that fits; a single one as it is (of data that was found by
    reading the whole drive the plan does not know, the step that writes does)."""
    if not given:
        return None
    right = _right_token(drives, drive)
    return right if right in given.split(",") else given if "," not in given else None


def _right_token(drives: Drives, drive: Drive) -> str | None:
    if drives.machine_id is None:
        return None
    identity = _device(drive).model_dump(mode="json")
    return token(identity, drives.machine_id, [f.model_dump() for f in drive.findings])


def _formatted(
    settings: Settings, drives: Drives, drive: Drive, resumes: bool
) -> Iterator[Refusal]:  # fmt: skip
    yield from _foreign(drive, ERASABLE)
    yield from _large_enough(settings, drive)
    yield from _mount_point(settings, drives)
    if drives.journal.status == "unreadable":
        yield unreadable("storage", "what a run before left on drives", drives.journal.why)
    held = [f for f in drive.findings if f.kind in ERASABLE]
    if not held or resumes or any(f.kind not in ERASABLE for f in drive.findings):
        return
    device, right = _device(drive), _right_token(drives, drive)
    if right is not None and right in (settings.drive_erase or "").split(","):
        return
    wrong = "; the drive_erase that is set is of another drive, machine or state of it"
    fix = (
        f"if all of it may be lost: drive_erase = {right!r} in this host's own data in the "
        "inventory; else claim another drive"
        if right
        else "claim another drive: without /etc/machine-id on this host no token can be bound to it"
    )
    yield _no(
        "drive_not_blank",
        f"{title(device)} is not blank",
        "a drive that holds nothing at all, or the token for just this one",
        "; ".join(f"{f.kind}: {f.detail}" for f in held) + (wrong if settings.drive_erase else ""),
        fix,
    )


def least_bytes(settings: Settings) -> int:
    """What a drive must have for its filesystem, the cache and the free space that is kept."""
    cache = (settings.cache_limit_gib + settings.free_floor_gib) * (1 << 30)
    return max(LEAST_BYTES[settings.drive_filesystem], int(cache / (1 - FILESYSTEM_KEEPS)))


def _large_enough(settings: Settings, drive: Drive) -> Iterator[Refusal]:
    have, least = _device(drive).size_bytes * settings.drive_count, least_bytes(settings)
    if have < least:
        fits = have * (1 - FILESYSTEM_KEEPS) / (1 << 30) - settings.free_floor_gib
        yield _no(
            "drive_too_small",
            f"{title(_device(drive))} is too small",
            f"{least / 1e9:.2f} GB: cache_limit_gib {settings.cache_limit_gib:g} and free_floor_gib "
            f"{settings.free_floor_gib:g} GiB, {FILESYSTEM_KEEPS:.0%} for the filesystem, and no "
            f"less than {LEAST_BYTES[settings.drive_filesystem] >> 20} MiB",
            f"{have / 1e9:.2f} GB ({have:,} bytes)",
            f"cache_limit_gib = {int(fits)}, or a larger drive"
            if fits >= 1
            else "claim a larger drive, or lower cache_limit_gib and free_floor_gib",
        )


def _mount_point(settings: Settings, drives: Drives) -> Iterator[Refusal]:
    """The place must be free: what it holds would be hidden, and what is mounted is another's."""
    part, path = drives.mount_point, settings.resolved_drive_mount
    if part.data is None:
        yield unreadable("storage", f"drive_mount {path}", part.why)
        return
    place, another = part.data, "set drive_mount to a directory of its own"

    def taken(what: str, needed: str, found: str, fix: str = another) -> Refusal:
        return _no("mount_point_taken", f"drive_mount {path} {what}", needed, found, fix)

    if place.mounts:
        needed = "nothing mounted, or the claimed drive"
        yield taken("has something else mounted on it", needed, ", ".join(place.mounts))
    elif place.kind == "other":
        yield taken("is no directory", "a directory, or nothing", "a file or a link")
    elif place.entries:
        some = ", ".join(place.entries[:8])
        yield taken("is not empty", "an empty directory: a mount would hide what is in it", some)
    if place.real_path != path:
        needed, found = "a path without links", f"it leads to {place.real_path}"
        yield taken("lies behind a link", needed, found, f"drive_mount = {place.real_path!r}")
    if place.fstab:
        found = f"/etc/fstab mounts {', '.join(place.fstab)} there"
        fix = f"take that line out, or {another}"
        yield taken("has a line in /etc/fstab", "no line, or kvhost's own", found, fix)


def by_id_name(value: str) -> str:
    return value.removeprefix(BY_ID)
