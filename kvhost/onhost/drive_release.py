#!/usr/bin/env python3
"""Gives a drive back: drive_release.py release --state DIR, or wipe --order FILE. As root.

release  unmounts what state/drive.json names, takes its line out of fstab, makes the mount point an
         ordinary directory again or removes it. The data stay on the drive. Works without the drive
         too (broken, pulled). Says which token would allow a wipe.
wipe     takes the partition table and all signatures off an unmounted kvhost drive. Only with the
         order's token, which is bound to drive, machine and what lies on it. This is no erasure:
         the data can still be read with effort. Only of an encrypted drive (LUKS2) the key slots
         are destroyed, and with them the data.

Services that use the drive have to be stopped before. JSON on stdout. Exit: 0 done, 3 refused,
1 failed, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from typing import TYPE_CHECKING, Any

sys.dont_write_bytecode = True
if TYPE_CHECKING or __package__:
    from kvhost.onhost import (
        drive_apply,
        drive_fs,
        drive_fstab,
        drive_journal,
        drive_layers,
        drive_mount,
        drive_probe,
        drive_sys,
        drive_volume,
        drive_write,
    )
    from kvhost.onhost.drive_disk import Disk, Refused, say, step, tool
else:
    import drive_apply
    import drive_fs
    import drive_fstab
    import drive_journal
    import drive_layers
    import drive_mount
    import drive_probe
    import drive_sys
    import drive_volume
    import drive_write
    from drive_disk import Disk, Refused, say, step, tool

Data = dict[str, Any]


def release(state: str, fstab: str) -> Data:
    """Each step is done if it is still to do, so that a run that was cut off is completed."""
    record = drive_journal.read_record(state)
    if record is None:
        return {"status": "done", "changed": [], "why": "no drive of kvhost's is in use here"}
    target, changed = record["mount"], []
    disks: set[str] = set()
    now = drive_mount.mounted_at(target)
    if now is not None:
        marker = drive_fs.read_marker(target)
        if marker is None or marker["uuid"].lower() != record["uuid"].lower():
            why = f"what is mounted at {target} is not the drive that kvhost mounted there"
            raise Refused("not_ours", why)
        disks = drive_mount.disks_below(now.numbers)
        also = mounted_too(target)
        if also:  # it would still be written there after it was called released
            where = ", ".join(also)
            why = f"the drive is mounted at {where} as well: unmount that first (umount {also[-1]})"
            raise Refused("drive_busy", why)
        step("unmount")
        try:
            tool("umount", target)
        except RuntimeError as error:
            why = f"{target} is in use: stop what uses it first ({error}; fuser -vm {target})"
            raise Refused("drive_busy", why) from error
        changed.append(f"{target} unmounted")
        drive_layers.close(now.source)
    step("fstab-line")
    text = drive_fstab.read(fstab)
    if drive_fstab.install(fstab, drive_fstab.without_ours(text)):
        changed.append(f"{fstab}: kvhost's line taken out")
        if drive_mount.has_systemd():
            tool("systemctl", "daemon-reload")
    if drive_layers.out_of_crypttab():
        changed.append(f"{drive_layers.CRYPTTAB}: kvhost's line taken out")
    step("mount-point")
    theirs = [e for e in drive_fstab.entries(drive_fstab.read(fstab)) if e.target == target]
    if os.path.isdir(target) and not theirs:  # of an adopted drive it is another's mount point
        drive_mount.open_mount_point(target)
        with contextlib.suppress(OSError):  # it holds something: it stays
            os.rmdir(target)
        changed.append(f"{target} is no mount point any more")
    step("forget")
    os.unlink(os.path.join(state, drive_apply.DRIVE_FILE))
    drive_journal.sync_directory(state)
    answer: Data = {"status": "done", "changed": changed, "tokens": {}}
    for numbers in sorted(disks):
        name = os.path.basename(os.path.realpath(f"/sys/dev/block/{numbers}"))
        token = wipe_token(drive_probe.probe(f"/dev/{name}"))
        answer["tokens"][f"/dev/{name}"] = token
        say(f"/dev/{name} is released; its data are still on it. To have it wiped, once more with "
            f"drive_erase = '{token}' in the data of this host")  # fmt: skip
    return answer


def mounted_too(target: str) -> list[str]:
    """Where else the device is mounted that is mounted at ``target``, wholly or a part of it."""
    devices = [(m.point, set(drive_sys.devices_of(m))) for m in drive_sys.mounts()]
    here = set().union(*(names for point, names in devices if point == target))
    return sorted(point for point, names in devices if point != target and here & names)


def wipe_token(found: Data) -> str | None:
    """The token for all that lies on a drive now; None where none can be bound."""
    machine_id = drive_sys.machine_id()
    if found["status"] != "ok" or not machine_id:
        return None
    return drive_probe.token(found["device"], machine_id, found["findings"])


def wipe(order: Data, state: str) -> Data:
    """Raises Refused unless every drive is kvhost's own, not in use, and has its token; before
    that nothing is written to any of them."""
    members = drive_volume.members_of(order)
    layers = drive_layers.Layers(order, state)
    with contextlib.ExitStack() as stack:
        held = []
        for member in members:
            drive = member["drive"]
            disk = Disk(drive["path"], drive["maj_min"], drive.get("diskseq"))
            held.append(stack.enter_context(disk))
            disk.lock()
            part = drive_volume.own_partition(disk)
            if part is None or drive_probe.probe(disk.path)["device"]["kvhost"] is None:
                raise Refused("not_ours", f"{disk.path} is no drive that kvhost formatted")
            drive_layers.close_over(part)  # what udev has started by itself
        found = [may_be_wiped(disk, m, order) for disk, m in zip(held, members)]  # noqa: B905
        parts = [disk.partition_path(1) for disk in held]
        erased = layers.erased(parts)
        for disk, member, seen in zip(held, members, found):  # noqa: B905
            step("wipe")
            drive_write.Writer(disk, member, seen, state).take_off()
    names = [member["drive"]["path"] for member in members]
    return {"status": "done", "changed": [f"{name} wiped" for name in names], "erased": erased}


def may_be_wiped(disk: Disk, member: Data, order: Data) -> Data:
    """What lies on the drive. Raises Refused: it is in use, or the order has not its token."""
    found = drive_volume.probed(disk, member)
    never = [f for f in found["findings"] if f["kind"] not in drive_probe.ERASABLE]
    if never:
        words = "; ".join(f"{f['kind']}: {f['detail']}" for f in never)
        raise Refused("drive_in_use", f"{disk.path} is not wiped: {words}")
    token = wipe_token(found)
    if token is None or token not in str(order.get("token")).split(","):
        why = f"{disk.path} is wiped only with drive_erase = '{token}' in this host's own data"
        raise Refused("no_token", why, token=token, findings=found["findings"])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("release", "wipe"))
    parser.add_argument("--state", required=True, help="state/ of base_dir")
    parser.add_argument("--order", help="for wipe: the order with drive and token")
    parser.add_argument("--fstab", default="/etc/fstab")
    args = parser.parse_args()
    if args.what == "wipe" and not args.order:
        parser.error("wipe needs --order")
    answer: Data
    try:
        if os.geteuid() != 0:
            raise ValueError("this needs root")
        if args.what == "release":
            answer, code = release(args.state, args.fstab), 0
        else:
            answer, code = wipe(drive_apply.read_order(args.order), args.state), 0
    except Refused as error:
        answer, code = {"status": "refused", "code": error.code, "why": error.why, **error.more}, 3
    except (OSError, RuntimeError, ValueError) as error:
        answer, code = {"status": "failed", "why": str(error)}, 1
    if code:
        say(f"{answer['status']}: {answer['why']}")
    print(json.dumps(answer))
    return code


if __name__ == "__main__":
    sys.exit(main())
