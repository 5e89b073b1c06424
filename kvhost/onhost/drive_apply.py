#!/usr/bin/env python3
"""Formats and mounts the drive of an order: drive_apply.py apply|check --order FILE. As root.

The order says what was planned for which drive (kvhost/claim.py makes it). Everything it rests on
is looked at again here, with the device held and locked, and any difference ends the run before a
byte is written. Each step can be cut off: the next run goes on from the journal in --state.

apply   does it. JSON on stdout, progress on stderr. Exit: 0 done, 3 refused (what was found, and
        the token that would allow more), 1 failed half-way (run it again), 2 wrong usage.
check   changes nothing: {"ok", "wrong": […]}, exit 0.
"""

from __future__ import annotations

import argparse
import json
import os
import pwd
import stat
import sys
import time
from typing import TYPE_CHECKING, Any

sys.dont_write_bytecode = True  # bin/ stays as it was installed
if TYPE_CHECKING or __package__:
    from kvhost.onhost import (
        drive_fs,
        drive_fstab,
        drive_gpt,
        drive_journal,
        drive_mount,
        drive_probe,
        drive_sys,
        drive_write,
    )
    from kvhost.onhost.drive_disk import Disk, Refused, blkid, maj_min, say, step, tool
else:  # they lie beside this file on a host, where there is no package kvhost
    import drive_fs
    import drive_fstab
    import drive_gpt
    import drive_journal
    import drive_mount
    import drive_probe
    import drive_sys
    import drive_write
    from drive_disk import Disk, Refused, blkid, maj_min, say, step, tool

Data = dict[str, Any]
SCHEMA = 1
#: findings that may be of a moment, and how often it is looked whether they stay
PASSING, TRIES = frozenset({"in_use", "busy"}), 10
KEYS = ("drive", "findings", "action", "filesystem", "mount", "owner")
ACTIONS = ("keep", "adopt", "format", "mount")
DRIVE_FILE = "drive.json"
#: places at which a run can be cut off, in order (KVHOST_TEST_DRIVE_STOP)
STEPS = (
    *("hold", "probe", "blank", "counter", "journal", "erase", "cleared"),
    *("table-1", "table-2", "table-3", "table-4", "table-5", "kernel", "mkfs", "made"),
    *("mountpoint", "fstab", "mount", "marker", "tier", "trim", "done"),
)


def read_order(path: str) -> Data:
    """Raises OSError, ValueError that names everything that is wrong with it."""
    with open(path, encoding="utf-8") as handle:
        return parse_order(handle.read())


def parse_order(text: str) -> Data:
    """As read_order, of its text."""
    order = json.loads(text)
    if not isinstance(order, dict):
        raise ValueError("the order is not a JSON object")
    wrong = [f"{key} is missing" for key in KEYS if key not in order]
    if order.get("schema") != SCHEMA:
        wrong.append(f"schema is {order.get('schema')}, not {SCHEMA}")
    if order.get("action") not in ACTIONS:
        wrong.append(f"action is {order.get('action')}, not one of {', '.join(ACTIONS)}")
    if order.get("filesystem") not in drive_fs.OPTIONS:
        wrong.append(f"filesystem is {order.get('filesystem')}")
    mount = order.get("mount")
    if not isinstance(mount, str) or os.path.normpath(mount) != mount or mount.count("/") < 2:
        wrong.append(f"mount is {mount}, not a plain absolute path below a directory")
    drive = order.get("drive")
    if not isinstance(drive, dict) or not drive.get("path") or not drive.get("maj_min"):
        wrong.append("drive has no path or no maj_min")
    try:
        pwd.getpwnam(str(order.get("owner")))
    except KeyError:
        wrong.append(f"the owner {order.get('owner')} is no user of this host")
    if wrong:
        raise ValueError("the order is not usable: " + "; ".join(wrong))
    return order


def probed(disk: Disk, order: Data) -> Data:
    """What drive_probe says of the held disk now. Raises Refused when that is another drive, or
    more or other things are found than the plan found."""
    planned = {f["kind"] for f in order["findings"]}
    for _ in range(TRIES):
        found = drive_probe.probe(disk.path)
        if not {f["kind"] for f in found["findings"]} & PASSING - planned:
            break
        time.sleep(0.5)  # udev, or another look at all drives: it is over in a moment
    if found["status"] != "ok":
        why = f"{disk.path} could not be looked at: {found['why']}"
        raise Refused("drive_unreadable", why, findings=found["findings"])
    for key in (*drive_probe.IDENTITY, "maj_min", "diskseq"):
        if found["device"].get(key) != order["drive"].get(key):
            why = (
                f"{disk.path} is not the drive of the plan: {key} is {found['device'].get(key)!r}, "
                f"planned was {order['drive'].get(key)!r}"
            )
            raise Refused("drive_swapped", why, findings=found["findings"])
    return found


def same_findings(one: list[Data], other: list[Data]) -> bool:
    return {(f["kind"], f["detail"]) for f in one} == {(f["kind"], f["detail"]) for f in other}


def existing(disk: Disk, order: Data) -> str | None:
    """Path of the kvhost filesystem on this disk, with its partition made known to the kernel;
    None if there is none."""
    start = os.pread(disk.fd, 2 * disk.sector + drive_gpt.ENTRIES * drive_gpt.ENTRY_BYTES, 0)
    ours = drive_gpt.names(start, disk.sector) == [drive_gpt.NAME]
    # the kernel is asked to read a table only if it may be ours; another drive is left as it is
    if ours and blkid(disk.path).get("PTTYPE") == "gpt" and 1 not in disk.partitions():
        disk.reread_partitions(1)  # some kernels read no GPT by themselves
    parts = disk.partitions()
    if set(parts) != {1}:
        return None
    path = disk.partition_path(1)
    return path if drive_fs.is_ours(blkid(path)) else None


class Apply:
    """One order, from the held disk to a mounted and marked filesystem."""

    def __init__(self, order: Data, state: str, fstab: str) -> None:
        self.order, self.state, self.fstab = order, state, fstab
        self.drive, self.target = order["drive"], order["mount"]
        self.changed: list[str] = []

    def run(self, *, dry: bool) -> Data:
        step("hold")
        with Disk(self.drive["path"], self.drive["maj_min"], self.drive.get("diskseq")) as disk:
            disk.lock()
            self.place_is_free(disk)
            step("probe")
            volume = self.volume(disk, dry)
            if volume is None:
                return {"status": "dry", "changed": [], "would": self.changed}
            there = blkid(volume)
            self.mounted(volume, there)
        return {
            "status": "done",
            "changed": self.changed,
            "uuid": there["UUID"],
            "filesystem": there["TYPE"],
            "mount": self.target,
        }

    def place_is_free(self, disk: Disk) -> None:
        """Raises Refused, before anything is written, if it could not be mounted in the end."""
        now = drive_mount.mounted_at(self.target)
        if now is None:
            drive_mount.check_mount_point(self.target)
        elif disk.numbers not in drive_mount.disks_below(now.numbers):
            why = f"at {self.target} another filesystem is mounted: {now.filesystem} {now.source}"
            raise Refused("mount_taken", why)
        kind = self.order["filesystem"]
        line = drive_fstab.entry_for("not-yet", self.target, kind, drive_fs.OPTIONS[kind])
        if self.order["action"] == "format":
            drive_fstab.with_entry(drive_fstab.read(self.fstab), line)

    def volume(self, disk: Disk, dry: bool) -> str | None:
        """Path of the filesystem to mount: found, or made now. None: a dry run would make it."""
        action = self.order["action"]
        journal = drive_journal.read(self.state)
        stage = drive_journal.unfinished(journal, self.drive)
        if action == "adopt":
            return self.adopted()
        path = existing(disk, self.order)
        if path is not None and (stage is None or stage == "made"):
            self.recognised(path, journal if stage else None)
            return path
        if action != "format" and stage is None:
            why = f"{disk.path} holds no filesystem of kvhost's (label and partition name kvhost)"
            raise Refused("not_ours", why)
        found = probed(disk, self.order)
        if stage is None and not same_findings(found["findings"], self.order["findings"]):
            raise Refused(
                "drive_changed",
                f"{disk.path} holds something else than when the plan was made",
                findings=found["findings"],
                planned=self.order["findings"],
            )
        write = drive_write.Writer(disk, self.order, found, self.state)
        if stage is not None and journal is not None:
            write.may_go_on(journal)
        else:
            journal = write.may_begin()
        self.changed.append(f"{disk.path} formatted with {self.order['filesystem']}")
        if dry:
            return None
        return write.go_on(journal)

    def adopted(self) -> str:
        """The device that is mounted at the mount point already, if it is all that was planned."""
        there = drive_mount.mounted_at(self.target)
        if there is None or self.drive["maj_min"] not in drive_mount.disks_below(there.numbers):
            raise Refused("not_adoptable", f"{self.target} is not a mount of {self.drive['path']}")
        if there.filesystem != self.order["filesystem"]:
            why = f"{self.target} is {there.filesystem}, not {self.order['filesystem']}"
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
        if mount is not None and mount.source and mount.numbers == maj_min(os.stat(path).st_rdev):
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
        if journal is None or there["UUID"] != journal["fs_uuid"]:
            why = f"the filesystem on {path} has kvhost's label and not its marker ({others[:5]})"
            raise Refused("not_ours", why)

    def mounted(self, path: str, there: dict[str, str]) -> None:
        """Mounts the filesystem by its UUID, through fstab, and puts up what must hold in it."""
        numbers = maj_min(os.stat(path).st_rdev)
        now = drive_mount.mounted_at(self.target)
        if now is not None and now.numbers != numbers:
            why = f"at {self.target} another filesystem is mounted: {now.filesystem} {now.source}"
            raise Refused("mount_taken", why)
        adopt = self.order["action"] == "adopt"
        if now is None:
            step("mountpoint")
            if not drive_mount.close_mount_point(self.target):
                say(f"{self.target}: the filesystem below it knows no chattr +i; mode 0000 alone")
        step("fstab")
        line = fstab_line(self.order, there)
        text = drive_fstab.with_entry(drive_fstab.read(self.fstab), line, adopted=adopt)
        if drive_fstab.install(self.fstab, text):
            self.changed.append(f"{self.fstab}: {line}")
            if now is not None and drive_mount.has_systemd():
                tool("systemctl", "daemon-reload")
        step("mount")
        if now is None:
            drive_mount.mount(self.target, self.fstab)
            self.changed.append(f"{self.target} mounted")
            now = drive_mount.mounted_at(self.target)
            if now is None or now.numbers != numbers:
                what = f"{now.source} is mounted" if now else "nothing is mounted"
                raise RuntimeError(f"at {self.target} {what} after mounting {path} by its UUID")
        elif not adopt and not wanted_options(self.order) <= now.options:
            tool("mount", "--fstab", self.fstab, "--options", "remount", "--target", self.target)
            self.changed.append(f"{self.target} mounted anew with other options")
        self.put_up(there["UUID"])

    def put_up(self, uuid: str) -> None:
        step("marker")
        marker = {
            "schema": SCHEMA,
            "uuid": uuid,
            "drive": drive_journal.identity_of(self.drive),
            "machine_id": drive_sys.machine_id(),
        }
        there = drive_fs.read_marker(self.target)
        if there is None:
            path = os.path.join(self.target, drive_fs.MARKER)
            drive_journal.write_json(path, marker, 0o644)
            self.changed.append(f"{path} written")
        elif there["uuid"].lower() != uuid.lower():
            raise Refused("not_ours", f"the marker in {self.target} is of another filesystem")
        step("tier")
        os.chown(self.target, 0, 0)
        os.chmod(self.target, 0o711)
        tier, user = os.path.join(self.target, "tier"), pwd.getpwnam(self.order["owner"])
        if os.path.islink(tier) or (os.path.exists(tier) and not os.path.isdir(tier)):
            raise Refused("not_ours", f"{tier} is not a directory")
        if not os.path.isdir(tier):
            os.mkdir(tier, 0o700)
            self.changed.append(f"{tier} made")
        os.chown(tier, user.pw_uid, user.pw_gid)
        os.chmod(tier, 0o700)
        step("trim")
        if drive_mount.trim_timer() == "off":
            tool("systemctl", "enable", "--now", "fstrim.timer")
            self.changed.append("fstrim.timer enabled")
        path = os.path.join(self.state, DRIVE_FILE)
        known = drive_record(self.order, uuid)
        if read_json(path) != known:
            drive_journal.write_json(path, known, 0o644)
        step("done")
        if drive_journal.unfinished(drive_journal.read(self.state), self.drive):
            drive_journal.forget(self.state)


def drive_record(order: Data, uuid: str) -> Data:
    """state/drive.json: what launch.py and the receipt need to know of the drive."""
    return {
        "schema": SCHEMA,
        "mount": order["mount"],
        "uuid": uuid,
        "filesystem": order["filesystem"],
        "options": drive_fs.OPTIONS[order["filesystem"]],
        "drive": drive_journal.identity_of(order["drive"]),
    }


def read_json(path: str) -> Any:
    try:
        with open(path, encoding="utf-8") as handle:
            return json.load(handle)
    except (FileNotFoundError, ValueError):
        return None


def fstab_line(order: Data, there: dict[str, str]) -> str:
    kind = there["TYPE"]
    return drive_fstab.entry_for(there["UUID"], order["mount"], kind, drive_fs.OPTIONS[kind])


def wanted_options(order: Data) -> set[str]:
    """Those that /proc/self/mountinfo shows; strictatime is shown as no option at all."""
    return set(drive_fs.OPTIONS[order["filesystem"]].split(",")) - {"strictatime"}


def check(order: Data, state: str, fstab: str) -> list[str]:
    """What is not as the order wants it. Raises RuntimeError, OSError: it cannot be told."""
    drive, target = order["drive"], order["mount"]
    now = drive_mount.mounted_at(target)
    if now is None:
        return [f"nothing is mounted at {target}"]
    wrong = []
    if drive["maj_min"] not in drive_mount.disks_below(now.numbers):
        wrong.append(f"{target} is a mount of {now.source}, not of {drive['path']}")
        return wrong
    there = blkid(now.source)
    marker = drive_fs.read_marker(target)
    if marker is None or marker["uuid"].lower() != there.get("UUID", "").lower():
        wrong.append(f"{target} has no marker of this filesystem")
    if now.filesystem != order["filesystem"]:
        wrong.append(f"{target} is {now.filesystem}, not {order['filesystem']}")
        return wrong
    adopt = order["action"] == "adopt"
    if not adopt and not wanted_options(order) <= now.options:
        wrong.append(f"{target} is mounted with other options")
    text = drive_fstab.read(fstab)
    if drive_fstab.with_entry(text, fstab_line(order, there), adopted=adopt) != text:
        wrong.append(f"{fstab} has another line for it, or none")
    st, tier = os.stat(target), os.path.join(target, "tier")
    if (st.st_uid, st.st_gid, stat.S_IMODE(st.st_mode)) != (0, 0, 0o711):
        wrong.append(f"{target} is not root's with mode 0711")
    if not os.path.isdir(tier):
        wrong.append(f"{tier} is not there")
    else:
        st, user = os.stat(tier), pwd.getpwnam(order["owner"])
        if (st.st_uid, stat.S_IMODE(st.st_mode)) != (user.pw_uid, 0o700):
            wrong.append(f"{tier} is not {order['owner']}'s with mode 0700")
    if drive_mount.trim_timer() == "off":
        wrong.append("fstrim.timer is not enabled")
    if read_json(os.path.join(state, DRIVE_FILE)) != drive_record(order, there.get("UUID", "")):
        wrong.append(f"{state}/{DRIVE_FILE} does not say so")
    if drive_journal.unfinished(drive_journal.read(state), drive):
        wrong.append("a run was cut off")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("apply", "check"))
    parser.add_argument("--order", help="the order, a JSON file")
    parser.add_argument("--order-text", help="the order itself, for check")
    parser.add_argument("--state", help="directory of the journal; that of the order without it")
    parser.add_argument("--fstab", default="/etc/fstab")
    parser.add_argument("--dry-run", action="store_true", help="look, judge, write nothing")
    args = parser.parse_args()
    if bool(args.order) == bool(args.order_text) or not (args.order or args.state):
        parser.error("needs --order, or --order-text and --state")
    state = args.state or os.path.dirname(os.path.abspath(args.order))
    answer: Data
    try:
        if os.geteuid() != 0:
            raise ValueError("this needs root")
        order = parse_order(args.order_text) if args.order_text else read_order(args.order)
    except (OSError, ValueError) as error:
        print(json.dumps({"status": "unusable", "why": str(error)}))
        return 2
    apply = Apply(order, state, args.fstab)
    try:
        if args.what == "check":
            wrong = check(order, state, args.fstab)
            print(json.dumps({"ok": not wrong, "wrong": wrong}))
            return 0
        answer, code = apply.run(dry=args.dry_run), 0
    except Refused as error:
        if args.what == "check":
            print(json.dumps({"ok": False, "wrong": [error.why]}))
            return 0
        answer = {"status": "refused", "code": error.code, "why": error.why, **error.more}
        code = 3
    except (OSError, RuntimeError, ValueError) as error:
        answer, code = {"status": "failed", "why": str(error)}, 1
    if code:
        answer["changed"] = apply.changed
        say(f"{answer['status']}: {answer['why']}")
    print(json.dumps(answer))
    return code


if __name__ == "__main__":
    sys.exit(main())
