#!/usr/bin/env python3
"""What lies between partitions and filesystem: RAID 0 (md) over several, LUKS2 if asked for.

Both are known by UUIDs of their own, drawn before they are made, never by a name. The key of LUKS
is 64 random bytes in secrets/drive.key, root's, 0600: with it destroyed, the data are too.
drive_layers.py DEVICE shows what a device is a part of.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import secrets
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

sys.dont_write_bytecode = True
if TYPE_CHECKING or __package__:
    from kvhost.onhost import drive_fstab, drive_mount
    from kvhost.onhost.drive_disk import Disk, Refused, blkid, maj_min, read_text, say, step, tool
    from kvhost.onhost.drive_journal import sync_directory
else:
    import drive_fstab
    import drive_mount
    from drive_disk import Disk, Refused, blkid, maj_min, read_text, say, step, tool
    from drive_journal import sync_directory

Data = dict[str, Any]
NAME = "kvhost"
MAPPED = f"/dev/mapper/{NAME}"
ARRAY = f"/dev/md/{NAME}"
CRYPTTAB = "/etc/crypttab"
KEY_BYTES = 64
STOP_TRIES = 8
#: seconds: an array is put together, a mapping opened, one after the other, before the filesystem
#: shows; the boot does not wait for it (nofail)
DEVICE_TIMEOUT_S = 180


def plain(uuid: str | None) -> str:
    """A UUID without its separators: mdadm groups the digits otherwise than blkid."""
    return re.sub(r"[^0-9a-f]", "", (uuid or "").lower())


class Layers:
    """`order`: encrypt and the number of members; `state`: directory beside secrets/."""

    def __init__(self, order: Data, state: str) -> None:
        self.encrypt = bool(order.get("encrypt"))
        self.key = os.path.join(os.path.dirname(os.path.abspath(state)), "secrets", "drive.key")

    def existing(self, parts: list[str]) -> str | None:
        """Opens what lies on kvhost partitions; the device of the filesystem, None without one.

        Raises Refused when it is kvhost's and cannot be opened.
        """
        device = parts[0]
        there = [blkid(part) for part in parts]
        if len(parts) > 1:
            arrays = {plain(found.get("UUID")) for found in there}
            kinds = {found.get("TYPE") for found in there}
            names = {found.get("LABEL", "").rpartition(":")[2] for found in there}
            if kinds != {"linux_raid_member"} or len(arrays) != 1 or names != {NAME}:
                return None
            device = self.assembled(arrays.pop(), parts)
        found = blkid(device)
        if not self.encrypt:
            return device if found.get("LABEL") == NAME else None
        if found.get("TYPE") != "crypto_LUKS" or found.get("LABEL") != NAME:
            return None
        if not self.opened(device):
            raise Refused("no_key", f"{device} is encrypted, and {self.key} does not open it")
        return MAPPED

    def taken_apart(self, disks: Sequence[Disk], journal: Data) -> None:
        """Closes what a cut-off run, or udev after it, had opened on its partitions: our mapping
        and the array of the journal. Mounted, they stay, and the probe will say so."""
        tops = [MAPPED] if os.path.exists(MAPPED) else []
        array = running_array(journal["md_uuid"]) if len(disks) > 1 else None
        tops += [array] if array else []
        for top in tops:
            if not os.path.exists(top):
                continue  # gone with the one before
            numbers = maj_min(os.stat(top).st_rdev)
            if drive_mount.disks_below(numbers) <= {disk.numbers for disk in disks}:
                with contextlib.suppress(RuntimeError):
                    close(top)

    def made(self, parts: list[str], journal: Data, keep: tuple[int, ...]) -> str:
        """The device to make the filesystem on; what a run before left half-made is made anew.

        Raises Refused if anything else lies there.
        """
        device = parts[0]
        if len(parts) > 1:
            step("array")
            device = self._array(parts, plain(journal["md_uuid"]), keep)
        if self.encrypt:
            step("luks")
            device = self._luks(device, journal["luks_uuid"], keep)
        return device

    def _array(self, parts: list[str], uuid: str, keep: tuple[int, ...]) -> str:
        ours = []
        for part in parts:
            there = blkid(part)
            mine = plain(there.get("UUID")) == uuid and there.get("TYPE") == "linux_raid_member"
            if there and not mine:
                raise Refused("not_empty", f"{part} holds something: {there}")
            ours += [part] if mine else []
        if len(ours) == len(parts):
            return self.assembled(uuid, parts)
        if running := running_array(uuid):
            stop(running)
        for part in ours:
            tool("mdadm", "--zero-superblock", part, keep=keep)
        say(f"{ARRAY}: RAID 0 over {', '.join(parts)}")
        tool(
            *("mdadm", "--create", ARRAY, "--run", "--level=0", "--metadata=1.2"),
            *(f"--name={NAME}", "--homehost=any", f"--uuid={as_mdadm(uuid)}"),
            *(f"--raid-devices={len(parts)}", *parts),
            keep=keep,
        )  # fmt: skip
        return self.assembled(uuid, parts)

    def assembled(self, uuid: str, parts: list[str]) -> str:
        """Path of the running array, started if udev has not. Raises RuntimeError."""
        path = running_array(uuid)
        if path is None:
            tool("mdadm", "--assemble", ARRAY, f"--uuid={as_mdadm(uuid)}", *parts, accept=(0, 1, 2))
            path = running_array(uuid)
        if path is None:
            raise RuntimeError(f"the array {as_mdadm(uuid)} over {parts} does not start")
        return path

    def _luks(self, device: str, uuid: str, keep: tuple[int, ...]) -> str:
        there = blkid(device)
        if there and (there.get("TYPE"), there.get("UUID")) != ("crypto_LUKS", uuid):
            raise Refused("not_empty", f"{device} holds something: {there}")
        if there and self.opened(device):
            return MAPPED
        if there:  # a header without a key that opens it: cut off while it was made
            tool("wipefs", "--quiet", "--all", "--types", "crypto_LUKS", device, keep=keep)
        self.make_key()
        say(f"{device}: LUKS2")
        tool(
            *("cryptsetup", "luksFormat", "--batch-mode", "--type", "luks2", "--label", NAME),
            *("--uuid", uuid, "--key-file", self.key),
            # the key is random: nothing is won by making guesses slow
            *("--pbkdf", "pbkdf2", "--pbkdf-force-iterations", "1000", device),
            keep=keep,
        )  # fmt: skip
        if not self.opened(device):
            raise RuntimeError(f"{device} was encrypted and does not open")
        return MAPPED

    def opened(self, device: str) -> bool:
        """Whether the mapping is there, over this very device. Raises RuntimeError if it is over
        another."""
        if os.path.exists(MAPPED):
            name = os.path.basename(os.path.realpath(MAPPED))
            below = os.listdir(f"/sys/block/{name}/slaves")
            numbers = maj_min(os.stat(device).st_rdev)
            if [read_text(f"/sys/class/block/{one}/dev") for one in below] != [numbers]:
                raise RuntimeError(f"{MAPPED} is there and does not lie on {device}")
            return True
        if not os.path.exists(self.key):
            return False
        words = ("--key-file", self.key, "--allow-discards", device, NAME)
        tool("cryptsetup", "open", "--type", "luks2", *words, accept=(0, 1, 2, 4))
        return os.path.exists(MAPPED)

    def erased(self, parts: list[str]) -> bool:
        """Destroys the key slots of LUKS2 over these partitions, and the key; False without it."""
        there = [blkid(part) for part in parts]
        device, array = parts[0], None
        if len(parts) > 1 and {found.get("TYPE") for found in there} == {"linux_raid_member"}:
            device = array = self.assembled(plain(there[0].get("UUID")), parts)
        encrypted = blkid(device).get("TYPE") == "crypto_LUKS"
        if encrypted:
            step("key-slots")
            tool("cryptsetup", "luksErase", "--batch-mode", device)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.key)
        if array is not None:
            stop(array)
        return encrypted

    def into_crypttab(self, numbers: str) -> bool:
        """The line that opens it at boot, for the mapping with these numbers; False if it is
        there. Raises Refused if the name is somebody else's, RuntimeError, OSError."""
        slaves = os.listdir(f"/sys/dev/block/{numbers}/slaves")
        uuid = blkid(f"/dev/{slaves[0]}")["UUID"]
        more = f"luks,nofail,discard,x-systemd.device-timeout={DEVICE_TIMEOUT_S}s"
        line = f"{NAME} UUID={uuid} {self.key} {more}"
        lines = _crypttab_lines()
        for other in lines:
            words = other.split()
            if words[:1] == [NAME] and words[2:3] != [self.key]:
                raise Refused("crypttab_taken", f"{CRYPTTAB} has another {NAME}: {other}")
        wanted = [other for other in lines if other.split()[:1] != [NAME]] + [line]
        return replace_crypttab(wanted) if line not in lines else False

    def make_key(self) -> None:
        """On the disk before it is used."""
        if os.path.exists(self.key) and os.path.getsize(self.key) == KEY_BYTES:
            return
        os.makedirs(os.path.dirname(self.key), 0o711, exist_ok=True)
        temporary = self.key + ".new"
        if os.path.lexists(temporary):
            os.unlink(temporary)
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(fd, "wb") as handle:
            handle.write(secrets.token_bytes(KEY_BYTES))
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(temporary, self.key)
        sync_directory(os.path.dirname(self.key))


def _crypttab_lines() -> list[str]:
    try:
        with open(CRYPTTAB, encoding="utf-8") as handle:
            return handle.read().splitlines()
    except FileNotFoundError:
        return []


def in_crypttab() -> bool:
    return any(line.split()[:1] == [NAME] for line in _crypttab_lines())


def replace_crypttab(lines: list[str]) -> bool:
    drive_fstab.install(CRYPTTAB, "".join(f"{line}\n" for line in lines), verify=False)
    if os.path.isdir("/run/systemd/system"):
        tool("systemctl", "daemon-reload")
    return True


def out_of_crypttab() -> bool:
    """Takes our line away; False if there is none."""
    if not in_crypttab():
        return False
    return replace_crypttab([line for line in _crypttab_lines() if line.split()[:1] != [NAME]])


def as_mdadm(uuid: str) -> str:
    return ":".join(uuid[at : at + 8] for at in range(0, 32, 8))


def running_array(uuid: str) -> str | None:
    """Path of the running array with this UUID, whatever its name."""
    for name in sorted(os.listdir("/sys/block")):
        if name.startswith("md") and os.path.exists(f"/sys/block/{name}/md"):
            told = tool("mdadm", "--detail", "--export", f"/dev/{name}", accept=(0, 1, 2, 4))
            found = re.search(r"^MD_UUID=(\S+)", told, re.M)
            if found and plain(found[1]) == plain(uuid):
                return f"/dev/{name}"
    return None


def stop(array: str) -> None:
    """Raises RuntimeError if it is in use, and stays so: udev may only look at it."""
    for left in range(STOP_TRIES, -1, -1):
        try:
            tool("mdadm", "--stop", array)
            return
        except RuntimeError:
            if not left:
                raise
        time.sleep(0.5)


def close_over(device: str) -> None:
    """Takes apart what lies over a partition of kvhost's. Raises RuntimeError if it is in use."""
    name = os.path.basename(os.path.realpath(device))
    for holder in sorted(os.listdir(f"/sys/class/block/{name}/holders")):
        close_over(f"/dev/{holder}")
        if holder.startswith("dm-"):
            if read_text(f"/sys/class/block/{holder}/dm/name") != NAME:
                raise RuntimeError(f"{holder} lies on {device} and is not kvhost's")
            tool("cryptsetup", "close", NAME)
        else:
            stop(f"/dev/{holder}")


def close(device: str) -> None:
    """Takes a mapping or an array apart from the top, after the filesystem was unmounted."""
    name = os.path.basename(os.path.realpath(device))
    slaves = f"/sys/class/block/{name}/slaves"
    below = sorted(os.listdir(slaves)) if os.path.isdir(slaves) else []
    if not below:
        return
    if name.startswith("dm-"):
        tool("cryptsetup", "close", NAME)
    else:
        stop(f"/dev/{name}")
    for one in below:
        close(f"/dev/{one}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("device")
    device = parser.parse_args().device
    name = os.path.basename(os.path.realpath(device))
    slaves = f"/sys/class/block/{name}/slaves"
    below = sorted(os.listdir(slaves)) if os.path.isdir(slaves) else []
    print(json.dumps({"device": device, "below": below, "holds": blkid(device)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
