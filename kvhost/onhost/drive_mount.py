#!/usr/bin/env python3
"""The place at which a drive is mounted, and what must hold there: drive_mount.py PATH shows it.

While nothing is mounted at it, the mount point is a directory of mode 0000 that cannot be changed
(chattr +i, where the filesystem below knows it), so that nothing fills the root disk when the drive
is away.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import re
import stat
import struct
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

sys.dont_write_bytecode = True
if TYPE_CHECKING or __package__:
    from kvhost.onhost.drive_disk import Refused, maj_min, read_text, tool
else:
    from drive_disk import Refused, maj_min, read_text, tool

#: what the kernel shows of a filesystem that takes no writes (ext4, xfs after an error)
READ_ONLY = frozenset({"ro", "emergency_ro", "shutdown"})
FS_IOC_GETFLAGS, FS_IOC_SETFLAGS, IMMUTABLE = 0x80086601, 0x40086602, 0x10


@dataclass(frozen=True)
class Mount:
    """One line of /proc/self/mountinfo. numbers: "major:minor" of the device that was mounted."""

    target: str
    filesystem: str
    source: str
    numbers: str
    options: frozenset[str]
    root: str


def _unescape(word: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), word)


def mounted_at(target: str) -> Mount | None:
    """What is mounted at exactly this path (the last one, if several), None for nothing."""
    found = None
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as handle:
        for line in handle:
            left, _, right = line.partition(" - ")
            words, more = left.split(), right.split()
            if _unescape(words[4]) != target:
                continue
            source = _unescape(more[1])
            numbers = words[2]
            if os.path.exists(source):  # btrfs has a number of its own there
                st = os.stat(source)
                numbers = maj_min(st.st_rdev) if stat.S_ISBLK(st.st_mode) else numbers
            options = frozenset(f"{words[5]},{more[2] if len(more) > 2 else ''}".split(","))
            if options & READ_ONLY:  # of the mount, or of the filesystem after an error
                options = options - {"rw"} | {"ro"}
            found = Mount(target, more[0], source, numbers, options, _unescape(words[3]))
    return found


def disks_below(numbers: str) -> set[str]:
    """ "major:minor" of the whole disks that a device consists of (partition, LUKS, md)."""
    here = os.path.realpath(f"/sys/dev/block/{numbers}")
    if os.path.exists(f"{here}/partition"):
        return {read_text(f"{os.path.dirname(here)}/dev")}
    slaves = f"{here}/slaves"
    below = os.listdir(slaves) if os.path.isdir(slaves) else []
    if not below:
        return {numbers}
    return {disk for name in below for disk in disks_below(read_text(f"{slaves}/{name}/dev"))}


def change_immutable(path: str, wanted: bool) -> bool:
    """Sets or clears chattr's +i of a directory; False where the filesystem has no such thing."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        buffer = bytearray(8)
        try:
            fcntl.ioctl(fd, FS_IOC_GETFLAGS, buffer)
            flags = struct.unpack_from("I", buffer)[0]
            now = flags | IMMUTABLE if wanted else flags & ~IMMUTABLE
            if now != flags:
                struct.pack_into("I", buffer, 0, now)
                fcntl.ioctl(fd, FS_IOC_SETFLAGS, buffer)
        except OSError:
            return False
        return True
    finally:
        os.close(fd)


def check_mount_point(target: str) -> None:
    """Raises Refused when nothing is mounted there and the path cannot be a mount point."""
    if os.path.realpath(target) != target:
        why = f"{target} is, or lies behind, a link: it leads to {os.path.realpath(target)}"
        raise Refused("mount_point", why)
    if not os.path.lexists(target):
        above = os.path.dirname(target)
        while not os.path.lexists(above):
            above = os.path.dirname(above)
        if not os.path.isdir(above) or not os.access(above, os.W_OK):
            why = f"{target} cannot be made: {above} is no directory, or takes no writes"
            raise Refused("mount_point", why)
        return
    if not os.path.isdir(target):
        raise Refused("mount_point", f"{target} is there and is no directory")
    names = sorted(os.listdir(target))
    if names:
        what = ", ".join(names[:5])
        why = f"the mount point {target} is not empty ({what}): a drive mounted there would hide it"
        raise Refused("mount_point", why)


def close_mount_point(target: str) -> bool:
    """Makes the directory below the mount, which nothing can fill. Whether it is immutable too."""
    check_mount_point(target)
    os.makedirs(os.path.dirname(target), 0o755, exist_ok=True)
    if not os.path.isdir(target):
        os.mkdir(target, 0o000)
    st = os.stat(target)
    if stat.S_IMODE(st.st_mode) != 0 or (st.st_uid, st.st_gid) != (0, 0):
        change_immutable(target, False)
        os.chown(target, 0, 0)
        os.chmod(target, 0o000)
    return change_immutable(target, True)


def open_mount_point(target: str) -> None:
    """Gives the directory back as an ordinary one, when the drive is released."""
    if os.path.isdir(target):
        change_immutable(target, False)
        os.chmod(target, 0o755)


def has_systemd() -> bool:
    return os.path.isdir("/run/systemd/system")


def known_to_udev(path: str, uuid: str, seconds: float = 30) -> None:
    """Waits for udev's link to a filesystem, where there is udev.

    systemd unmounts at once what it believes to lie on a device that is not there.
    """
    if not os.path.isdir("/run/udev"):
        return
    tool("udevadm", "trigger", "--action=change", path, accept=(0, 1))
    deadline, link = time.monotonic() + seconds, f"/dev/disk/by-uuid/{uuid}"
    while os.path.realpath(link) != os.path.realpath(path):
        if time.monotonic() > deadline:
            print(f"udev shows no {link} after {seconds:.0f} s", file=sys.stderr, flush=True)
            return
        time.sleep(0.2)
    tool("udevadm", "settle", "--timeout=10", accept=(0, 1))


def mount(target: str, fstab: str) -> None:
    """Mounts what fstab says, so that a reboot does the same."""
    if has_systemd():
        tool("systemctl", "daemon-reload")
    tool("mount", "--fstab", fstab, "--target", target)


def trim_timer() -> str:
    """ "on", "off", or "none" where there is no systemd or no such timer."""
    if not has_systemd():
        return "none"
    state = tool("systemctl", "is-enabled", "fstrim.timer", accept=(0, 1, 4)).strip()
    return "on" if state == "enabled" else "off" if state == "disabled" else "none"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", help="a mount point")
    there = mounted_at(os.path.realpath(parser.parse_args().path))
    told = None
    if there is not None:
        told = {**vars(there), "options": sorted(there.options)}
        told["disks"] = sorted(disks_below(there.numbers))
    print(json.dumps(told))
    return 0


if __name__ == "__main__":
    sys.exit(main())
