"""Reasons not to touch a claimed drive, and what a token must be. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from kvhost.drives.claim_table import title
from kvhost.drives.cloud import EPHEMERAL_MODELS, is_ephemeral
from kvhost.drives.types import Device, Drive, Drives
from kvhost.onhost.drive_probe import ERASABLE, token
from kvhost.plan.types import Refusal, unreadable
from kvhost.settings import Settings

#: the drive is somebody's at this moment
IN_USE = frozenset({"system", "mounted", "holder", "swap", "busy", "in_use", "fstab"})
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
LEAST_CACHE_GIB = 1  # of a cache that takes all there is


def device_of(drive: Drive) -> Device:
    if drive.device is None:
        raise ValueError("a drive that is not known was claimed")
    return drive.device


def no(code: str, what: str, needed: str, found: str, fix: str) -> Refusal:
    return Refusal("storage", code, what, needed, found, fix)


def foreign(drive: Drive, allowed: frozenset[str]) -> Iterator[Refusal]:
    """Findings that nothing allows, one refusal a kind."""
    device, kinds = device_of(drive), {f.kind for f in drive.findings}
    for kind in sorted(kinds - allowed, key=lambda kind: (kind != "system", kind)):
        details = "; ".join(f.detail for f in drive.findings if f.kind == kind)
        fix = _WHAT_TO_DO.get(kind, "claim another drive")
        if kind in IN_USE:
            what, needed = f"{title(device)} is in use ({kind})", "a drive that nothing uses"
            yield no("drive_in_use", what, needed, details, fix)
        else:
            what, needed = (
                f"{title(device)} does not do ({kind})",
                "a healthy drive, only this host's",
            )
            yield no("drive_not_usable", what, needed, details, fix)


def right_token(drives: Drives, drive: Drive) -> str | None:
    if drives.machine_id is None:
        return None
    identity = device_of(drive).model_dump(mode="json")
    return token(identity, drives.machine_id, [f.model_dump() for f in drive.findings])


def formatted(
    settings: Settings, drives: Drives, drive: Drive, resumes: bool
) -> Iterator[Refusal]:  # fmt: skip
    yield from foreign(drive, ERASABLE)
    yield from _large_enough(settings, drive)
    yield from _ephemeral(settings, drive)
    yield from mount_point(settings, drives)
    if drives.journal.status == "unreadable":
        yield unreadable("storage", "what a run before left on drives", drives.journal.why)
    held = [f for f in drive.findings if f.kind in ERASABLE]
    if not held or resumes or any(f.kind not in ERASABLE for f in drive.findings):
        return
    device, right = device_of(drive), right_token(drives, drive)
    if right is not None and right in (settings.drive_erase or "").split(","):
        return
    wrong = "; the drive_erase that is set is of another drive, machine or state of it"
    fix = (
        f"if all of it may be lost: drive_erase = {right!r} in this host's own data in the "
        "inventory; else claim another drive"
        if right
        else "claim another drive: without /etc/machine-id on this host no token can be bound to it"
    )
    yield no(
        "drive_not_blank",
        f"{title(device)} is not blank",
        "a drive that holds nothing at all, or the token for just this one",
        "; ".join(f"{f.kind}: {f.detail}" for f in held) + (wrong if settings.drive_erase else ""),
        fix,
    )


def _ephemeral(settings: Settings, drive: Drive) -> Iterator[Refusal]:
    model = device_of(drive).model
    if settings.drive_ephemeral and not is_ephemeral(model):
        yield no(
            "drive_not_ephemeral",
            f"{title(device_of(drive))} is not known to lose its contents at a stop",
            f"a model of {', '.join(EPHEMERAL_MODELS)}",
            f"model {model or 'none'}",
            "drive_ephemeral = False",
        )


def least_bytes(settings: Settings) -> int:
    """What a drive must have for its filesystem, the cache and the free space that is kept."""
    limit = LEAST_CACHE_GIB if settings.limit_gib is None else settings.limit_gib
    least = (limit + settings.free_floor_gib) * (1 << 30)
    return max(LEAST_BYTES[settings.drive_filesystem], int(least / (1 - FILESYSTEM_KEEPS)))


def _large_enough(settings: Settings, drive: Drive) -> Iterator[Refusal]:
    have, least = device_of(drive).size_bytes * settings.drive_count, least_bytes(settings)
    if have >= least:
        return
    limit, floor = settings.limit_gib, settings.free_floor_gib
    fits = have * (1 - FILESYSTEM_KEEPS) / (1 << 30) - floor
    cache = f"a cache of {LEAST_CACHE_GIB} GiB" if limit is None else f"cache_limit_gib {limit:g}"
    lower = f"cache_limit_gib = {int(fits)}, or " if limit is not None and fits >= 1 else ""
    yield no(
        "drive_too_small",
        f"{title(device_of(drive))} is too small",
        f"{least / 1e9:.2f} GB: {cache}, free_floor_gib {floor:g}, {FILESYSTEM_KEEPS:.0%} for the "
        f"filesystem, and no less than {LEAST_BYTES[settings.drive_filesystem] >> 20} MiB",
        f"{have / 1e9:.2f} GB ({have:,} bytes)",
        f"{lower}claim a larger drive, or lower free_floor_gib",
    )


def mount_point(settings: Settings, drives: Drives) -> Iterator[Refusal]:
    """The place must be free: what it holds would be hidden, and what is mounted is another's."""
    part, path = drives.mount_point, settings.resolved_drive_mount
    if part.data is None:
        yield unreadable("storage", f"drive_mount {path}", part.why)
        return
    place, another = part.data, "set drive_mount to a directory of its own"

    def taken(what: str, needed: str, found: str, fix: str = another) -> Refusal:
        return no("mount_point_taken", f"drive_mount {path} {what}", needed, found, fix)

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
