#!/usr/bin/env python3
"""The part that writes to a drive: erasing (with a token), the table, the filesystem.

Used by drive_apply.py with the disk held and locked. `may_begin` and `may_go_on` decide and write
nothing; after them, only what the journal says is done. Run by hand it shows what a journal allows:
drive_write.py STATE
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any

sys.dont_write_bytecode = True
if TYPE_CHECKING or __package__:
    from kvhost.onhost import (
        drive_blank,
        drive_fs,
        drive_gpt,
        drive_journal,
        drive_probe,
        drive_sys,
    )
    from kvhost.onhost.drive_disk import Disk, Refused, blkid, say, step, tool
else:
    import drive_blank
    import drive_fs
    import drive_gpt
    import drive_journal
    import drive_probe
    import drive_sys
    from drive_disk import Disk, Refused, blkid, say, step, tool

Data = dict[str, Any]
MIB = 1 << 20
LOOKS = 5


class Writer:
    """`order`, `found`: what was planned, and what drive_probe says with the disk locked."""

    def __init__(self, disk: Disk, order: Data, found: Data, state: str) -> None:
        self.disk, self.order, self.found, self.state = disk, order, found, state

    def may_begin(self) -> Data:
        """The drive's part of a new journal. Raises Refused: it holds something, no token fits."""
        disk, findings = self.disk, list(self.found["findings"])
        never = [f for f in findings if f["kind"] not in drive_probe.ERASABLE]
        if never:
            words = "; ".join(f"{f['kind']}: {f['detail']}" for f in never)
            why = f"{disk.path} cannot be formatted, with no token: {words}"
            raise Refused("drive_in_use", why, findings=findings)
        disk.keep_others_out()
        written = disk.written()
        if not findings:
            step("blank")
            sampled = self.order.get("blank_check") == "sampled"
            findings = self.data_in(0, disk.size, sampled)
        token = self.token_for(findings) if findings else None
        if token and token not in str(self.order.get("token")).split(","):
            raise self.refused(findings, token)
        step("counter")
        if disk.written() != written:
            why = f"{disk.path} was written to while it was being looked at"
            raise Refused("drive_changed", why)
        for _ in range(LOOKS):
            again = drive_probe.probe(disk.path)
            # the exclusive hold is ours, and shows as "busy"
            mine = [f for f in again["findings"] if f["kind"] != "busy"]
            if not any(f["kind"] == "in_use" for f in mine):
                break
            time.sleep(0.5)  # somebody may only look at all drives
        if again["status"] != "ok" or mine != self.found["findings"]:
            why = f"{disk.path} has changed while it was being looked at"
            raise Refused("drive_changed", why, findings=again["findings"])
        entry = drive_journal.new_drive(self.found["device"], token)
        if token:
            entry["signatures"] = self.signatures()
        return entry

    def token_for(self, findings: list[Data]) -> str:
        """Raises Refused on a host without a machine-id: a token could be of any host."""
        machine_id = drive_sys.machine_id()
        if not machine_id:
            why = f"{self.disk.path} is not empty, and without /etc/machine-id no token is bound"
            raise Refused("drive_not_blank", why, findings=findings)
        return drive_probe.token(self.found["device"], machine_id, findings)

    def refused(self, findings: list[Data], token: str) -> Refused:
        words = "; ".join(f"{f['kind']}: {f['detail']}" for f in findings)
        given = " (the drive_erase given is of another drive, host or state)"
        why = (
            f"{self.disk.path} is not blank: {words}. Nothing was written"
            f"{given if self.order.get('token') else ''}. To have all of it erased: "
            f"drive_erase = '{token}' in the data of this host"
        )
        return Refused("drive_not_blank", why, findings=findings, token=token)

    def data_in(self, start: int, length: int, sampled: bool) -> list[Data]:
        """A finding for the first byte that is not zero. Raises Refused if it cannot be read."""
        try:
            seen = drive_blank.check(self.disk.path, start, length, sampled=sampled)
        except OSError as error:
            why = f"{self.disk.path} cannot be read from end to end: {error}"
            raise Refused("drive_unreadable", why) from error
        if seen["blank"]:
            return []
        detail = f"data at byte {seen['offset']} (sha256 of its 4 KiB: {seen['sha256'][:16]})"
        return [{"kind": "data", "detail": detail}]

    def signatures(self) -> list[list[Any]]:
        """[offset on the disk, type] of all that wipefs knows on the disk and its partitions."""
        rows = []
        places = [(self.disk.path, 0)]
        for number, numbers in self.disk.partitions().items():
            with open(f"/sys/dev/block/{numbers}/start", encoding="utf-8") as handle:
                places.append((self.disk.partition_path(number), int(handle.read()) * 512))
        for path, start in places:
            text = tool("wipefs", "--no-act", "--json", path)
            for row in json.loads(text)["signatures"] if text.strip() else []:
                rows.append([start + int(row["offset"], 0), row["type"]])
        return sorted(rows)

    def may_go_on(self, entry: Data) -> None:
        """Raises Refused unless all that lies on the drive is what a cut-off run left."""
        disk, stage = self.disk, entry["stage"]
        never = drive_probe.NEVER & {f["kind"] for f in self.found["findings"]}
        if never:
            words = "; ".join(
                f"{f['kind']}: {f['detail']}" for f in self.found["findings"] if f["kind"] in never
            )
            raise Refused("drive_in_use", f"{disk.path} cannot be finished: {words}")
        say(f"{disk.path}: a run before was cut off (stage {stage}); going on")
        disk.keep_others_out()
        if stage == "erase":
            more = [row for row in self.signatures() if row not in entry["signatures"]]
            if entry["token"] not in str(self.order.get("token")).split(",") or more:
                why = f"{disk.path} was being erased and holds something else by now: {more}"
                raise Refused("drive_changed", why, findings=self.found["findings"])
            return
        self.is_our_table(entry, whole=stage != "table")
        where = drive_gpt.geometry(disk.size, disk.sector)
        if stage == "table" and entry["zero_before"]:
            data = self.data_in(where.start, where.length, False)
            if data:
                raise Refused("drive_changed", f"{disk.path}: {data[0]['detail']}", findings=data)

    def is_our_table(self, entry: Data, *, whole: bool) -> None:
        """Every sector outside the partition is zero or ours; with `whole`, all of it is there."""
        disk = self.disk
        table = self.table(entry)
        wanted = {}
        for start, data in table.items():
            for at in range(0, len(data), disk.sector):
                wanted[start + at] = data[at : at + disk.sector]
        where = drive_gpt.geometry(disk.size, disk.sector)
        fd = os.open(disk.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            for start, end in ((0, where.start), (where.start + where.length, disk.size)):
                for at in range(start, end, disk.sector):
                    got, ours = os.pread(fd, disk.sector, at), wanted.get(at, bytes(disk.sector))
                    if got != ours and (whole or got != bytes(disk.sector)):
                        why = f"{disk.path} holds what no run of kvhost wrote, at byte {at}"
                        raise Refused("drive_changed", why, findings=self.found["findings"])
        finally:
            os.close(fd)

    def table(self, entry: Data) -> dict[int, bytes]:
        disk = self.disk
        return drive_gpt.table(disk.size, disk.sector, entry["disk_guid"], entry["partition_uuid"])

    def go_on(self, entry: Data, journal: Data) -> str:
        """Does what is left to do up to an empty partition; its path. `entry` is in `journal`."""
        disk = self.disk
        if entry["stage"] == "erase":
            self.erase(entry, journal)
        if entry["stage"] == "table":
            self.write_table(entry)
            set_stage(self.state, journal, entry, "mkfs")
        step("kernel")
        disk.reread_partitions(1)
        return disk.partition_path(1)

    def erase(self, entry: Data, journal: Data) -> None:
        """Takes away the signatures that the token names, and what lies where the table goes."""
        step("erase")
        say(f"{self.disk.path}: erasing, as drive_erase allows")
        self.take_off()
        step("cleared")
        set_stage(self.state, journal, entry, "table")

    def take_off(self) -> None:
        """All signatures that wipefs knows, partitions, and 1 MiB of zeros at both ends."""
        disk = self.disk
        disk.let_others_in()
        for number in sorted(disk.partitions(), reverse=True):
            tool("wipefs", "--quiet", "--all", disk.partition_path(number), keep=(disk.fd,))
        tool("wipefs", "--quiet", "--all", disk.path, keep=(disk.fd,))
        if disk.partitions():
            tool("partx", "--delete", disk.path, keep=(disk.fd,))
        fd = disk.keep_others_out(writing=True)
        for at in (0, disk.size - MIB):
            os.pwrite(fd, bytes(MIB), at // disk.sector * disk.sector)
        os.fsync(fd)
        left = self.signatures()
        if left:
            raise RuntimeError(f"{disk.path}: these signatures came up again: {left}")

    def write_table(self, entry: Data) -> None:
        fd = self.disk.keep_others_out(writing=True)
        for number, (at, data) in enumerate(self.table(entry).items(), 1):
            step(f"table-{number}")
            os.pwrite(fd, data, at)
            os.fsync(fd)


def set_stage(state: str, journal: Data, entry: Data, stage: str) -> None:
    entry["stage"] = stage
    drive_journal.write(state, journal)


def make_filesystem(
    state: str, journal: Data, order: Data, device: str, keep: tuple[int, ...]
) -> None:
    """On an empty device, or one on which a run before was cut off. `keep`: see tool()."""
    if not drive_fs.finish_half_made(device, journal, keep):
        journal["filesystem"] = order["filesystem"]
        drive_journal.write(state, journal)
        say(f"{device}: mkfs, {journal['filesystem']}")
        drive_fs.make(device, journal["filesystem"], journal["fs_uuid"], keep)
    there = blkid(device)
    if there.get("UUID") != journal["fs_uuid"] or not drive_fs.is_ours(there):
        raise RuntimeError(f"mkfs made something else than asked for: {there}")
    step("made")
    for entry in journal["drives"]:
        set_stage(state, journal, entry, "made")
    say(f"{device}: {journal['filesystem']} {journal['fs_uuid']} made")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("state", help="directory of the journal")
    journal = drive_journal.read(parser.parse_args().state)
    stages = [entry["stage"] for entry in (journal or {}).get("drives", [])]
    print(json.dumps({"stages": stages, "of": drive_journal.STAGES}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
