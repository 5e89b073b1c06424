"""States of a drive that hold something, or may not be touched, made on real block devices.

Each is made by the real tool where Debian has it, otherwise by the format's specification, see
drive_formats.py. None of them may ever be written to.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.drive_formats import FORMATS, MIB, Format, mbr
from tests.lab.loop import Loop, Loops
from tests.lab.recipe import LabError, run

PACKAGES = (
    "e2fsprogs", "xfsprogs", "btrfs-progs", "f2fs-tools", "dosfstools", "exfatprogs", "ntfs-3g",
    "udftools", "genisoimage", "xorriso", "squashfs-tools", "erofs-utils", "cramfsswap",
    "util-linux-extra", "nilfs-tools", "reiserfsprogs", "jfsutils", "gfs2-utils", "ocfs2-tools",
    "hfsutils", "apfsprogs", "cryptsetup-bin", "lvm2", "bcache-tools", "drbd-utils", "gdisk",
    "fdisk",
)  # fmt: skip

Use = Callable[[Loop, Path], AbstractContextManager[None]]


@dataclass(frozen=True)
class State:
    """``make`` writes the state through the attached device; ``use`` keeps it in use meanwhile.

    ``finding``: kind that the report must name, one of those of onhost/drive_probe.py; "data" where
    no header tells and only reading every byte does. ``source``: what the state was made by.
    ``in_plan``: the report is enough to refuse it; the others only the step that writes refuses.
    ``compare``: bytes from the start that must stay; None for all of them.
    """

    name: str
    holds: str
    finding: str
    source: str
    make: Callable[[Loop, Path], None]
    mib: int = 64
    sector_size: int = 512
    read_only: bool = False
    partitions: bool = False
    use: Use | None = None
    compare: int | None = None
    only_apply: bool = False

    @property
    def in_plan(self) -> bool:
        return self.finding != "data" and not self.only_apply


def write(loop: Loop, offset: int, content: bytes) -> None:
    """Bytes to a place of the device; a negative offset counts from its end."""
    with loop.node.open("r+b") as handle:
        handle.seek(offset, os.SEEK_SET if offset >= 0 else os.SEEK_END)
        handle.write(content)


def tool(*argv: str, stdin: str | None = None) -> Callable[[Loop, Path], None]:
    """A tool called with the device; DEV, SCRATCH, TREE and PASSWORD stand for paths."""

    def make(loop: Loop, scratch: Path) -> None:
        if "TREE" in argv and not (scratch / "tree").exists():
            (scratch / "tree").mkdir()
            (scratch / "tree/letter.txt").write_text("a file of somebody\n" * 50)
        (scratch / "password").write_text("correct horse")
        names = {"DEV": loop.node, "TREE": scratch / "tree", "SCRATCH": scratch / "image",
                 "PASSWORD": scratch / "password"}  # fmt: skip
        done = subprocess.run(
            [str(names.get(part, part)) for part in argv], input=stdin or "", text=True,
            capture_output=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise LabError(f"{argv}: {done.stdout[-500:]}{done.stderr[-500:]}")

    return make


def steps(*makers: Callable[[Loop, Path], None]) -> Callable[[Loop, Path], None]:
    def make(loop: Loop, scratch: Path) -> None:
        for one in makers:
            one(loop, scratch)

    return make


def put(offset: int, content: bytes) -> Callable[[Loop, Path], None]:
    return lambda loop, scratch: write(loop, offset, content)


def copied(loop: Loop, scratch: Path) -> None:
    """The image that a tool wrote to a file, at the start of the device."""
    write(loop, 0, (scratch / "image").read_bytes())
    (scratch / "image").unlink()


def nothing(loop: Loop, scratch: Path) -> None:
    pass


def noise(start: int, end: int) -> Callable[[Loop, Path], None]:
    """Pseudo-random bytes: what an encrypted volume without a header looks like."""
    return lambda loop, scratch: write(loop, start, random.Random(7).randbytes(end - start))


def on_partition(*argv: str) -> Callable[[Loop, Path], None]:
    def make(loop: Loop, scratch: Path) -> None:
        first = loop.scan_partitions()[0]
        run(*(str(first) if part == "DEV" else part for part in argv))
        run("sync", first)

    return make


@contextmanager
def mounted(device: Path, scratch: Path, options: str = "ro") -> Iterator[None]:
    point = scratch / f"mnt {device.name}"  # a blank in it: it is escaped in mountinfo
    point.mkdir()
    run("mount", "-o", options, device, point)
    try:
        yield
    finally:
        run("umount", point)
        point.rmdir()


def mount_whole(options: str = "ro") -> Use:
    return lambda loop, scratch: mounted(loop.node, scratch, options)


def mount_partition(loop: Loop, scratch: Path) -> AbstractContextManager[None]:
    return mounted(loop.scan_partitions()[0], scratch)


@contextmanager
def process(*argv: str, ready: Callable[[], bool]) -> Iterator[None]:
    """A process of its own beside the test, from when it is ready until the end."""
    child = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 20
        while not ready():
            if child.poll() is not None or time.monotonic() > deadline:
                raise LabError(f"{argv[0]} did not get ready")
            time.sleep(0.02)
        yield
    finally:
        child.communicate()


def opened(flags: str) -> Use:
    """Open in another process that does nothing with it."""

    def use(loop: Loop, scratch: Path) -> AbstractContextManager[None]:
        mark = scratch / f"opened-{loop.node.name}"
        code = f"import os,pathlib; os.open({str(loop.node)!r}, {flags}); "
        code += f"pathlib.Path({str(mark)!r}).touch(); sys.stdin.read()"
        return process(sys.executable, "-c", f"import sys; {code}", ready=mark.exists)

    return use


def mounted_elsewhere(loop: Loop, scratch: Path) -> AbstractContextManager[None]:
    """Mounted in a mount namespace that no process but one lives in."""
    point, mark = scratch / "elsewhere", scratch / "elsewhere.ready"
    point.mkdir(exist_ok=True)
    line = f"mount -o ro {loop.node} '{point}' && touch '{mark}' && read -r _; umount '{point}'"
    return process("unshare", "-m", "sh", "-c", line, ready=mark.exists)


@contextmanager
def swapped_on(loop: Loop, scratch: Path) -> Iterator[None]:
    run("swapon", loop.node)
    try:
        yield
    finally:
        run("swapoff", loop.node)


@contextmanager
def loop_on_top(loop: Loop, scratch: Path) -> Iterator[None]:
    """Another loop device has this one as its file."""
    upper = Path(run("losetup", "--find", "--show", "--read-only", loop.node).strip())
    try:
        yield
    finally:
        run("losetup", "--detach", upper)


def from_format(one: Format) -> State:
    def make(loop: Loop, scratch: Path) -> None:
        for offset, content in one.pieces(one.mib * MIB):
            write(loop, offset, content)

    return State(one.name, one.holds, one.finding, one.source, make, one.mib)


def _mkfs(name: str, holds: str, *argv: str, mib: int = 64, sector_size: int = 512) -> State:
    return State(name, holds, "signature", argv[0], tool(*argv), mib, sector_size)


def _packed(name: str, holds: str, *argv: str) -> State:
    make = steps(tool(*argv), copied)
    return State(name, holds, "signature", argv[0], make)


EXT4 = tool("mkfs.ext4", "-q", "-F", "DEV")
XFS = tool("mkfs.xfs", "-q", "-f", "DEV")
GPT_ONE = tool("sfdisk", "-q", "DEV", stdin="label: gpt\n,,\n")
LUKS2 = tool("cryptsetup", "luksFormat", "-q", "--type", "luks2", "--pbkdf", "pbkdf2",
             "--pbkdf-force-iterations", "1000", "DEV", "PASSWORD")  # fmt: skip
PVCREATE = tool("pvcreate", "-q", "--devices", "DEV", "DEV")

FILESYSTEMS = (
    _mkfs("ext2", "ext2", "mkfs.ext2", "-q", "-F", "DEV"),
    _mkfs("ext3", "ext3", "mkfs.ext3", "-q", "-F", "DEV"),
    _mkfs("ext4", "ext4", "mkfs.ext4", "-q", "-F", "DEV"),
    _mkfs("ext4-4k", "ext4, sectors of 4096 bytes", "mkfs.ext4", "-q", "-F", "DEV",
          sector_size=4096),
    _mkfs("ext-journal", "an external journal of ext4", "mke2fs", "-q", "-F", "-O", "journal_dev",
          "DEV"),
    _mkfs("xfs", "XFS", "mkfs.xfs", "-q", "-f", "DEV", mib=320),
    _mkfs("xfs-4k", "XFS, sectors of 4096 bytes", "mkfs.xfs", "-q", "-f", "DEV", mib=320,
          sector_size=4096),
    _mkfs("btrfs", "btrfs", "mkfs.btrfs", "-q", "DEV", mib=128),
    _mkfs("f2fs", "F2FS", "mkfs.f2fs", "-q", "DEV"),
    _mkfs("fat16", "FAT16", "mkfs.vfat", "-F", "16", "DEV"),
    _mkfs("fat32", "FAT32", "mkfs.vfat", "-F", "32", "DEV"),
    _mkfs("exfat", "exFAT", "mkfs.exfat", "DEV"),
    _mkfs("ntfs", "NTFS", "mkfs.ntfs", "-Q", "-q", "DEV"),
    _mkfs("udf", "UDF", "mkudffs", "--utf8", "DEV"),
    _mkfs("minix", "Minix", "mkfs.minix", "DEV"),
    _mkfs("bfs", "SCO BFS", "mkfs.bfs", "DEV"),
    _mkfs("nilfs2", "NILFS2", "mkfs.nilfs2", "-q", "DEV", mib=160),
    _mkfs("reiserfs", "ReiserFS", "mkfs.reiserfs", "-q", "-f", "DEV"),
    _mkfs("jfs", "JFS", "mkfs.jfs", "-q", "DEV"),
    _mkfs("gfs2", "GFS2", "mkfs.gfs2", "-O", "-p", "lock_nolock", "-j", "1", "-J", "8", "DEV"),
    _mkfs("ocfs2", "OCFS2", "mkfs.ocfs2", "-q", "-F", "-M", "local", "-N", "1", "DEV", mib=256),
    _mkfs("hfs", "HFS", "hformat", "DEV"),
    _mkfs("apfs", "APFS", "mkapfs", "DEV", mib=512),
    _packed("iso9660", "ISO 9660", "genisoimage", "-quiet", "-o", "SCRATCH", "TREE"),
    _packed("squashfs", "SquashFS", "mksquashfs", "TREE", "SCRATCH", "-quiet", "-noappend"),
    _packed("erofs", "EROFS", "mkfs.erofs", "SCRATCH", "TREE"),
    _packed("cramfs", "cramfs", "mkfs.cramfs", "TREE", "SCRATCH"),
)  # fmt: skip

LAYERS = (
    _mkfs("swap", "swap space", "mkswap", "DEV"),
    State("luks1", "LUKS1", "signature", "cryptsetup", tool(
        "cryptsetup", "luksFormat", "-q", "--type", "luks1", "--pbkdf-force-iterations", "1000",
        "DEV", "PASSWORD")),
    State("luks2", "LUKS2", "signature", "cryptsetup", LUKS2),
    State("luks2-second", "LUKS2, its first header overwritten", "signature", "cryptsetup",
          steps(LUKS2, put(0, bytes(16384)))),
    State("lvm-pv", "an LVM physical volume in no group", "signature", "pvcreate", PVCREATE),
    State("lvm-vg", "an LVM physical volume of a group", "signature", "vgcreate", steps(
        PVCREATE, tool("vgcreate", "-q", "--devices", "DEV", "kvhost-test", "DEV"))),
    _mkfs("bcache-backing", "a backing device of bcache", "make-bcache", "-B", "DEV"),
    _mkfs("bcache-cache", "a cache device of bcache", "make-bcache", "-C", "DEV"),
    State("drbd8", "DRBD 8.4, metadata at the end", "signature", "drbdmeta",
          tool("drbdmeta", "--force", "0", "v08", "DEV", "internal", "create-md")),
    State("drbd9", "DRBD 9, metadata at the end", "signature", "drbdmeta",
          tool("drbdmeta", "--force", "0", "v09", "DEV", "internal", "create-md", "1")),
    State("verity", "hashes of dm-verity", "signature", "veritysetup", steps(
        tool("truncate", "-s", "1M", "SCRATCH"),
        tool("veritysetup", "format", "SCRATCH", "DEV"))),
)  # fmt: skip

TABLES = (
    State("gpt-empty", "a GPT without partitions", "partition_table", "sfdisk",
          tool("sfdisk", "-q", "DEV", stdin="label: gpt\n")),
    State("gpt-unused", "a GPT, its partition without a filesystem", "partition_table", "sfdisk",
          GPT_ONE),
    State("gpt-4k", "a GPT in sectors of 4096 bytes", "partition_table", "sfdisk", GPT_ONE,
          sector_size=4096),
    State("gpt-backup", "a GPT, its first copy overwritten", "signature", "sfdisk",
          steps(GPT_ONE, put(0, bytes(34 * 512)))),
    State("gpt-first", "a GPT, its backup overwritten", "partition_table", "sfdisk",
          steps(GPT_ONE, put(-33 * 512, bytes(33 * 512)))),
    State("gpt-mbr-only", "only the protective MBR of a GPT", "partition_table", "sfdisk",
          steps(GPT_ONE, put(512, bytes(33 * 512)), put(-33 * 512, bytes(33 * 512)))),
    State("gpt-partition", "a GPT with ext4 in its partition", "partition_table", "sfdisk",
          steps(GPT_ONE, on_partition("mkfs.ext4", "-q", "DEV")), partitions=True),
    State("gpt-lvm", "a GPT with an LVM volume in its partition", "partition_table", "sfdisk",
          steps(GPT_ONE, on_partition("pvcreate", "-q", "--devices", "DEV", "DEV")),
          partitions=True),
    State("mbr", "an MBR with one partition", "partition_table", "sfdisk",
          tool("sfdisk", "-q", "DEV", stdin="label: dos\n,10M\n")),
    State("mbr-logical", "an MBR with a logical partition", "partition_table", "sfdisk",
          tool("sfdisk", "-q", "DEV", stdin="label: dos\n,20M,E\n,5M,L\n")),
    State("mbr-boot", "an MBR with boot code", "partition_table", "the PC's boot record",
          put(0, mbr(0x83, b"\xeb\x63\x90GRUB "))),
    State("sun", "a label of Sun", "partition_table", "sfdisk",
          tool("sfdisk", "-q", "DEV", stdin="label: sun\n")),
    State("sgi", "a label of SGI", "partition_table", "sfdisk",
          tool("sfdisk", "-q", "DEV", stdin="label: sgi\n")),
    State("iso-hybrid", "a bootable image: ISO 9660 and an MBR", "signature", "xorriso", steps(
        tool("xorriso", "-as", "mkisofs", "-quiet", "-partition_offset", "16", "-o", "SCRATCH",
             "TREE"), copied)),
)  # fmt: skip

REMAINS = (
    State("ext4-and-swap", "ext4, with the mark of a swap space in it", "signature", "mkfs.ext4",
          steps(EXT4, put(4086, b"SWAPSPACE2"))),
    State("ext4-wiped", "ext4 after wipefs: all data, no signature", "leftover", "wipefs",
          steps(EXT4, tool("wipefs", "-q", "-a", "DEV")), mib=160),
    State("xfs-wiped", "XFS after wipefs: all data, no signature", "data", "wipefs",
          steps(XFS, tool("wipefs", "-q", "-a", "DEV")), mib=320),
    State("ext4-start-lost", "ext4, its first MiB overwritten", "leftover", "mkfs.ext4",
          steps(EXT4, put(0, bytes(MIB)))),
    State("kvhost-label", "the label of kvhost, and no marker", "signature", "mkfs.xfs",
          tool("mkfs.xfs", "-q", "-L", "kvhost", "DEV"), mib=320),
    State("kvhost-names", "partition and label called kvhost, and no marker", "partition_table",
          "mkfs.ext4", steps(tool("sfdisk", "-q", "DEV", stdin='label: gpt\nname="kvhost"\n'),
                             on_partition("mkfs.ext4", "-q", "-L", "kvhost", "DEV")),
          partitions=True, only_apply=True),
    State("noise", "noise from end to end", "data", "random bytes", noise(0, 64 * MIB)),
    State("noise-start", "noise in the first MiB", "data", "random bytes", noise(0, MIB)),
    State("noise-late", "zeros, then noise from 48 MiB on", "data", "random bytes",
          noise(48 * MIB, 52 * MIB)),
    State("one-byte-first", "one byte, the first", "data", "one byte", put(0, b"\1")),
    State("one-byte-middle", "one byte, in the middle", "data", "one byte",
          put(32 * MIB + 12345, b"\1")),
    State("one-byte-last", "one byte, the last", "data", "one byte", put(-1, b"\1")),
    State("one-byte-4k", "one byte, sectors of 4096 bytes", "data", "one byte",
          put(40 * MIB + 1, b"\x80"), sector_size=4096),
    State("ones", "all bits set in one sector", "data", "512 bytes", put(21 * MIB, b"\xff" * 512)),
)  # fmt: skip

IN_USE = (
    State("mounted-ext4", "ext4, mounted", "mounted", "mount", EXT4, use=mount_whole()),
    State("mounted-xfs", "XFS, mounted", "mounted", "mount", XFS, 320,
          use=mount_whole("ro,norecovery")),
    State("mounted-btrfs", "btrfs, mounted", "mounted", "mount",
          tool("mkfs.btrfs", "-q", "DEV"), 128, use=mount_whole()),
    State("mounted-partition", "a partition, mounted", "mounted", "mount",
          steps(GPT_ONE, on_partition("mkfs.ext4", "-q", "DEV")), partitions=True,
          use=mount_partition),
    State("mounted-elsewhere", "mounted in another mount namespace", "busy", "unshare", EXT4,
          use=mounted_elsewhere),
    State("swap-on", "swap space in use", "swap", "swapon", tool("mkswap", "DEV"), use=swapped_on,
          compare=4096),  # the kernel itself writes to the rest, whenever it likes
    State("open-to-write", "blank, open for writing in a process", "in_use", "open(2)", nothing,
          use=opened("os.O_RDWR")),
    State("open-to-read", "blank, open for reading in a process", "in_use", "open(2)", nothing,
          use=opened("os.O_RDONLY")),
    State("open-exclusive", "blank, held exclusively by a process", "in_use", "open(2)", nothing,
          use=opened("os.O_RDWR | os.O_EXCL")),
    State("loop-on-top", "blank, the file of another loop device", "holder", "losetup", nothing,
          use=loop_on_top),
    State("read-only", "blank, read-only", "read_only", "losetup --read-only", nothing,
          read_only=True),
    State("read-only-ext4", "ext4, read-only", "read_only", "losetup --read-only", EXT4,
          read_only=True),
)  # fmt: skip

STATES = (*FILESYSTEMS, *LAYERS, *TABLES, *map(from_format, FORMATS), *REMAINS, *IN_USE)
#: those of the core tier: what is met most, and whatever is found in another way than the others
CORE = (
    {state.name for state in (*LAYERS, *TABLES, *REMAINS, *IN_USE)}
    | {"ext4", "xfs", "btrfs", "f2fs", "fat32", "exfat", "ntfs", "udf", "iso9660", "squashfs"}
    | {"apfs", "zfs", "md-0.90", "md-1.2", "hfsplus", "vmfs", "bcachefs", "refs", "bluestore"}
    | {"bitlocker", "boot-code", "corestorage"}
) - {
    # the like of which is there
    *("lvm-vg", "bcache-cache", "drbd8", "verity", "mbr-logical", "mbr-boot", "sgi"),
    *("iso-hybrid", "noise-start", "ones"),
}


@contextmanager
def ready(loops: Loops, state: State, scratch: Path) -> Iterator[Loop]:
    """The drive in its state. The device is a fresh one: nothing is left of having made it."""
    own = scratch / state.name
    own.mkdir(parents=True)
    making = loops.make(state.name, state.mib * MIB, sector_size=state.sector_size,
                        partitions=state.partitions)  # fmt: skip
    state.make(making, own)
    run("sync", making.node)
    loops.detach(making)
    loop = loops.attach(making.image, sector_size=state.sector_size, read_only=state.read_only,
                        partitions=state.partitions)  # fmt: skip
    try:
        if state.partitions:
            loop.scan_partitions()
        if state.use is None:
            yield loop
        else:
            with state.use(loop, own):
                yield loop
    finally:
        loops.detach(loop)
        shutil.rmtree(own)
