"""Marks of formats that blkid and wipefs do not look for, or do not take for one: leftovers.

blkid and wipefs know the first copy of most formats and check it strictly; a drive whose start was
overwritten, or whose header is damaged, is blank to them while its data is still there. This
table holds the copies that lie elsewhere, and formats that util-linux 2.37 does not know. It only
makes the answer better: without a token, a drive is formatted only when every byte of it is zero.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from typing import NamedTuple

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


class Mark(NamedTuple):
    """`magic` at byte `offset` (from the end when negative) of a device; `source` of the fact."""

    name: str
    offset: int
    magic: bytes
    source: str


_MD = bytes.fromhex("fc4e2ba9")  # 0xa92b4efc, little-endian
_LUKS2_SECOND = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)  # KiB
_EXT = ((1, 8193), (2, 16384), (4, 32768))  # block size in KiB, first block of group 1

MARKS = (
    Mark("gpt (first header)", 512, b"EFI PART", "UEFI specification 5.3.2"),
    Mark("gpt (first header, 4096-byte sectors)", 4096, b"EFI PART", "UEFI specification 5.3.2"),
    Mark("gpt (backup header)", -512, b"EFI PART", "UEFI specification 5.3.2"),
    Mark("gpt (backup header, 4096-byte sectors)", -4096, b"EFI PART", "UEFI specification 5.3.2"),
    Mark("boot sector", 510, b"\x55\xaa", "UEFI specification 5.2.1"),
    Mark("ntfs (backup boot sector)", 3 - 512, b"NTFS    ", "Linux, fs/ntfs3/ntfs_fs.h"),
    Mark("exfat (backup boot sector)", 12 * 512 + 3, b"EXFAT   ", "exFAT specification 2"),
    Mark("fat32 (backup boot sector)", 6 * 512 + 82, b"FAT32   ", "FAT specification 1.03"),
    Mark("hfs+ (alternate header)", -1024, b"H+\x00\x04", "Apple TN1150, volume header"),
    Mark("hfsx (alternate header)", -1024, b"HX\x00\x05", "Apple TN1150, volume header"),
    Mark("apfs", 32, b"NXSB", "Apple File System Reference, nx_superblock_t"),
    Mark("f2fs (second copy)", 4096 + 1024, bytes.fromhex("1020f5f2"), "Linux, f2fs_fs.h"),
    Mark("btrfs (second copy)", 64 * MIB + 64, b"_BHRfS_M", "Linux, fs/btrfs/disk-io.h"),
    Mark("btrfs (third copy)", 256 * GIB + 64, b"_BHRfS_M", "Linux, fs/btrfs/disk-io.h"),
    Mark("bcachefs", 4096 + 24, bytes.fromhex("c68573f666ce90a9d96a60cf803df7ef"),
         "Linux, fs/bcachefs/bcachefs_format.h"),
    Mark("bcache", 4096 + 24, bytes.fromhex("c68573f64e1a45ca8265f57f48ba6d81"),
         "Linux, drivers/md/bcache, bcache.h"),
    Mark("ceph bluestore", 0, b"bluestore block device", "util-linux, bluestore.c"),
    Mark("spdk blobstore", 0, b"SPDKBLOB", "SPDK, lib/blob/blobstore.h"),
    Mark("oracle asm", 32, b"ORCLDISK", "util-linux, ocfs.c"),
    Mark("vmfs volume", MIB, bytes.fromhex("0dd001c0"), "util-linux, vmfs.c"),
    Mark("vmfs", 2 * MIB, bytes.fromhex("5ef1ab2f"), "util-linux, vmfs.c"),
    Mark("dm-integrity", 0, b"integrt\x00", "Linux, drivers/md/dm-integrity.c"),
    Mark("md 1.1", 0, _MD, "Linux, include/uapi/linux/raid/md_p.h"),
    Mark("md 1.2", 4096, _MD, "Linux, include/uapi/linux/raid/md_p.h"),
    *(Mark("luks2 (second header)", kib * KIB, b"SKUL\xba\xbe", "LUKS2 on-disk format 2.1")
      for kib in _LUKS2_SECOND),
    *(Mark("ext2/3/4 (backup superblock)", kib * KIB * block + 56, b"\x53\xef",
           "Linux, Documentation/filesystems/ext4") for kib, block in _EXT),
)  # fmt: skip

_EXT_BYTES = 104  # a superblock, from its magic on backwards and forwards, that must make sense


def leftovers(fd: int, size: int) -> list[str]:
    """What is found, as "NAME at BYTE", sorted; `size` in bytes. Raises OSError if a read fails."""
    return sorted(set(_fixed(fd, size)) | set(_md_at_the_end(fd, size)) | set(_zfs(fd, size)))


def _read(fd: int, offset: int, count: int) -> bytes:
    got = os.pread(fd, count, offset)
    if len(got) != count:
        raise OSError(f"only {len(got)} of {count} bytes could be read at byte {offset}")
    return got


def _fixed(fd: int, size: int) -> Iterator[str]:
    for mark in MARKS:
        at = mark.offset if mark.offset >= 0 else size + mark.offset
        if at < 0 or at + len(mark.magic) > size:
            continue
        if _read(fd, at, len(mark.magic)) != mark.magic:
            continue
        if mark.name.startswith("ext") and not _is_ext(fd, at, size):
            continue
        yield f"{mark.name} at {at}"


def _is_ext(fd: int, at: int, size: int) -> bool:
    """Two bytes are little to go by: the block size and the group's number must fit too."""
    if at - 56 + _EXT_BYTES > size:
        return False
    block = _read(fd, at - 56, _EXT_BYTES)
    log_size, group = struct.unpack_from("<I", block, 24)[0], struct.unpack_from("<H", block, 90)[0]
    return bool(log_size <= 6 and group == 1)


def _md_at_the_end(fd: int, size: int) -> Iterator[str]:
    """md 0.90 (in the byte order of its machine) and 1.0; where they lie: md_p.h, super-1.x."""
    if size < 128 * KIB:
        return
    old, new = (size & -(64 * KIB)) - 64 * KIB, (size & -4096) - 8 * KIB
    if _read(fd, old, 4) in (_MD, _MD[::-1]):
        yield f"md 0.90 at {old}"
    if _read(fd, new, 4) == _MD:
        yield f"md 1.0 at {new}"


def _zfs(fd: int, size: int) -> Iterator[str]:
    """The four labels of 256 KiB each, whose second half is a ring of uberblocks.

    Uberblocks begin with 0x00bab10c in the byte order of their machine, one each 1 to 8 KiB
    (OpenZFS, include/sys/vdev_impl.h and uberblock_impl.h).
    """
    label, ring = 256 * KIB, 128 * KIB
    aligned = size & -label
    if aligned < 4 * label:
        return
    wanted = {struct.pack("<Q", 0x00BAB10C), struct.pack(">Q", 0x00BAB10C)}
    for start in (0, label, aligned - 2 * label, aligned - label):
        half = _read(fd, start + ring, ring)
        if any(half[at : at + 8] in wanted for at in range(0, ring, KIB)):
            yield f"zfs label at {start}"
