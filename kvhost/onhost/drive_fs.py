#!/usr/bin/env python3
"""Filesystems of a drive: made without force, read, told apart: drive_fs.py PATH shows one.

xfs, ext4 and btrfs, label kvhost. docs/drives.md has the measurements behind the options.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from typing import TYPE_CHECKING, Any

sys.dont_write_bytecode = True
if TYPE_CHECKING or __package__:
    from kvhost.onhost.drive_disk import Refused, blkid, step, tool
else:
    from drive_disk import Refused, blkid, step, tool

LABEL = "kvhost"
MARKER = ".kvhost-drive.json"
_SAFE = "rw,nodev,nosuid,noexec"
#: with lazytime an access time moves in memory and costs no write: last use is known exactly
OPTIONS = {
    "xfs": f"{_SAFE},strictatime,lazytime",
    "ext4": f"{_SAFE},strictatime,lazytime",
    "btrfs": f"{_SAFE},relatime",
}
#: mounted so, not even the filesystem's journal is replayed
_LOOK_ONLY = {
    "xfs": "ro,norecovery,nodev,nosuid,noexec,nouuid",
    "ext4": "ro,noload,nodev,nosuid,noexec",
    "btrfs": "ro,rescue=nologreplay,nodev,nosuid,noexec",
}


def make(path: str, filesystem: str, uuid: str, keep: tuple[int, ...]) -> None:
    """Raises Refused if anything lies on `path`, RuntimeError when mkfs fails. `keep`: see tool().

    mke2fs asks nobody when it has no terminal, so that the look before it is ours.
    """
    there = blkid(path)
    if there:
        raise Refused("not_empty", f"{path} holds something: {describe(there)}")
    argv = {
        "xfs": ("mkfs.xfs", "-q", "-L", LABEL, "-m", f"uuid={uuid}"),
        # the files of the cache are large: an inode for each 64 KiB; nothing is kept back for root
        "ext4": ("mkfs.ext4", "-q", "-L", LABEL, "-U", uuid, "-m", "0", "-i", "65536"),
        "btrfs": ("mkfs.btrfs", "-q", "-L", LABEL, "-U", uuid),
    }[filesystem]
    tool(*argv, path, keep=keep)
    sync(path)


def sync(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def describe(there: dict[str, str]) -> str:
    names = ("TYPE", "PTTYPE", "LABEL", "UUID")
    return ", ".join(f"{name} {there[name]}" for name in names if name in there) or "unknown"


def is_ours(there: dict[str, str]) -> bool:
    return there.get("LABEL") == LABEL and there.get("TYPE") in OPTIONS and "UUID" in there


def look(path: str, filesystem: str) -> dict[str, Any]:
    """{"mounts", "why", "marker", "others"}: what lies in a filesystem that is not mounted, without
    a write to it. marker: its text or None; others: names in its root beside lost+found.

    In a mount namespace of its own, which ends with the process that looks: a run that is killed
    leaves no mount behind, and nobody else can come to use it. Raises RuntimeError.
    """
    words = (sys.executable, os.path.abspath(__file__), path, "--look", filesystem)
    told: dict[str, Any] = json.loads(tool("unshare", "--mount", "--propagation", "slave", *words))
    if told["failed"]:
        raise RuntimeError(told["failed"])
    return told


def _look(path: str, filesystem: str) -> dict[str, Any]:
    told: dict[str, Any] = {"mounts": False, "why": None, "marker": None, "others": []}
    with tempfile.TemporaryDirectory(prefix="kvhost-look-") as folder:
        try:
            tool("mount", "-t", filesystem, "-o", _LOOK_ONLY[filesystem], path, folder)
        except RuntimeError as error:
            return {**told, "why": str(error), "failed": None}
        failed = None
        try:
            names = set(os.listdir(folder)) - {"lost+found", MARKER}
            told.update(mounts=True, marker=read_marker(folder), others=sorted(names))
        except (OSError, RuntimeError) as error:
            failed = str(error)
        tool("umount", "--lazy", folder)
        return {**told, "failed": failed}


def read_marker(folder: str) -> dict[str, Any] | None:
    """The marker of the filesystem mounted at `folder`, None without one. Raises RuntimeError."""
    path = os.path.join(folder, MARKER)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(fd, encoding="utf-8") as handle:
            data = json.loads(handle.read(65536))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise RuntimeError(f"the marker {path} is not readable: {error}") from error
    if not isinstance(data, dict) or not isinstance(data.get("uuid"), str):
        raise RuntimeError(f"the marker {path} is not one")
    return data


def finish_half_made(path: str, journal: dict[str, Any], keep: tuple[int, ...]) -> bool:
    """Whether a filesystem that a cut-off run was making is complete; if not, it is taken away.

    Raises Refused when what lies there is not the journal's, or holds files.
    """
    there = blkid(path)
    if not there:
        return False
    if there.get("UUID") != journal["fs_uuid"] or there.get("TYPE") != journal["filesystem"]:
        why = f"{path} holds what no run of kvhost put there: {describe(there)}"
        raise Refused("not_empty", why)
    found = look(path, journal["filesystem"])
    if found["others"]:
        why = f"{path}: somebody has put files there: {', '.join(found['others'][:5])}"
        raise Refused("not_empty", why)
    if found["mounts"] and there.get("LABEL") == LABEL:
        return True
    step("mkfs-again")
    tool("wipefs", "--quiet", "--all", "--types", journal["filesystem"], path, keep=keep)
    return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", help="a partition or another device with a filesystem")
    parser.add_argument("--look", metavar="FILESYSTEM", choices=sorted(OPTIONS), help="see look()")
    args = parser.parse_args()
    path = args.path
    if args.look:
        print(json.dumps(_look(path, args.look)))
        return 0
    there = blkid(path)
    inside = look(path, there["TYPE"]) if there.get("TYPE") in OPTIONS else None
    print(json.dumps({"blkid": there, "ours": is_ours(there), "inside": inside}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
