#!/usr/bin/env python3
"""Formats and mounts the drive of an order: drive_apply.py apply|check --order FILE. As root.

The order says what was planned for which drive (kvhost/drives/order.py makes it). Everything it
rests on is looked at again here, with the device held and locked, and any difference ends the
run before a byte is written. Each step can be cut off: the next run goes on from the journal in
--state.

apply   does it. JSON on stdout, progress on stderr. Exit: 0 done, 3 refused (what was found, and
        the token that would allow more), 1 failed half-way (run it again), 2 wrong usage.
check   changes nothing: {"ok", "wrong": […]}, exit 0.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pwd
import re
import stat
import sys
from typing import TYPE_CHECKING, Any

sys.dont_write_bytecode = True  # bin/ stays as it was installed
if TYPE_CHECKING or __package__:
    from kvhost.onhost import (
        drive_fs,
        drive_fstab,
        drive_journal,
        drive_layers,
        drive_mount,
        drive_sys,
        drive_volume,
    )
    from kvhost.onhost.drive_disk import Disk, Refused, blkid, maj_min, say, step, tool
else:  # they lie beside this file on a host, where there is no package kvhost
    import drive_fs
    import drive_fstab
    import drive_journal
    import drive_layers
    import drive_mount
    import drive_sys
    import drive_volume
    from drive_disk import Disk, Refused, blkid, maj_min, say, step, tool

Data = dict[str, Any]
SCHEMA = 1
KEYS = ("drive", "findings", "action", "filesystem", "mount", "owner")
ACTIONS = ("keep", "adopt", "format", "mount")
DRIVE_FILE = drive_volume.DRIVE_FILE
#: as the settings take it, two names deep at least: nothing that fstab would have to escape
_MOUNT = re.compile(r"(/[A-Za-z0-9._+-]+){2,}")
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
    if order.get("filesystem") not in list(drive_fs.OPTIONS):
        wrong.append(f"filesystem is {order.get('filesystem')}")
    mount = order.get("mount")
    if (
        not isinstance(mount, str)
        or not _MOUNT.fullmatch(mount)
        or os.path.normpath(mount) != mount
    ):
        wrong.append(f"mount is {mount!r}, not a plain absolute path below a directory")
    if order.get("blank_check", "full") not in ("full", "sampled"):
        wrong.append(f"blank_check is {order['blank_check']!r}, not full or sampled")
    members = order.get("members") or [order]
    for member in members if isinstance(members, list) else [None]:
        wrong += _wrong_member(member)
    if order.get("owner") == "root":
        wrong.append("the owner is root; the cache belongs to the user of the services")
    try:
        pwd.getpwnam(str(order.get("owner")))
    except KeyError:
        wrong.append(f"the owner {order.get('owner')} is no user of this host")
    if wrong:
        raise ValueError("the order is not usable: " + "; ".join(wrong))
    return order


def _wrong_member(member: Any) -> list[str]:
    """What is wrong with one drive of an order: its identity, findings, action or token."""
    if not isinstance(member, dict):
        return [f"a member is {member!r}"]
    wrong, drive, findings = [], member.get("drive"), member.get("findings")
    words = (drive.get("path"), drive.get("maj_min")) if isinstance(drive, dict) else (None,)
    if not all(isinstance(word, str) and word.isprintable() and word for word in words):
        wrong.append("drive has no path or no maj_min")
    if not isinstance(findings, list) or not all(
        isinstance(f, dict) and isinstance(f.get("kind"), str) and isinstance(f.get("detail"), str)
        for f in findings
    ):
        wrong.append("findings are no list of kind and detail")
    if member.get("action") not in ACTIONS:
        wrong.append(f"action is {member.get('action')}, not one of {', '.join(ACTIONS)}")
    if not isinstance(member.get("token"), (str, type(None))):
        wrong.append("token is no text")
    return wrong


class Apply:
    """One order, from the held disk to a mounted and marked filesystem."""

    def __init__(self, order: Data, state: str, fstab: str) -> None:
        self.order, self.state, self.fstab = order, state, fstab
        self.drive, self.target = order["drive"], order["mount"]
        self.changed: list[str] = []

    def run(self, *, dry: bool) -> Data:
        step("hold")
        with contextlib.ExitStack() as stack:
            disks = []
            for member in drive_volume.members_of(self.order):
                drive = member["drive"]
                disk = Disk(drive["path"], drive["maj_min"], drive.get("diskseq"))
                disks.append(stack.enter_context(disk))
                disk.lock()
            self.place_is_free(disks)
            step("probe")
            volume, made = drive_volume.Volume(self.order, self.state, disks).find_or_make(dry=dry)
            names = ", ".join(disk.path for disk in disks)
            if made:
                self.changed.append(f"{names} formatted with {self.order['filesystem']}")
            if volume is None:
                return {"status": "dry", "changed": [], "would": self.changed}
            there = blkid(volume)
            if drive_mount.mounted_at(self.target) is None:
                for disk in disks:  # all that had to be guarded is written
                    disk.unlock()
                drive_mount.known_to_udev(volume, there["UUID"])
            self.mounted(volume, there)
        return {
            "status": "done",
            "changed": self.changed,
            "uuid": there["UUID"],
            "filesystem": there["TYPE"],
            "mount": self.target,
        }

    def place_is_free(self, disks: list[Disk]) -> None:
        """Raises Refused, before anything is written, if it could not be mounted in the end."""
        now = drive_mount.mounted_at(self.target)
        if now is None:
            drive_mount.check_mount_point(self.target)
        elif {disk.numbers for disk in disks} != drive_mount.disks_below(now.numbers):
            why = f"at {self.target} another filesystem is mounted: {now.filesystem} {now.source}"
            raise Refused("mount_taken", why)
        kind = self.order["filesystem"]
        line = drive_fstab.entry_for("not-yet", self.target, kind, drive_fs.OPTIONS[kind])
        if self.order["action"] == "format":
            drive_fstab.check_replaceable(self.fstab)
            drive_fstab.with_entry(drive_fstab.read(self.fstab), line)

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
        if self.order.get("encrypt"):
            step("crypttab")
            if drive_layers.Layers(self.order, self.state).into_crypttab(numbers):
                self.changed.append(f"{drive_layers.CRYPTTAB}: {drive_layers.NAME}")
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
            now = drive_mount.mounted_at(self.target)
            if now is None or "rw" not in now.options:
                why = f"{self.target} takes no writes: the kernel found errors in it (see dmesg)"
                raise RuntimeError(f"{why}; release the drive and check its filesystem")
            self.changed.append(f"{self.target} mounted anew with other options")
        self.put_up(there["UUID"])

    def put_up(self, uuid: str) -> None:
        step("marker")
        marker = {
            "schema": SCHEMA,
            "uuid": uuid,
            **identities(self.order),
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
        **identities(order),
    }


def identities(order: Data) -> Data:
    """The lasting identity of the drive; of several, of all, in an order that no boot changes."""
    rows = [drive_journal.identity_of(m["drive"]) for m in drive_volume.members_of(order)]
    rows.sort(key=lambda row: json.dumps(row, sort_keys=True))
    return {"drive": rows[0], **({"drives": rows} if len(rows) > 1 else {})}


def read_json(path: str) -> Any:
    try:
        with open(path, encoding="utf-8") as handle:
            return json.load(handle)
    except (FileNotFoundError, ValueError):
        return None


def fstab_line(order: Data, there: dict[str, str]) -> str:
    kind = there["TYPE"]
    layers = bool(order.get("encrypt")) or len(drive_volume.members_of(order)) > 1
    timeout_s = drive_layers.DEVICE_TIMEOUT_S if layers else drive_fstab.DEVICE_TIMEOUT_S
    options = drive_fs.OPTIONS[kind]
    return drive_fstab.entry_for(there["UUID"], order["mount"], kind, options, timeout_s)


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
    wanted = {member["drive"]["maj_min"] for member in drive_volume.members_of(order)}
    if wanted != drive_mount.disks_below(now.numbers):
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
    if order.get("encrypt") and not drive_layers.in_crypttab():
        wrong.append(f"{drive_layers.CRYPTTAB} has no line for it")
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
