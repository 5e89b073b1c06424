#!/usr/bin/env python3
"""Removes shared memory that a killed engine left behind: shm_sweep.py PATTERN …

Run before a service starts, as its user. A file in /dev/shm goes only if its name fits a pattern,
it is this user's own regular file, and no process maps or holds it: a stale pool of the cache
server would silently turn its shared memory off, and vLLM leaves 400 MB a crash. Prints what it
removed. Where a process of this user cannot be looked at, nothing is removed, and that is said.
Exit: always 0, because a service must not stay down for want of tidiness.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import stat
import sys

SHM = "/dev/shm"


def is_zombie(folder: str) -> bool:
    """A process that has ended and waits for its parent: it holds nothing, and shows nothing."""
    with open(f"{folder}/stat", encoding="utf-8", errors="replace") as handle:
        return handle.read().rpartition(")")[2].split()[0] in ("Z", "X")


def in_use() -> set[tuple[int, int]]:
    """(device, inode) of everything that a process of this user maps or has open.

    Files of this user are 0600: what another user's process could hold is not removed either, as
    only root could have opened it. Raises OSError if a process of this user cannot be looked at.
    """
    found: set[tuple[int, int]] = set()
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        folder = f"/proc/{name}"
        try:
            if os.stat(folder).st_uid != os.geteuid() or is_zombie(folder):
                continue
            for entry in os.listdir(f"{folder}/fd"):
                try:
                    st = os.stat(f"{folder}/fd/{entry}")
                except OSError:
                    continue  # closed meanwhile
                found.add((st.st_dev, st.st_ino))
            with open(f"{folder}/maps", encoding="utf-8", errors="replace") as maps:
                for line in maps:
                    fields = line.split(None, 5)
                    major, minor = (int(part, 16) for part in fields[3].split(":"))
                    found.add((os.makedev(major, minor), int(fields[4])))
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pattern", nargs="+", help="file names in /dev/shm, * allowed")
    patterns = parser.parse_args().pattern
    try:
        names = sorted(os.listdir(SHM))
    except FileNotFoundError:
        return 0
    try:
        used = in_use()
    except OSError as error:
        print(
            f"shm_sweep: nothing removed, a process cannot be looked at: {error}", file=sys.stderr
        )
        return 0
    for name in names:
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            continue
        path = f"{SHM}/{name}"
        try:
            st = os.lstat(path)
            ours = stat.S_ISREG(st.st_mode) and st.st_uid == os.geteuid()
            if ours and (st.st_dev, st.st_ino) not in used:
                os.unlink(path)
                print(f"shm_sweep: removed {path}, {st.st_size} bytes, which nobody used")
        except FileNotFoundError:
            continue
    return 0


if __name__ == "__main__":
    sys.exit(main())
