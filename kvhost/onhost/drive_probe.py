#!/usr/bin/env python3
"""Says what block devices are and hold, and what stands against formatting them. Reads only.

drive_probe.py list [--json]         every drive of the host
drive_probe.py show DEVICE [--json]  one (a path in /dev, also one in /dev/disk/by-id)

As root. A probe reads the places where formats keep their headers, never a whole drive. What
could not be found out makes a drive "unreadable", with the reason; it never looks like a blank
one. Exit 0: everything was read; 1: something was not.

A finding is {"kind", "detail"}. Kinds that a token may allow to be erased: ERASABLE. Never: NEVER.
"""

from __future__ import annotations

import argparse
import errno
import functools
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

sys.dont_write_bytecode = True  # bin/ stays as it was installed
if TYPE_CHECKING or __package__:
    from kvhost.onhost import drive_content, drive_sys
else:  # they lie beside this file on a host, where there is no package kvhost
    import drive_content
    import drive_sys

Data = dict[str, Any]
Found = Iterator[tuple[str, str]]
#: what a drive may hold and still be erased with the right token
ERASABLE = frozenset({"partition_table", "signature", "leftover", "shareable"})
#: what no token allows
NEVER = frozenset(
    {"system", "mounted", "holder", "swap", "busy", "in_use", "fstab", "read_only", "health"}
    | {"no_identity", "fabric", "multipath", "hidden", "zoned", "not_a_drive"}
)
#: what reading can raise, a tool that answers in another form too
TROUBLE = (OSError, ValueError, KeyError, TypeError, subprocess.SubprocessError)
#: transports of a drive that is attached to this host alone
LOCAL = frozenset({"nvme", "sata", "sas", "scsi", "usb", "virtio", "xen", "mmc", "loop"})
#: names of block devices that are no drives: layers, memory, optical and network devices
NO_DRIVE = re.compile(
    r"(dm-|md|md_d|zram|ram|sr|fd|nbd|rbd|drbd|bcache|zd|pmem|nullb)\d|mmcblk\d+(boot|rpmb|gp)"
)
#: seconds after which a drive that is still open, or held, is in use
A_LOOK_S, LOOKS = 0.4, 4
IDENTITY = ("by_id", "wwn", "serial", "model", "size_bytes", "backing")
#: bits of the critical warning of an NVMe drive (NVMe base specification, log page 02h)
WARNINGS = ("spare capacity is low", "temperature is out of range", "reliability is degraded",
            "media is read-only", "backup of volatile memory failed",
            "persistent memory region is unreliable")  # fmt: skip


class Context:
    """What is the same for all drives of one look: mounts, swap, open files, fstab.

    `problems`: what of it could not be read; then no drive's findings are complete.
    """

    def __init__(self) -> None:
        self.problems: list[str] = []
        if os.geteuid() != 0:
            self.problems.append("not root: drives can be neither read nor asked")
        self.mounts = self._of("mounts", drive_sys.mounts, [])
        self.swaps = self._of("swap devices", drive_sys.swaps, [])
        self.fstab = self._of("/etc/fstab", drive_sys.fstab, [])
        self.users, closed = self._of("open files", drive_sys.open_by_processes, ({}, 0))
        self._later: dict[str, list[str]] | None = None
        # what the kernel itself holds is known all the same: see _users
        self.notes = [f"processes that do not show what they have open: {closed}"] if closed else []
        self.mounted: dict[str, list[drive_sys.Mount]] = {}
        for mount in self.mounts:
            look = functools.partial(drive_sys.devices_of, mount)
            for name in self._of(f"what {mount.point} lies on", look, []):
                self.mounted.setdefault(name, []).append(mount)
        of_system = [n for n, ms in self.mounted.items() if any(map(_is_system, ms))]
        self.system = {low for name in of_system for low in drive_sys.below(name)}

    def lasting_users(self, dev: str) -> list[str]:
        """Who has it open, now and a moment later: udev, smartd and the like only look at it.

        Raises OSError. What only looks cannot harm: the step that writes asks again, holds the
        drive and counts what is written to it.
        """
        if dev not in self.users:
            return []
        if self._later is None:
            time.sleep(A_LOOK_S)
            self._later, _ = drive_sys.open_by_processes()
        return [who for who in self.users[dev] if who in self._later.get(dev, [])]

    def _of(self, what: str, read: Callable[[], Any], default: Any) -> Any:
        try:
            return read()
        except (OSError, ValueError) as why:
            self.problems.append(f"{what}: {_words(why)}")
            return default


def _is_system(mount: drive_sys.Mount) -> bool:
    return mount.point in drive_sys.SYSTEM_MOUNTS


def token(identity: Data, machine_id: str, findings: list[Data]) -> str:
    """What allows this drive, on this machine, with just these findings, to be erased.

    `identity`: by_id, wwn, serial, model, size_bytes, backing count, other keys do not. Another
    drive, machine or finding gives another token; the order of the findings does not matter.
    """
    facts = {
        "identity": {key: identity.get(key) for key in IDENTITY},
        "machine_id": machine_id,
        "findings": sorted([one["kind"], one["detail"]] for one in findings),
    }
    canonical = json.dumps(facts, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return f"erase-{hashlib.sha256(canonical.encode()).hexdigest()[:32]}"


def probe(path: str, context: Context | None = None) -> Data:
    """{"status": "ok"|"unreadable", "why", "device": {…}|None, "findings": [{"kind", "detail"}]}.

    `path`: of a device node or a link to one. With "unreadable" the findings are what was found
    nevertheless. Findings are sorted, and the same for the same state of the drive.
    """
    context = context or Context()
    real = os.path.realpath(path)
    name = drive_sys.by_path(real)
    if name is None:
        return _unreadable(f"{path} is no block device here")
    return probe_name(name, context)


def probe_name(name: str, context: Context) -> Data:
    """As probe(), of a kernel name (nvme0n1)."""
    why = list(context.problems)
    device = _device(name, why)
    if device is None:
        return _unreadable("; ".join(why))
    device["notes"] = list(context.notes)
    findings: list[Data] = []

    def add(look: Callable[[str, Data, Context], Found]) -> None:
        try:
            for kind, detail in look(name, device, context):
                row = {"kind": kind, "detail": detail}
                if row not in findings:
                    findings.append(row)
        except TROUBLE as trouble:
            if (words := _words(trouble)) not in why:
                why.append(words)

    add(_kind)
    if not findings:
        for look in (_state, _identity, _layers, _users, _contents, _signatures, _nvme):
            add(look)
        add(_in_fstab)
    findings.sort(key=lambda row: (row["kind"], row["detail"]))
    status = "unreadable" if why else "ok"
    return {"status": status, "why": "; ".join(why) or None, "device": device,
            "findings": findings}  # fmt: skip


def probe_all() -> Data:
    """{"machine_id", "drives": [as probe()]} of every drive, layers left out. Raises OSError."""
    context = Context()
    names = [name for name in drive_sys.all_names() if is_listed(name)]
    return {"machine_id": drive_sys.machine_id(), "drives": [probe_name(n, context) for n in names]}


def is_listed(name: str) -> bool:
    """Whole drives that have a size: no partitions, layers, single paths of a drive, or loop
    devices without a file."""
    if drive_sys.is_partition(name) or NO_DRIVE.match(name):
        return False
    return drive_sys.size_of(name) > 0 and not drive_sys.number(drive_sys.block(name, "hidden"))


def _unreadable(why: str) -> Data:
    return {"status": "unreadable", "why": why, "device": None, "findings": []}


def _words(why: BaseException) -> str:
    return str(why) or type(why).__name__


def _device(name: str, why: list[str]) -> Data | None:
    """What a drive is. `why` gets what could not be read; None when it is gone."""
    at = drive_sys.block(name)
    queue = at / "queue" if not drive_sys.is_partition(name) else at / "../queue"
    try:
        device: Data = {
            "name": name,
            "path": f"/dev/{name.replace('!', '/')}",
            "maj_min": (at / "dev").read_text().strip(),
            "diskseq": drive_sys.number(at / "diskseq") or None,
            "size_bytes": drive_sys.size_of(name),
            "transport": drive_sys.transport(name),
            "logical_bytes": drive_sys.number(queue / "logical_block_size"),
            "physical_bytes": drive_sys.number(queue / "physical_block_size"),
            "discard_bytes": drive_sys.number(queue / "discard_granularity"),
            "rotational": bool(drive_sys.number(queue / "rotational")),
            "removable": bool(drive_sys.number(at / "removable")),
            "hidden": bool(drive_sys.number(at / "hidden")),
            "read_only": bool(drive_sys.number(at / "ro")),
            "zoned": drive_sys.text(queue / "zoned") or "none",
            "partitions": drive_sys.partitions(name),
            "contents": [],
            "kvhost": None,
            "health": {"status": "absent", "why": "only NVMe drives are asked", "data": None},
            "pcie": {"status": "absent", "why": "it is on no PCIe link", "data": None},
        }
    except (OSError, ValueError) as trouble:
        why.append(_words(trouble))
        return None
    device.update(dict.fromkeys(("model", "serial", "wwn", "by_id", "backing")), by_ids=[])
    try:
        device.update(drive_sys.identity(name))
    except (OSError, ValueError) as trouble:
        why.append(f"identity: {_words(trouble)}")
    return device


def _kind(name: str, device: Data, context: Context) -> Found:
    if drive_sys.is_partition(name):
        yield "not_a_drive", f"a partition of {drive_sys.parent(name)}"
    elif NO_DRIVE.match(name):
        yield "not_a_drive", f"{name} is a layer on other drives, or memory, or read from elsewhere"
    elif not device["size_bytes"]:
        yield "not_a_drive", "it has no size: no medium, or not set up"
    elif name.startswith("loop") and drive_sys.loops().get(name, (0, 0, 0))[2]:
        yield "not_a_drive", "a loop device over another block device, which may be in use itself"


def _state(name: str, device: Data, context: Context) -> Found:
    if device["read_only"]:
        yield "read_only", "the kernel lets nothing be written to it"
    if device["hidden"]:
        yield "hidden", "one path of several to a drive"
    if device["zoned"] != "none":
        yield "zoned", f"it has zones ({device['zoned']}), that filesystems here do not handle"
    if device["transport"] not in LOCAL:
        yield "fabric", f"attached by {device['transport']}: other hosts can write to it"
    if name in context.system:
        yield "system", "the running system lies on it"


def _identity(name: str, device: Data, context: Context) -> Found:
    if not any(device[key] for key in ("wwn", "serial", "by_id")):
        yield "no_identity", "it has no serial, no WWN and no link in /dev/disk/by-id"


def _layers(name: str, device: Data, context: Context) -> Found:
    tree = drive_sys.above(name)
    for one in tree:
        for mount in context.mounted.get(one, ()):
            yield "mounted", f"{one} at {mount.point} ({mount.fs})"
        if one in context.swaps:
            yield "swap", f"{one} is in use as swap"
        if one != name and one not in device["partitions"]:
            yield "holder", f"{one} ({_layer(one)}) is built on it"
    files = drive_sys.loops() if name.startswith("loop") else {}
    for other in sorted(set(files) - {name}):
        if files[other] == files.get(name):
            yield "holder", f"{other} has the same file behind it"


def _layer(name: str) -> str:
    """lvm, luks, multipath, md raid1, bcache, …"""
    kind = (drive_sys.text(drive_sys.block(name, "dm/uuid")) or "").partition("-")[0].lower()
    words = {"crypt": "luks", "mpath": "multipath", "lvm": "lvm"}
    if name.startswith("dm-"):
        return words.get(kind, kind or "device mapper")
    level = drive_sys.text(drive_sys.block(name, "md/level"))
    return f"md {level}" if level else re.sub(r"\d.*", "", name)


def _users(name: str, device: Data, context: Context) -> Found:
    """Held by a filesystem, layer or swap of any namespace, or open in a process."""
    for one in (name, *device["partitions"]):
        dev = drive_sys.text(drive_sys.block(one, "dev")) or ""
        if who := context.lasting_users(dev):
            yield "in_use", f"{one} is open in {', '.join(who[:4])}"
        if _is_held(one):
            yield "busy", f"{one} is held by the kernel (filesystem, LVM, md, ZFS, swap, …)"


def _is_held(name: str) -> bool:
    """Whether somebody has it to himself, and for longer than a look takes."""
    for look in range(LOOKS):
        try:  # no write and no signal to udev: it is opened to read
            os.close(os.open(drive_sys.host("dev", name), os.O_RDONLY | os.O_EXCL | os.O_CLOEXEC))
            return False
        except OSError as why:
            if why.errno != errno.EBUSY:
                raise OSError(f"/dev/{name} cannot be opened: {why.strerror}") from None
            time.sleep(A_LOOK_S / LOOKS * (look + 1 < LOOKS))
    return True


def _contents(name: str, device: Data, context: Context) -> Found:
    """Partition table, what each partition is and holds. Fills device["contents"], ["kvhost"]."""
    yield from drive_content.tables(name, device)
    device["kvhost"] = drive_content.kvhosts_own(device, context.mounted)


def _signatures(name: str, device: Data, context: Context) -> Found:
    yield from drive_content.signatures(name, device)


def _nvme(name: str, device: Data, context: Context) -> Found:
    """Health, link, and whether other controllers can reach it."""
    if device["transport"] != "nvme":
        return
    try:
        link = drive_sys.pcie(name)
        if link:
            device["pcie"] = {"status": "ok", "why": None, "data": link}
    except (OSError, ValueError) as why:
        device["pcie"] = {"status": "unreadable", "why": _words(why), "data": None}
    paths = drive_sys.controllers(name)
    if len(paths) > 1:
        yield (
            "multipath",
            f"{len(paths)} controllers lead to it: {', '.join(p.name for p in paths)}",
        )
    fd = os.open(device["path"], os.O_RDONLY | os.O_CLOEXEC)
    try:
        log = drive_sys.smart(fd)
        shared = drive_sys.shareable(fd, drive_sys.namespace_id(name))
    except OSError as why:
        device["health"] = {"status": "unreadable", "why": _words(why), "data": None}
        raise OSError(f"NVMe health: {_words(why)}") from None
    finally:
        os.close(fd)
    device["health"] = {"status": "ok", "why": None, "data": log}
    bits = [word for n, word in enumerate(WARNINGS) if log["critical_warning"] >> n & 1]
    if log["critical_warning"]:
        yield "health", f"critical warning {log['critical_warning']:#x}: {', '.join(bits)}"
    if shared:
        yield "shareable", "several controllers, and so other hosts, may use it at the same time"


def _in_fstab(name: str, device: Data, context: Context) -> Found:
    """Lines of /etc/fstab that name this drive, whether it is mounted now or not."""
    rows = device["contents"]
    tree = drive_sys.above(name)
    for what, where in context.fstab:
        key, _, value = what.partition("=")
        value = value.strip('"')
        fields = {
            "UUID": "uuid",
            "LABEL": "label",
            "PARTUUID": "partuuid",
            "PARTLABEL": "partlabel",
        }
        if key in fields:
            hit = any((row[fields[key]] or "").lower() == value.lower() for row in rows)
        else:
            hit = what.startswith("/dev/") and drive_sys.by_path(os.path.realpath(what)) in tree
        if hit:
            yield "fstab", f"/etc/fstab names it for {where}"


def main(argv: list[str] | None = None) -> int:
    cli = argparse.ArgumentParser(
        description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    more = argparse.ArgumentParser(add_help=False)
    more.add_argument("--json", action="store_true", help="one JSON object")
    sub = cli.add_subparsers(dest="what", required=True)
    sub.add_parser("list", parents=[more], help="every drive")
    show = sub.add_parser("show", parents=[more], help="one drive")
    show.add_argument("device", help="its path")
    args = cli.parse_args(argv)
    try:
        found: Data = probe_all() if args.what == "list" else {
            "machine_id": drive_sys.machine_id(), "drives": [probe(args.device)],
        }  # fmt: skip
    except OSError as why:
        print(f"drive_probe: {why}", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps(found, separators=(",", ":")))
    else:
        for row in found["drives"]:
            _print(row)
    return 1 if any(row["status"] != "ok" for row in found["drives"]) else 0


def _print(row: Data) -> None:
    device = row["device"] or {}
    size = device.get("size_bytes", 0)
    print(f"{device.get('path', '?')}  {size / 1e12:.3f} TB ({size / (1 << 40):.3f} TiB)  "
          f"{device.get('transport')}")  # fmt: skip
    for key in ("model", "serial", "wwn", "by_id"):
        print(f"  {key:8} {device.get(key) or '-'}")
    if row["status"] != "ok":
        print(f"  NOT READ {row['why']}")
    for found in row["findings"]:
        print(f"  {found['kind']}: {found['detail']}")
    if row["status"] == "ok" and not row["findings"]:
        print("  nothing was found on it")


if __name__ == "__main__":
    sys.exit(main())
