"""Superblocks written to their formats' specifications, where Debian 12 has no tool for them.

Each is a fixture: as much of the format as tells what it is, at the places that the specification
names, and nothing that could be mounted. "at" is a byte offset; a negative one counts from the end.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass

KIB, MIB = 1 << 10, 1 << 20
Pieces = list[tuple[int, bytes]]


@dataclass(frozen=True)
class Format:
    """``pieces`` takes the size of the device in bytes and returns what to write, and where.

    ``finding``: what a report must name it; "data" where only reading every byte tells.
    """

    name: str
    holds: str
    source: str
    pieces: Callable[[int], Pieces]
    finding: str = "signature"
    mib: int = 64


def at(offset: int, content: bytes) -> Callable[[int], Pieces]:
    return lambda size: [(offset if offset >= 0 else size + offset, content)]


def zfs_labels(size: int, wanted: tuple[int, ...]) -> Pieces:
    """Four labels of 256 KiB, two at each end; in each a ring of uberblocks from 128 KiB on."""
    label = 256 * KIB
    end = size // label * label
    starts = (0, label, end - 2 * label, end - label)
    # ub_magic, ub_version, ub_txg, ub_guid_sum, ub_timestamp
    ring = [
        (128 * KIB + n * KIB, struct.pack("<5Q", 0x00BAB10C, 5000, 100 + n, 7, 9))
        for n in range(16)
    ]
    return [(starts[which] + place, block) for which in wanted for place, block in ring]


def md_super_090(size: int) -> Pieces:
    """The last whole 64 KiB but one; md_p.h: mdp_superblock_t."""
    place = (size // (64 * KIB) - 1) * 64 * KIB
    words = [
        0xA92B4EFC,
        0,
        90,
        0,
        0,
        0x11111111,
        0,
        1,
        size // KIB - 64,
        2,
        2,
        0,
        0,
        0x22,
        0x33,
        0x44,
    ]
    return [(place, struct.pack("<16I", *words))]


def md_super_1(size: int, minor: int) -> Pieces:
    """md_p.h: mdp_superblock_1; 1.0 at the end, 1.1 at the start, 1.2 at 4 KiB."""
    sectors = size // 512
    sector = {0: ((sectors - 16) // 8) * 8, 1: 0, 2: 8}[minor]
    block = bytearray(256)
    struct.pack_into("<4I", block, 0, 0xA92B4EFC, 1, 0, 0)
    block[16:32] = bytes(range(16))  # set_uuid
    block[32:48] = b"lab:0".ljust(16, b"\0")
    struct.pack_into(
        "<QIIQII", block, 64, 0, 1, 0, sectors - 64, 0, 2
    )  # ctime, level, …, raid_disks
    struct.pack_into("<4Q", block, 128, 2048 if minor else 0, sectors - 2048, sector, 0)
    return [(sector * 512, bytes(block))]


def hfs_plus(signature: bytes, version: int) -> bytes:
    header = bytearray(512)
    struct.pack_into(">2sH", header, 0, signature, version)
    struct.pack_into(">3I", header, 40, 4096, 16384, 16000)  # blockSize, totalBlocks, freeBlocks
    return bytes(header)


def apple_map(_size: int) -> Pieces:
    """Driver descriptor in block 0, one entry of the map in block 1 (Inside Macintosh)."""
    entry = struct.pack(">2sHIII32s32s", b"PM", 0, 1, 1, 63, b"Apple", b"Apple_partition_map")
    return [(0, struct.pack(">2sHI", b"ER", 512, 131072)), (512, entry)]


def mbr(kind: int, boot: bytes = b"") -> bytes:
    """A boot record with one partition of the given type, from sector 2048 on."""
    entry = struct.pack("<B3sB3sII", 0x80, b"\0\2\0", kind, b"\xfe\xff\xff", 2048, 65536)
    return boot.ljust(446, b"\0") + entry + bytes(48) + b"\x55\xaa"


def ldm(_size: int) -> Pieces:
    """A dynamic disk of Windows: a boot record of type 0x42 and PRIVHEAD in sector 6."""
    return [(0, mbr(0x42)), (6 * 512, b"PRIVHEAD".ljust(512, b"\0"))]


def bitlocker(_size: int) -> Pieces:
    """The boot sector of Windows 7 and later, with the identifier of BitLocker at 160."""
    sector = bytearray(512)
    sector[0:11] = b"\xeb\x58\x90-FVE-FS-"
    struct.pack_into("<HB", sector, 11, 512, 8)
    sector[160:176] = bytes.fromhex("3bd66749292ed84a8399f6a339e3d001")
    struct.pack_into("<3Q", sector, 176, MIB, 2 * MIB, 3 * MIB)
    sector[510:512] = b"\x55\xaa"
    block = b"-FVE-FS-" + struct.pack("<HH", 64, 2)
    return [(0, bytes(sector)), *((n * MIB, block) for n in (1, 2, 3))]


def ddf(size: int) -> Pieces:
    """SNIA DDF 2.0, 5.1: the anchor header is in the last block and names the primary one."""
    header = bytearray(b"\xff" * 512)
    struct.pack_into(">2I24s8s", header, 0, 0xDE11DE11, 0, b"Linux-MDlab".ljust(24), b"01.02.00")
    struct.pack_into(">2Q", header, 96, size // 512 - 64, size // 512 - 32)
    return [(size - 512, bytes(header)), (size - 64 * 512, bytes(header))]


def jffs2(_size: int) -> Pieces:
    """A clean marker: magic, node type, length, and the CRC over them (not inverted)."""
    node = struct.pack("<HHI", 0x1985, 0x2003, 12)
    return [(0, node + struct.pack("<I", ~zlib.crc32(node, 0xFFFFFFFF) & 0xFFFFFFFF))]


def be_file_system(_size: int) -> Pieces:
    block = bytearray(512)
    block[:4] = b"lab\0"
    struct.pack_into("<4s2I2I", block, 32, b"1SFB", 0x42494745, 2048, 11, 0)
    struct.pack_into("<I", block, 68, 0xDD121031)
    struct.pack_into("<I", block, 112, 0x15B6830E)
    return [(512, bytes(block))]


def tar_header(_size: int) -> Pieces:
    head = bytearray(512)
    head[:9] = b"backup.db"
    head[257:265] = b"ustar  \0"
    return [(0, bytes(head)), (512, b"rows of a database\n" * 20)]


LINUX_MD = "Linux include/uapi/linux/raid/md_p.h"
FORMATS = (
    Format("zfs", "a ZFS pool, all four labels", "OpenZFS On-Disk Specification, 1.2-1.3",
           lambda size: zfs_labels(size, (0, 1, 2, 3))),
    Format("zfs-last", "a ZFS pool, the labels at the start wiped", "OpenZFS On-Disk Specification",
           lambda size: zfs_labels(size, (2, 3))),
    Format("md-0.90", "a member of an md array, superblock 0.90", LINUX_MD, md_super_090),
    Format("md-1.0", "a member of an md array, superblock 1.0", LINUX_MD,
           lambda size: md_super_1(size, 0)),
    Format("md-1.1", "a member of an md array, superblock 1.1", LINUX_MD,
           lambda size: md_super_1(size, 1)),
    Format("md-1.2", "a member of an md array, superblock 1.2", LINUX_MD,
           lambda size: md_super_1(size, 2)),
    Format("hfsplus", "HFS+", "Apple Technical Note TN1150", at(1024, hfs_plus(b"H+", 4))),
    Format("hfsx", "HFSX", "Apple Technical Note TN1150", at(1024, hfs_plus(b"HX", 5))),
    Format("vmfs", "VMFS", "vmfs-tools vmfs_fs.h", at(2 * MIB, struct.pack("<2I", 0x2FABF15E, 6))),
    Format("vmfs-volume", "a VMFS volume member", "vmfs-tools vmfs_volume.h",
           at(MIB, struct.pack("<2I", 0xC001D00D, 6))),
    Format("bcachefs", "bcachefs", "bcachefs_format.h: struct bch_sb", at(4096, bytes(16)
           + struct.pack("<HH4x", 26, 14) + bytes.fromhex("c68573f666ce90a9d96a60cf803df7ef")
           + bytes(range(32))), "leftover"),
    Format("refs", "ReFS", "the boot sector as libfsrefs documents it",
           at(0, b"\0\0\0ReFS\0\0\0\0\0\0\0\0\0FSRS\0\2")),
    Format("bluestore", "a Ceph OSD", "Ceph BlueStore: bdev label",
           at(0, b"bluestore block device\n6a1f7b1e-0001-4a3b-9c1d-0123456789ab\n")),
    Format("bitlocker", "BitLocker", "the volume header as libbde documents it", bitlocker),
    Format("isw-raid", "a member of an Intel RAID", "mdadm super-intel.c",
           at(-1024, b"Intel Raid ISM Cfg Sig. 1.3.00\0\0")),
    Format("ddf-raid", "a member of a DDF RAID", "SNIA Common RAID DDF 2.0", ddf),
    Format("lsi-raid", "a member of an LSI RAID", "dmraid lsi.h", at(-512, b"$XIDE$" + bytes(10))),
    Format("promise-raid", "a member of a Promise RAID", "dmraid pdc.h",
           at(-63 * 512, b"Promise Technology, Inc.")),
    Format("hpt-raid", "a member of a HighPoint RAID", "dmraid hpt37x.h",
           at(9 * 512 + 32, struct.pack("<I", 0x5A7816F0))),
    Format("vdo", "a VDO volume", "Linux drivers/md/dm-vdo: the geometry block",
           at(0, b"dmvdo001" + bytes(8) + bytes(range(16)))),
    Format("dm-integrity", "dm-integrity", "Linux drivers/md/dm-integrity.c",
           at(0, b"integrt\0" + struct.pack("<2BHIQII", 1, 15, 4, 0, 100000, 0, 0))),
    Format("dm-snapshot", "the store of a dm snapshot", "Linux drivers/md/dm-snap-persistent.c",
           at(0, struct.pack("<4s3I", b"SnAp", 1, 1, 16))),
    Format("oracle-asm", "a disk of Oracle ASM", "oracleasm: asmdisk.h",
           at(32, b"ORCLDISK" + b"DATA01".ljust(24, b"\0"))),
    Format("ufs2", "UFS2", "FreeBSD sys/ufs/ffs/fs.h",
           at(64 * KIB + 1372, struct.pack("<I", 0x19540119))),
    Format("sysv", "System V", "Linux fs/sysv", at(512 + 504, struct.pack("<2I", 0xFD187E20, 2))),
    Format("befs", "BeFS", "Practical File System Design with BeOS, 4", be_file_system, "data"),
    Format("romfs", "romfs", "Linux Documentation/filesystems/romfs",
           at(0, b"-rom1fs-" + struct.pack(">2I", 1024, 0) + b"lab\0")),
    Format("netware", "NetWare NSS", "util-linux's description of the format", at(4096, b"SPB5")),
    Format("lvm1", "LVM 1", "lvm2 lib/format1", at(0, b"HM\1\0" + bytes(28))),
    Format("hibernation", "a suspended system in the swap space", "Linux kernel/power/swap.c",
           at(4086, b"S1SUSPEND\0")),
    Format("ubi", "UBI", "Linux drivers/mtd/ubi/ubi-media.h", at(0, b"UBI#\1\0\0\0")),
    Format("jffs2", "JFFS2", "Linux include/uapi/linux/jffs2.h", jffs2, "data"),
    Format("apple-map", "an Apple partition map", "Inside Macintosh: Devices", apple_map),
    Format("dynamic-disk", "a dynamic disk of Windows", "Linux block/partitions/ldm.h", ldm),
    Format("boot-code", "boot code and no partition", "the PC's boot record",
           at(0, (b"\xeb\x63\x90" + b"GRUB ").ljust(510, b"\x90") + b"\x55\xaa"), "leftover"),
    Format("corestorage", "CoreStorage (FileVault 2)", "libfvde: the volume header",
           at(88, b"CS" + struct.pack("<I", 1)), "data"),
    Format("qcow2", "a disk image in QEMU's format", "QEMU docs/interop/qcow2.txt",
           at(0, b"QFI\xfb" + struct.pack(">IQIIQ", 3, 0, 0, 16, 1 << 30)), "data"),
    Format("gzip", "a compressed archive", "RFC 1952",
           at(0, b"\x1f\x8b\x08\0" + bytes(range(200))), "data"),
    Format("tar", "a tar archive", "POSIX ustar", tar_header, "data"),
    Format("text", "text from the first byte on", "plain bytes",
           at(0, b"do not erase: payroll\n"), "data"),
)  # fmt: skip
