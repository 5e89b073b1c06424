#!/usr/bin/env python3
"""Our one line in /etc/fstab: drive_fstab.py show|check. Lines of others are never touched.

Our line is known by the option x-kvhost, which mount ignores. A new fstab takes the place of the
old one only when `findmnt --verify` finds no more wrong with it than with the old one.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import shutil
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

sys.dont_write_bytecode = True
if TYPE_CHECKING or __package__:
    from kvhost.onhost.drive_disk import Refused, tool
    from kvhost.onhost.drive_journal import sync_directory
else:
    from drive_disk import Refused, tool
    from drive_journal import sync_directory

__all__ = ["Entry", "entry_for", "install", "read", "with_entry", "without_ours"]

OURS = "x-kvhost"
#: after this what needs the drive fails; the boot itself waits for none of it (nofail)
#: how long systemd waits for the device at boot, in seconds; what comes later it does not mount
DEVICE_TIMEOUT_S = 60


@dataclass(frozen=True)
class Entry:
    """One line that mounts something; `line` is its index."""

    line: int
    source: str
    target: str
    kind: str
    options: tuple[str, ...]

    @property
    def ours(self) -> bool:
        return OURS in self.options


def unescape(word: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), word)


def escape(word: str) -> str:
    return re.sub(r"[\s\\#]", lambda found: f"\\{ord(found[0]):03o}", word)


def entries(text: str) -> list[Entry]:
    found = []
    for number, line in enumerate(text.split("\n")):
        words = line.split()
        if len(words) < 2 or words[0].startswith("#"):
            continue
        options = tuple(words[3].split(",")) if len(words) > 3 else ()
        kind = words[2] if len(words) > 2 else ""
        found.append(Entry(number, unescape(words[0]), unescape(words[1]), kind, options))
    return found


def _uuid(source: str) -> str | None:
    """Of UUID=… in its spellings, and of the link that udev makes."""
    for start in ("UUID=", "/dev/disk/by-uuid/"):
        if source.startswith(start):
            return source[len(start) :].strip('"').lower()
    return None


def entry_for(
    uuid: str, target: str, filesystem: str, options: str, timeout_s: int = DEVICE_TIMEOUT_S
) -> str:
    more = f"{options},nofail,x-systemd.device-timeout={timeout_s}s,{OURS}"
    return f"UUID={uuid} {escape(target)} {filesystem} {more} 0 0"


def with_entry(text: str, line: str, *, adopted: bool = False) -> str:
    """The text with our line, and with no other of ours. Pure.

    Raises Refused if a line of somebody else mounts something at the same place, or the same
    filesystem elsewhere; with `adopted` such a line that mounts it here is left in our place.
    """
    wanted = entries(line)[0]
    uuid = _uuid(wanted.source)
    for entry in entries(text):
        if entry.ours:
            continue
        here = os.path.normpath(entry.target) == os.path.normpath(wanted.target)
        same = _uuid(entry.source) == uuid
        if here and same and adopted:
            return without_ours(text)
        if here:
            raise Refused(
                "fstab_taken",
                f"/etc/fstab mounts {entry.source} at {entry.target} already (line "
                f"{entry.line + 1}), and that line is not kvhost's: take it out, or set "
                "drive_mount",
            )
        if same:
            raise Refused(
                "fstab_taken",
                f"/etc/fstab mounts the drive's filesystem at {entry.target} (line "
                f"{entry.line + 1}), and that line is not kvhost's: take it out",
            )
    ours = [entry for entry in entries(text) if entry.ours]
    lines = text.split("\n")
    if ours:
        lines[ours[0].line] = line
        for entry in reversed(ours[1:]):
            del lines[entry.line]
        return "\n".join(lines)
    if text and not text.endswith("\n"):
        text += "\n"
    return f"{text}{line}\n"


def without_ours(text: str) -> str:
    """The text without any line of ours; all else stays byte for byte. Pure."""
    ours = {entry.line for entry in entries(text) if entry.ours}
    return "\n".join(line for n, line in enumerate(text.split("\n")) if n not in ours)


def read(path: str) -> str:
    """ "" without such a file. Bytes that are no UTF-8 survive."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape", newline="") as handle:
            return handle.read()
    except FileNotFoundError:
        return ""


def check_replaceable(path: str) -> None:
    """Raises Refused for a file that install() could not put another in the place of: immutable,
    on a read-only filesystem, or mounted as a file (containers do that)."""
    real = os.path.realpath(path)
    there = [one for one in (real, os.path.dirname(real)) if os.path.lexists(one)]
    if not all(os.access(one, os.W_OK) for one in there) or os.path.isdir(real):
        raise Refused("fstab_taken", f"{path} cannot be written (read-only, or chattr +i)")
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as handle:
        if any(unescape(line.split(" ")[4]) == real for line in handle):
            raise Refused("fstab_taken", f"{path} is a mount of its own, and cannot be replaced")


def faults(path: str) -> tuple[int, int]:
    """(parse errors, errors) that findmnt finds. Raises RuntimeError without its summary."""
    words = shlex.quote(path)  # its summary goes to stderr
    text = tool("sh", "-c", f"findmnt --verify --tab-file {words} 2>&1", accept=(0, 1))
    if found := re.search(r"(\d+) parse errors?, (\d+) errors?", text):
        return int(found[1]), int(found[2])
    if "Success" in text:
        return 0, 0
    raise RuntimeError(f"findmnt --verify says nothing of {path}: {text[-200:]!r}")


def install(path: str, text: str, *, verify: bool = True) -> bool:
    """Puts the text in the place of the file, whole or not at all; False when it is the same.

    Raises RuntimeError when the new one has more faults than the old one, OSError.
    """
    real = os.path.realpath(path)
    old = read(real)
    if old == text:
        return False
    new = f"{real}.kvhost-new"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(new)
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        data = text.encode("utf-8", "surrogateescape")
        with os.fdopen(fd, "wb") as handle:
            handle.write(data)
            handle.flush()
            if os.path.exists(real):
                st = os.stat(real)
                os.fchown(handle.fileno(), st.st_uid, st.st_gid)
                shutil.copystat(real, new)
            else:
                os.fchmod(handle.fileno(), 0o644)
            os.fsync(handle.fileno())
        before = faults(real) if verify and old.strip() else (0, 0)
        after = faults(new) if verify else (0, 0)
        if after[0] > before[0] or after[1] > before[1]:
            raise RuntimeError(
                f"the new {path} would have faults (findmnt --verify): {after[0]} parse errors and "
                f"{after[1]} errors instead of {before[0]} and {before[1]}; nothing was changed"
            )
        if read(real) != old:
            raise RuntimeError(f"{path} was changed by somebody else at this moment: try again")
        os.replace(new, real)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(new)
    sync_directory(os.path.dirname(real))
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("show", "check"), help="our line, or the faults")
    parser.add_argument("--fstab", default="/etc/fstab")
    args = parser.parse_args()
    if args.what == "check":
        print("{} parse errors, {} errors".format(*faults(args.fstab)))
    else:
        lines = read(args.fstab).split("\n")
        print("\n".join(lines[e.line] for e in entries(read(args.fstab)) if e.ours))
    return 0


if __name__ == "__main__":
    sys.exit(main())
