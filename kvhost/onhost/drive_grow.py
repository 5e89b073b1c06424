#!/usr/bin/env python3
"""Has the filesystem of a kvhost drive use a disk that became larger: drive_grow.py --state DIR

For virtual disks and cloud volumes. The disk has to be mounted at its place. The partition table
is written anew for the size that the disk has now, the backup first; then the kernel, then the
filesystem is told. A run that was cut off is completed by the next. JSON on stdout. Exit: 0 done
or nothing to do, 3 refused, 1 failed, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import TYPE_CHECKING, Any

sys.dont_write_bytecode = True
if TYPE_CHECKING or __package__:
    from kvhost.onhost import (
        drive_apply,
        drive_fs,
        drive_gpt,
        drive_journal,
        drive_mount,
        drive_probe,
    )
    from kvhost.onhost.drive_disk import Disk, Refused, read_text, say, step, tool
else:
    import drive_apply
    import drive_fs
    import drive_gpt
    import drive_journal
    import drive_mount
    import drive_probe
    from drive_disk import Disk, Refused, read_text, say, step, tool

Data = dict[str, Any]


def uuids(disk: Disk) -> tuple[str, str]:
    """(disk GUID, partition UUID) of our table, from its beginning or, torn, from its end.

    Raises Refused unless it is a table of one kvhost partition.
    """
    fd = os.open(disk.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for header_at in (disk.sector, disk.size - disk.sector):
            found = drive_gpt.parse(lambda at, n: os.pread(fd, n, at), header_at, disk.sector)
            if found is not None:
                return found
    finally:
        os.close(fd)
    raise Refused("not_ours", f"{disk.path} has no whole table with one partition kvhost")


def is_grown(state: str) -> bool:
    """Whether the drive was last seen with the size that it has now."""
    record = drive_journal.read_record(state)
    now = drive_mount.mounted_at(record["mount"]) if record else None
    if record is None or now is None:
        return False
    sizes = [
        int(read_text(f"/sys/dev/block/{numbers}/size")) * 512
        for numbers in drive_mount.disks_below(now.numbers)
    ]
    return sizes == [record["drive"]["size_bytes"]]


def grow(state: str) -> Data:
    record = drive_journal.read_record(state)
    now = drive_mount.mounted_at(record["mount"]) if record else None
    if record is None or now is None:
        raise Refused(
            "not_mounted", "no drive of kvhost's is mounted here: kvhost storage does that"
        )
    marker = drive_fs.read_marker(record["mount"])
    if marker is None or marker["uuid"].lower() != record["uuid"].lower():
        raise Refused("not_ours", f"{record['mount']} is not the drive that kvhost mounted")
    disks = drive_mount.disks_below(now.numbers)
    if len(disks) != 1 or not os.path.exists(f"/sys/dev/block/{now.numbers}/partition"):
        raise Refused("layers", f"{now.source} is not one plain partition: it cannot be grown")
    numbers = disks.pop()
    name = os.path.basename(os.path.realpath(f"/sys/dev/block/{numbers}"))
    changed = []
    before = os.statvfs(record["mount"])
    with Disk(f"/dev/{name}", numbers, None) as disk:
        disk.lock()
        wanted = drive_gpt.geometry(disk.size, disk.sector)
        sysfs = f"/sys/dev/block/{now.numbers}"
        have = int(read_text(f"{sysfs}/size")) * 512
        if int(read_text(f"{sysfs}/start")) * 512 != wanted.start or have > wanted.length:
            raise Refused("not_ours", f"{now.source} does not lie as kvhost lays a partition")
        table = drive_gpt.table(disk.size, disk.sector, *uuids(disk))
        fd = os.open(disk.path, os.O_RDWR | os.O_CLOEXEC)  # mounted: nobody has it alone
        try:
            for number, (at, data) in enumerate(table.items(), 1):
                if os.pread(fd, len(data), at) != data:
                    step(f"grow-{number}")
                    os.pwrite(fd, data, at)
                    os.fsync(fd)
                    changed.append(f"table, part {number}")
        finally:
            os.close(fd)
        step("grow-kernel")
        if have < wanted.length:
            tool("partx", "--update", "--nr", "1", disk.path, accept=(0, 1))
            if int(read_text(f"{sysfs}/size")) * 512 != wanted.length:
                raise RuntimeError(f"the kernel does not take the new size of {now.source}")
            changed.append(f"{now.source}: {have} -> {wanted.length} bytes")
    step("grow-filesystem")
    {
        "xfs": lambda: tool("xfs_growfs", "-d", record["mount"]),
        "ext4": lambda: tool("resize2fs", now.source),
        "btrfs": lambda: tool("btrfs", "filesystem", "resize", "max", record["mount"]),
    }[now.filesystem]()
    after = os.statvfs(record["mount"])
    if after.f_blocks != before.f_blocks:
        changed.append(f"{record['mount']}: {after.f_blocks * after.f_frsize} bytes")
    step("grow-marker")
    identity = drive_journal.identity_of(drive_probe.probe(f"/dev/{name}")["device"])
    for path, known, mode in (
        (os.path.join(record["mount"], drive_fs.MARKER), marker, 0o644),
        (os.path.join(state, drive_apply.DRIVE_FILE), record, 0o644),
    ):
        if known["drive"] != identity:
            drive_journal.write_json(path, {**known, "drive": identity}, mode)
            changed.append(path)
    return {"status": "done", "changed": changed}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--state", required=True, help="state/ of base_dir")
    parser.add_argument("--check", action="store_true", help='only {"ok": whether it is done}')
    args = parser.parse_args()
    answer: Data
    if args.check:
        print(json.dumps({"ok": is_grown(args.state)}))
        return 0
    try:
        answer, code = grow(args.state), 0
    except Refused as error:
        answer, code = {"status": "refused", "code": error.code, "why": error.why}, 3
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        answer, code = {"status": "failed", "why": str(error)}, 1
    if code:
        say(f"{answer['status']}: {answer['why']}")
    print(json.dumps(answer))
    return code


if __name__ == "__main__":
    sys.exit(main())
