"""What the kernel says about block devices: identity, layers, mounts, users. Nothing is written.

All of it is from sysfs and procfs, so that it needs no package and no udev. A file that cannot be
read raises OSError; only a file that is known not to be there is None.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import re
import stat
import struct
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path("/")  # tests put a directory with its own sys, proc, dev and etc here
FD_LOOK_S = 5.0
#: mount points of a system: the drives below them are never kvhost's
SYSTEM_MOUNTS = frozenset(
    {"/", "/boot", "/boot/efi", "/boot/firmware", "/efi", "/etc", "/home", "/nix", "/opt", "/root"}
    | {"/srv", "/tmp", "/usr", "/usr/local", "/var", "/var/cache", "/var/lib", "/var/log"}
    | {"/var/tmp"}
)
Data = dict[str, Any]


class Mount(NamedTuple):
    """One line of /proc/self/mountinfo; `dev` is "major:minor", `root` what of the filesystem."""

    dev: str
    point: str
    fs: str
    source: str
    root: str = "/"


def host(*parts: str) -> Path:
    return ROOT.joinpath(*(part.lstrip("/") for part in parts))


def block(name: str, *parts: str) -> Path:
    return host("sys/class/block", name, *parts)


def text(path: Path) -> str | None:
    """A file's text, stripped; None when it is known not to be there."""
    try:
        return path.read_text(errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None


def json_file(path: str) -> Any:
    """What a small JSON file on a drive holds; what lies there may be anyone's, so that no link is
    followed and no pipe waited for. Raises OSError, ValueError."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, encoding="utf-8") as file:
        return json.loads(file.read(1 << 20))


def number(path: Path, default: int = 0) -> int:
    got = text(path)
    return int(got) if got else default


def entries(path: Path) -> list[str]:
    try:
        return sorted(os.listdir(path))
    except (FileNotFoundError, NotADirectoryError):
        return []


def all_names() -> list[str]:
    """Kernel names of all block devices, partitions too. Raises OSError where sysfs is missing."""
    return sorted(os.listdir(host("sys/class/block")))


def size_of(name: str) -> int:
    """Bytes; sysfs counts in 512 bytes whatever the sector is."""
    return number(block(name, "size")) * 512


def is_partition(name: str) -> bool:
    return block(name, "partition").exists()


def partitions(name: str) -> list[str]:
    here = entries(block(name))
    return [one for one in here if one.startswith(name) and block(name, one, "partition").exists()]


def parent(name: str) -> str:
    """The whole drive of a partition."""
    return Path(os.path.realpath(block(name))).parent.name


def above(name: str) -> list[str]:
    """A drive, its partitions and, on any layer, what is built on them (`holders`, and loop devices
    that have one of them for a file, which the kernel lists nowhere)."""
    found, todo, loops = [], [name], loops_by_device()
    while todo:
        one = todo.pop(0)
        if one not in found:
            found.append(one)
            todo += partitions(one) + entries(block(one, "holders"))
            todo += loops.get(text(block(one, "dev")) or "", [])
    return found


def loops_by_device() -> dict[str, list[str]]:
    """ "major:minor" of a block device -> loop devices that have it, not a file, behind them."""
    found: dict[str, list[str]] = {}
    for name, (_, _, rdev) in loops().items():
        if rdev:
            found.setdefault(f"{os.major(rdev)}:{os.minor(rdev)}", []).append(name)
    return found


def loops() -> dict[str, tuple[int, int, int]]:
    """Loop device in use -> device and inode of the file behind it, and that file's own device
    number: 0 unless it is a block device."""
    found = {}
    for name in all_names():
        if not name.startswith("loop") or not text(block(name, "loop/backing_file")):
            continue
        try:
            found[name] = struct.unpack_from("<QQQ", _loop_info(name))
        except OSError as why:
            if why.errno not in (errno.ENXIO, errno.ENOENT):  # it was given up meanwhile
                raise
    return found


def below(name: str) -> list[str]:
    """A device and, on any layer, what it is built on: slaves, the drive of a partition, and what
    holds a loop device's file."""
    found, todo = [], [name]
    while todo:
        one = todo.pop(0)
        if one in found:
            continue
        found.append(one)
        todo += entries(block(one, "slaves"))
        if is_partition(one):
            todo.append(parent(one))
        backing = text(block(one, "loop/backing_file"))
        if backing and (at := _device_of_file(backing)):
            todo.append(at)
    return found


def _device_of_file(path: str) -> str | None:
    try:
        found = os.stat(host(path))
    except OSError:
        return None  # deleted, or of another mount namespace: O_EXCL still says that it is used
    dev = found.st_rdev if stat.S_ISBLK(found.st_mode) else found.st_dev
    return by_number(f"{os.major(dev)}:{os.minor(dev)}")


def by_number(dev: str) -> str | None:
    link = host("sys/dev/block", dev)
    return Path(os.path.realpath(link)).name if link.exists() else None


def by_path(path: str) -> str | None:
    """The kernel's name of a device node, by its number; None when there is no such node."""
    try:
        found = os.stat(host(path))
    except OSError:
        return None
    if not stat.S_ISBLK(found.st_mode):
        return None
    return by_number(f"{os.major(found.st_rdev)}:{os.minor(found.st_rdev)}")


def unescape(word: str) -> str:
    """Octal escapes, as in mountinfo, swaps and fstab(5)."""
    return re.sub(r"\\([0-7]{3})", lambda m: chr(int(m.group(1), 8)), word)


def mounts() -> list[Mount]:
    rows = []
    for line in host("proc/self/mountinfo").read_text(errors="replace").splitlines():
        left, _, right = line.partition(" - ")
        one, two = left.split(" "), right.split(" ")
        rows.append(Mount(one[2], unescape(one[4]), two[0], unescape(two[1]), unescape(one[3])))
    if not rows:
        raise OSError("/proc/self/mountinfo is empty")
    return rows


def devices_of(mount: Mount) -> list[str]:
    """Kernel names that a mount lies on; btrfs and others hide them behind an anonymous number."""
    if not mount.dev.startswith("0:"):
        name = by_number(mount.dev)
        return [name] if name else []
    name = by_path(mount.source) if mount.source.startswith("/") else None
    if name is None:
        return []
    for pool in entries(host("sys/fs/btrfs")):
        members = entries(host("sys/fs/btrfs", pool, "devices"))
        if name in members:
            return members
    return [name]


def swaps() -> list[str]:
    """Kernel names of swap devices. A swap file is found by the mount that it lies on."""
    lines = (text(host("proc/swaps")) or "").splitlines()[1:]
    names = [by_path(unescape(line.split()[0])) for line in lines if line.split()]
    return [name for name in names if name]


def fstab() -> list[tuple[str, str]]:
    """(what, where) of each line of /etc/fstab, without kvhost's own (option x-kvhost)."""
    rows = []
    for line in (text(host("etc/fstab")) or "").splitlines():
        words = line.split()
        if len(words) < 2 or words[0].startswith("#"):
            continue
        if len(words) < 4 or "x-kvhost" not in words[3].split(","):
            rows.append((unescape(words[0]), unescape(words[1])))
    return rows


def open_by_processes() -> tuple[dict[str, list[str]], int]:
    """ "major:minor" of block devices -> "command (pid)" of processes that have them open, and how
    many processes do not let themselves be looked at.

    Raises TimeoutError after 5 s: then it is not known.
    """
    closed = 0
    found: dict[str, list[str]] = {}
    end = time.monotonic() + FD_LOOK_S
    mine = str(os.getpid())
    for pid in (one for one in entries(host("proc")) if one.isdigit() and one != mine):
        if time.monotonic() > end:
            raise TimeoutError(f"open files of all processes: not looked through in {FD_LOOK_S} s")
        try:
            for fd in os.listdir(host("proc", pid, "fd")):
                at = os.stat(host("proc", pid, "fd", fd))
                if stat.S_ISBLK(at.st_mode):
                    who = f"{text(host('proc', pid, 'comm'))} ({pid})"
                    dev = f"{os.major(at.st_rdev)}:{os.minor(at.st_rdev)}"
                    if who not in found.setdefault(dev, []):
                        found[dev].append(who)
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended meanwhile
        except PermissionError:  # of another user namespace, or guarded by the kernel
            closed += 1
    return found, closed


def controllers(name: str) -> list[Path]:
    """The NVMe controllers of a namespace: one, or those of its subsystem (native multipath)."""
    device = Path(os.path.realpath(block(name, "device")))
    if (device / "transport").exists():
        return [device]
    return [device / one for one in entries(device) if (device / one / "transport").exists()]


def transport(name: str) -> str:
    """nvme, sata, sas, scsi, usb, virtio, mmc, loop; or what is no drive of this host alone:
    nvme-tcp, nvme-rdma, nvme-fc, iscsi, fc; or the kernel's name without digits."""
    if name.startswith("nvme"):
        kinds = {text(one / "transport") or "unknown" for one in controllers(name)} or {"unknown"}
        return "nvme" if kinds == {"pcie"} else f"nvme-{'+'.join(sorted(kinds - {'pcie'}))}"
    simple = {"loop": "loop", "mmcblk": "mmc", "vd": "virtio", "xvd": "xen"}
    stem = re.sub(r"\d.*", "", name)
    way = os.path.realpath(block(name))
    if not stem.startswith("sd"):
        return next((kind for key, kind in simple.items() if stem.startswith(key)), stem)
    marks = (("/usb", "usb"), ("/session", "iscsi"), ("/rport-", "fc"), ("/fc_host", "fc"),
             ("/ata", "sata"), ("/end_device-", "sas"), ("/expander-", "sas"))  # fmt: skip
    return next((kind for mark, kind in marks if mark in way), "scsi")


def identity(name: str) -> Data:
    """model, serial, wwn, by_id, by_ids, backing (of a loop device). None is: it has none."""
    device = block(name, "device")
    found: Data = {"model": text(device / "model"), "serial": None, "wwn": None, "backing": None}
    if name.startswith("loop"):
        backing = _loop(name)
        found.update(model="loop device", backing=backing)
        if backing:  # the file is what is claimed; its inode tells it from another of that name
            found.update(serial=backing["path"], wwn=f"loop.{backing['dev']}-{backing['inode']}")
    elif name.startswith("nvme"):
        first = next(iter(controllers(name)), device)
        found.update(model=text(first / "model"), serial=text(first / "serial"))
    else:
        page = device / "vpd_pg80"  # SPC-4 7.8.15: unit serial number, after four bytes
        raw = page.read_bytes()[4:].decode("ascii", "replace") if page.exists() else None
        found["serial"] = raw or text(block(name, "serial")) or text(device / "serial")
    if found["wwn"] is None:
        found["wwn"] = text(block(name, "wwid")) or text(device / "wwid")
    for key in ("model", "serial", "wwn"):
        value = re.sub(r"[\x00\s]+", " ", found[key] or "").strip()
        found[key] = value if re.search(r"[^0\W_]", value) else None  # zeros are no identity
    ids = _by_ids(name)
    return {**found, "by_id": ids[0] if ids else None, "by_ids": ids}


def _loop(name: str) -> Data | None:
    """Path, device and inode of the file behind a loop device; None when it is not set up."""
    path = text(block(name, "loop/backing_file"))
    if not path:
        return None
    device, inode = struct.unpack_from("<QQ", _loop_info(name))
    return {"path": path, "dev": device, "inode": inode}


def _loop_info(name: str) -> bytes:
    """struct loop_info64 of linux/loop.h."""
    fd = os.open(host("dev", name), os.O_RDONLY | os.O_CLOEXEC)
    try:
        info = bytearray(232)
        fcntl.ioctl(fd, 0x4C05, info)  # LOOP_GET_STATUS64
        return bytes(info)
    finally:
        os.close(fd)


def _by_ids(name: str) -> list[str]:
    """Links in /dev/disk/by-id to this device; those that people can read come first."""
    top = host("dev/disk/by-id")
    wanted = text(block(name, "dev"))
    found = []
    for link in entries(top):
        try:
            at = os.stat(top / link)
        except OSError:
            continue  # a link to nothing
        if stat.S_ISBLK(at.st_mode) and f"{os.major(at.st_rdev)}:{os.minor(at.st_rdev)}" == wanted:
            found.append(link)
    bare = ("wwn-", "nvme-eui.", "nvme-uuid.", "nvme-nvme.", "scsi-3", "scsi-S", "dm-", "lvm-")
    found.sort(key=lambda link: (link.startswith(bare), len(link), link))
    return [f"/dev/disk/by-id/{link}" for link in found]


def pcie(name: str) -> Data | None:
    """The link of an NVMe drive: speeds in GT/s, widths in lanes; None when it is on no PCIe."""
    for at in (controllers(name) or [block(name)])[:1]:
        way = Path(os.path.realpath(at))
        for up in (way, *way.parents):
            if (up / "current_link_speed").exists():
                now, most = (text(up / f"{word}_link_speed") or "" for word in ("current", "max"))
                return {
                    "address": up.name,
                    "speed_gts": _gts(now),
                    "max_speed_gts": _gts(most),
                    "width": number(up / "current_link_width"),
                    "max_width": number(up / "max_link_width"),
                }
    return None


def _gts(words: str) -> float | None:
    found = re.match(r"[\d.]+", words)
    return float(found.group()) if found else None


def _admin(fd: int, opcode: int, nsid: int, cdw10: int, count: int) -> bytes:
    """One NVMe admin command that reads `count` bytes (linux/nvme_ioctl.h, nvme_admin_cmd)."""
    buffer = ctypes.create_string_buffer(count)
    words = (opcode, 0, 0, nsid, 0, 0, 0, ctypes.addressof(buffer), 0, count, cdw10, *[0] * 7)
    command = bytearray(struct.pack("<BBHIIIQQII8I", *words))
    status = fcntl.ioctl(fd, 0xC0484E41, command)  # NVME_IOCTL_ADMIN_CMD
    if status:
        raise OSError(f"the drive answers NVMe status {status:#x}")
    return buffer.raw


def smart(fd: int) -> Data:
    """The SMART / health log (NVMe base specification, log page 02h), as nvme smart-log reads it.

    Asked for directly, so that a plan needs no package. Raises OSError.
    """
    return parse_smart(smart_log(fd))


def smart_log(fd: int) -> bytes:
    return _admin(fd, 0x02, 0xFFFFFFFF, 127 << 16 | 0x02, 512)


def parse_smart(log: bytes) -> Data:
    def wide(at: int) -> int:
        return int.from_bytes(log[at : at + 16], "little")

    return {
        "critical_warning": log[0],
        "temperature_c": struct.unpack_from("<H", log, 1)[0] - 273,
        "available_spare_percent": log[3],
        "spare_threshold_percent": log[4],
        "percentage_used": log[5],
        "bytes_written": wide(48) * 512_000,
        "power_on_hours": wide(128),
        "unsafe_shutdowns": wide(144),
        "media_errors": wide(160),
    }


def shareable(fd: int, nsid: int) -> bool:
    """Whether several controllers can use a namespace at once (Identify Namespace, NMIC bit 0)."""
    return bool(_admin(fd, 0x06, nsid, 0, 4096)[30] & 1)


def namespace_id(name: str) -> int:
    return number(block(name, "nsid"), 1)


def machine_id() -> str | None:
    """machine-id(5); None where there is none (some containers)."""
    for path in ("etc/machine-id", "var/lib/dbus/machine-id"):
        got = text(host(path))
        if got and re.fullmatch(r"[0-9a-f]{32}", got):
            return got
    return None
