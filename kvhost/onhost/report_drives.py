#!/usr/bin/env python3
"""The part "drives" of a host's report: every drive, and the place where one is to be mounted.

report_drives.py [--mount PATH] [--state DIR]   as root; one JSON object on stdout. Reads only.

Run by report.py, and only where a drive is claimed or asked for: what nobody claims is not opened.
A host without block devices, or a container that may not open them, is told as it is.
"""

from __future__ import annotations

import argparse
import json
import os
import stat
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

sys.dont_write_bytecode = True  # bin/ stays as it was installed
if TYPE_CHECKING or __package__:
    from kvhost.onhost import drive_journal, drive_probe, drive_sys
else:  # they lie beside this file
    import drive_journal
    import drive_probe
    import drive_sys

MARKER = ".kvhost-drive.json"
MOST_ENTRIES = 20
Data = dict[str, Any]


def told(read: Callable[[], Any]) -> Data:
    """{"status", "why", "data"}: absent when the file is not there, else unreadable with why."""
    try:
        return {"status": "ok", "why": None, "data": read()}
    except FileNotFoundError as why:
        return {"status": "absent", "why": f"there is no {why.filename}", "data": None}
    except (OSError, ValueError) as why:
        return {"status": "unreadable", "why": str(why) or type(why).__name__, "data": None}


def journal_of(state: str) -> Any:
    data = drive_sys.json_file(os.path.join(state, drive_journal.FILE))
    if wrong := drive_journal.fault(data):
        raise ValueError(f"{state}/{drive_journal.FILE} is no journal of kvhost's: {wrong}")
    return data


def mount_point(path: str) -> Data:
    """The place itself, what is mounted on it, and what fstab would mount there."""
    normal = os.path.normpath(path)
    here = [mount for mount in drive_sys.mounts() if mount.point == normal]
    top = here[-1] if here else None
    below = [low for name in (drive_sys.devices_of(top) if top else [])
             for low in drive_sys.below(name)]  # fmt: skip
    try:
        kind = "directory" if stat.S_ISDIR(os.stat(normal).st_mode) else "other"
    except FileNotFoundError:
        kind = "other" if os.path.islink(normal) else "none"
    return {
        "path": path,
        "real_path": os.path.realpath(normal),
        "kind": kind,
        "entries": sorted(os.listdir(normal))[:MOST_ENTRIES] if kind == "directory" else [],
        "mounts": [f"{mount.source} ({mount.fs})" for mount in here],
        "filesystem": top.fs if top else None,
        "root": top.root if top else "/",
        "drives": sorted({name for name in below if not drive_sys.is_partition(name)}),
        "fstab": [what for what, where in drive_sys.fstab() if os.path.normpath(where) == normal],
        "marker": told(lambda: drive_sys.json_file(os.path.join(normal, MARKER))),
    }


def drives(mount: str | None, state: str | None) -> Data:
    absent = {"status": "absent", "why": "not asked for", "data": None}
    journal = told(lambda: journal_of(str(state))) if state else absent
    return {
        **drive_probe.probe_all(),
        "mount_point": told(lambda: mount_point(str(mount))) if mount else absent,
        "journal": journal,
    }


def main(argv: list[str] | None = None) -> int:
    cli = argparse.ArgumentParser(
        description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    cli.add_argument("--mount", help="where a drive is to be mounted")
    cli.add_argument("--state", help="directory of the journal of a run that was cut off")
    args = cli.parse_args(argv)
    try:
        found = drives(args.mount, args.state)
    except OSError as why:
        print(f"report_drives: block devices cannot be listed: {why}", file=sys.stderr)
        return 1
    print(json.dumps(found, separators=(",", ":")), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
