#!/usr/bin/env python3
"""From the disks of an order to the device of their filesystem: found, or made now.

Used by drive_apply.py, with all disks held and locked. Nothing is written to any of them before
every one may be written. Run by hand it shows what of kvhost's a disk holds: drive_volume.py PATH
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

sys.dont_write_bytecode = True
if TYPE_CHECKING or __package__:
    from kvhost.onhost import (
        drive_fs,
        drive_gpt,
        drive_journal,
        drive_layers,
        drive_mount,
        drive_probe,
        drive_write,
    )
    from kvhost.onhost.drive_disk import Disk, Refused, blkid, maj_min, step
else:
    import drive_fs
    import drive_gpt
    import drive_journal
    import drive_layers
    import drive_mount
    import drive_probe
    import drive_write
    from drive_disk import Disk, Refused, blkid, maj_min, step

Data = dict[str, Any]
DRIVE_FILE = drive_journal.RECORD
#: findings that may be of a moment, and how often it is looked whether they stay
PASSING, TRIES = frozenset({"in_use", "busy"}), 10


def members_of(order: Data) -> list[Data]:
    """The drives of an order, each with drive, findings, action, token."""
    members: list[Data] = order.get("members") or [order]
    return members


def probed(disk: Disk, member: Data) -> Data:
    """What drive_probe says of the held disk now. Raises Refused when that is another drive, or
    cannot be told."""
    planned = {f["kind"] for f in member["findings"]}
    for _ in range(TRIES):
        found = drive_probe.probe(disk.path)
        if not {f["kind"] for f in found["findings"]} & PASSING - planned:
            break
        time.sleep(0.5)  # udev, or another look at all drives: it is over in a moment
    if found["status"] != "ok":
        why = f"{disk.path} could not be looked at: {found['why']}"
        raise Refused("drive_unreadable", why, findings=found["findings"])
    for key in (*drive_probe.IDENTITY, "maj_min", "diskseq"):
        if found["device"].get(key) != member["drive"].get(key):
            why = (
                f"{disk.path} is not the drive of the plan: {key} is {found['device'].get(key)!r}, "
                f"planned was {member['drive'].get(key)!r}"
            )
            raise Refused("drive_swapped", why, findings=found["findings"])
    return found


def same_findings(one: list[Data], other: list[Data]) -> bool:
    return {(f["kind"], f["detail"]) for f in one} == {(f["kind"], f["detail"]) for f in other}


def own_partition(disk: Disk) -> str | None:
    """Path of the one partition kvhost, made known to the kernel; None if the disk has none."""
    start = os.pread(disk.fd, 2 * disk.sector + drive_gpt.ENTRIES * drive_gpt.ENTRY_BYTES, 0)
    if drive_gpt.names(start, disk.sector) != [drive_gpt.NAME]:
        return None
    # the kernel is asked to read a table only if it may be ours; another drive is left as it is
    if blkid(disk.path).get("PTTYPE") == "gpt" and 1 not in disk.partitions():
        disk.reread_partitions(1)  # some kernels read no GPT by themselves
    return disk.partition_path(1) if set(disk.partitions()) == {1} else None


class Volume:
    """`order`: what was planned; `state`: directory of the journal; `disks`: held and locked."""

    def __init__(self, order: Data, state: str, disks: Sequence[Disk]) -> None:
        self.order, self.state, self.disks = order, state, disks
        self.target, self.members = order["mount"], members_of(order)
        self.layers = drive_layers.Layers(order, state)
        self.names = ", ".join(disk.path for disk in disks)

    def find_or_make(self, *, dry: bool) -> tuple[str | None, bool]:
        """(device of the filesystem, whether it was made now); None: a dry run would make it.

        Raises Refused.
        """
        if self.order["action"] == "adopt":
            return self.adopted(), False
        journal = drive_journal.read(self.state)
        entries = [drive_journal.drive_in(journal, member["drive"]) for member in self.members]
        cut_off = any(entries)
        path = self.existing()
        if path is not None and all(entry is None or entry["stage"] == "made" for entry in entries):
            self.recognised(path, journal if cut_off else None)
            return path, False
        actions = {member["action"] for member in self.members}
        if actions != {"format"} and not cut_off:
            why = f"{self.names}: no filesystem of kvhost's (label and partition name kvhost)"
            if len(actions) > 1:
                why += "; one of several drives was formatted for others: release and wipe it first"
            raise Refused("not_ours", why)
        return self.make(journal if cut_off else None, dry), True

    def existing(self) -> str | None:
        parts = [own_partition(disk) for disk in self.disks]
        if not all(parts):
            return None
        path = self.layers.existing([part for part in parts if part is not None])
        return path if path is not None and drive_fs.is_ours(blkid(path)) else None

    def make(self, journal: Data | None, dry: bool) -> str | None:
        """Goes on with the journal, or begins a new one; first all decisions, then the writing."""
        if journal is not None:
            self.layers.taken_apart(self.disks, journal)
        writers, entries = [], []
        for disk, member in zip(self.disks, self.members):  # noqa: B905 (Python 3.9)
            found = probed(disk, member)
            entry = drive_journal.drive_in(journal, member["drive"])
            if entry is None and not same_findings(found["findings"], member["findings"]):
                raise Refused(
                    "drive_changed",
                    f"{disk.path} holds something else than when the plan was made",
                    findings=found["findings"],
                    planned=member["findings"],
                )
            if (entry is None) != (journal is None):
                why = f"a run for {self.names} was cut off that was of other drives"
                raise Refused("drive_changed", why)
            if entry is None:
                self.was_not_here(member["drive"])
            # what a cloud hands out may have been another's
            blank_check = "full" if self.order.get("ephemeral") else self.order.get("blank_check")
            writer = drive_write.Writer(
                disk, {**member, "blank_check": blank_check}, found, self.state
            )
            writers.append(writer)
            if entry is None:
                entries.append(writer.may_begin())
            else:
                writer.may_go_on(entry)
                entries.append(entry)
        if dry:
            return None
        if journal is None:
            journal = drive_journal.new(entries, self.order["filesystem"])
        step("journal")
        drive_journal.write(self.state, journal)
        parts = [one.go_on(entry, journal) for one, entry in zip(writers, entries)]  # noqa: B905
        # held: their numbers stay their own, and the lock outlives us in whoever writes
        held = [os.open(part, os.O_RDONLY | os.O_CLOEXEC) for part in parts]
        keep = (*held, *(disk.fd for disk in self.disks))
        try:
            step("mkfs")
            device = self.layers.made(parts, journal, keep)
            drive_write.make_filesystem(self.state, journal, self.order, device, keep)
        finally:
            for fd in held:
                os.close(fd)
        return device

    def was_not_here(self, drive: Data) -> None:
        """Raises Refused when this very drive held kvhost's filesystem and has lost it."""
        known = drive_journal.read_record(self.state)
        if known is None:
            return
        rows = known.get("drives") or [known["drive"]]
        if not self.order.get("ephemeral") and any(
            drive_journal.same_drive(row, drive) for row in rows
        ):
            raise Refused(
                "came_back_blank",
                f"{drive['path']} held kvhost's filesystem ({known['uuid']}) and has lost it: the "
                "drive forgets, or somebody wiped it. To have it formatted again: kvhost release, "
                "then once more; for the instance store of a cloud: drive_ephemeral = True",
            )

    def is_known(self, uuid: str) -> bool:
        """Whether kvhost noted down that it finished this filesystem on these very drives."""
        known = drive_journal.read_record(self.state)
        if known is None or known["uuid"].lower() != uuid.lower():
            return False
        rows = known.get("drives") or [known["drive"]]
        drives = [member["drive"] for member in self.members]
        return all(any(drive_journal.same_drive(row, d) for row in rows) for d in drives)

    def adopted(self) -> str:
        """The device that is mounted at the mount point already, if it is all that was planned."""
        there, drive = drive_mount.mounted_at(self.target), self.order["drive"]
        if there is None or drive["maj_min"] not in drive_mount.disks_below(there.numbers):
            raise Refused("not_adoptable", f"{self.target} is not a mount of {drive['path']}")
        if there.filesystem != self.order["filesystem"]:
            why = f"{self.target} is {there.filesystem}, not {self.order['filesystem']}"
            raise Refused("not_adoptable", why)
        if there.root != "/":
            why = f"{self.target} shows a part of the filesystem only, its directory {there.root}"
            raise Refused("not_adoptable", why)
        names = set(os.listdir(self.target)) - {"lost+found", drive_fs.MARKER}
        if drive_fs.read_marker(self.target) is None and names:
            why = f"{self.target} is not empty: {', '.join(sorted(names)[:5])}"
            raise Refused("not_adoptable", why)
        return there.source

    def recognised(self, path: str, journal: Data | None) -> None:
        """Raises Refused unless the filesystem carries our marker, or our journal made it."""
        there = blkid(path)
        if there["TYPE"] != self.order["filesystem"]:
            why = (
                f"{path} is {there['TYPE']}, and drive_filesystem asks for "
                f"{self.order['filesystem']}: it is never changed; release the drive first"
            )
            raise Refused("other_filesystem", why)
        mount = drive_mount.mounted_at(self.target)
        if mount is not None and mount.numbers == maj_min(os.stat(path).st_rdev):
            marker, others = drive_fs.read_marker(self.target), os.listdir(self.target)
        else:
            inside = drive_fs.look(path, there["TYPE"])
            if not inside["mounts"]:
                why = f"the kvhost filesystem on {path} cannot be mounted: {inside['why']}"
                raise Refused("damaged", why)
            marker, others = inside["marker"], inside["others"]
        if marker is not None:
            if marker["uuid"].lower() != there["UUID"].lower():
                why = f"the marker on {path} is of another filesystem ({marker['uuid']})"
                raise Refused("not_ours", why)
            return
        if not set(others) - {"lost+found"} and self.is_known(there["UUID"]):
            return  # after a power cut the marker may be in the filesystem's log alone
        if journal is None or there["UUID"] != journal["fs_uuid"]:
            why = f"the filesystem on {path} has kvhost's label and not its marker ({others[:5]})"
            raise Refused("not_ours", why)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", help="a whole disk")
    path = parser.parse_args().path
    with Disk(path, maj_min(os.stat(path).st_rdev), None) as disk:
        part = own_partition(disk)
    print(json.dumps({"partition": part, "holds": blkid(part) if part else None}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
