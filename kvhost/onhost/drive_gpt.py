#!/usr/bin/env python3
"""A GUID partition table with one partition, as bytes: written by us, so that a table of which
only a part reached the disk can be told from anything else, sector by sector.

The layout is that of the UEFI specification, chapter 5 (protective MBR, header, 128 entries of 128
bytes, the same at the end of the disk). The partition begins at 1 MiB, ends on a whole MiB, and has
the type "Linux filesystem" and the name kvhost.
"""

from __future__ import annotations

import argparse
import struct
import sys
import uuid
import zlib
from collections.abc import Callable
from dataclasses import dataclass

LINUX_FILESYSTEM = uuid.UUID("0FC63DAF-8483-4772-8E79-3D69D8477DE4")
NAME = "kvhost"
ENTRIES, ENTRY_BYTES = 128, 128
ALIGN = 1 << 20


@dataclass(frozen=True)
class Geometry:
    """Where the partition lies, in bytes from the beginning of the disk."""

    start: int
    length: int


def geometry(size: int, sector: int) -> Geometry:
    """For a disk of `size` bytes. Raises ValueError if that is too small (under 4 MiB)."""
    last_usable = size - (1 + ENTRIES * ENTRY_BYTES // sector) * sector
    end = last_usable // ALIGN * ALIGN
    if end <= 2 * ALIGN:
        raise ValueError(f"a disk of {size} bytes is too small for a partition")
    return Geometry(ALIGN, end - ALIGN)


def table(size: int, sector: int, disk: str, partition: str) -> dict[int, bytes]:
    """Offset -> bytes of everything that makes up the table, in the order to write it.

    `disk`, `partition`: UUIDs. The backup at the end goes first, the protective MBR last: until
    then the disk shows no valid table.
    """
    where = geometry(size, sector)
    sectors, entry_sectors = size // sector, ENTRIES * ENTRY_BYTES // sector
    first, last = where.start // sector, (where.start + where.length) // sector - 1
    entry = struct.pack(
        "<16s16sQQQ72s",
        LINUX_FILESYSTEM.bytes_le, uuid.UUID(partition).bytes_le, first, last, 0,
        NAME.encode("utf-16-le"),
    )  # fmt: skip
    entries = entry.ljust(ENTRIES * ENTRY_BYTES, b"\0")

    def header(mine: int, other: int, entries_at: int) -> bytes:
        def packed(crc: int) -> bytes:
            return struct.pack(
                "<8s4sIIIQQQQ16sQIII",
                b"EFI PART", b"\0\0\1\0", 92, crc, 0, mine, other, 2 + entry_sectors,
                sectors - entry_sectors - 2, uuid.UUID(disk).bytes_le, entries_at, ENTRIES,
                ENTRY_BYTES, zlib.crc32(entries),
            )  # fmt: skip

        return packed(zlib.crc32(packed(0))).ljust(sector, b"\0")

    chs = b"\xff\xff\xff"
    protective = struct.pack("<B3sB3sII", 0, b"\0\2\0", 0xEE, chs, 1, min(sectors - 1, 0xFFFFFFFF))
    mbr = (b"\0" * 446 + protective).ljust(510, b"\0") + b"\x55\xaa"
    backup_entries = sectors - 1 - entry_sectors
    return {
        backup_entries * sector: entries,
        (sectors - 1) * sector: header(sectors - 1, 1, backup_entries),
        2 * sector: entries,
        sector: header(1, sectors - 1, 2),
        0: mbr.ljust(sector, b"\0"),
    }


def parse(read: Callable[[int, int], bytes], header_at: int, sector: int) -> tuple[str, str] | None:
    """(disk GUID, partition UUID) of a whole table of ours; None for anything else.

    `read(offset, length)` reads the disk, `header_at` is where a header should be. The partition
    may have another length than this disk would get today.
    """
    header = read(header_at, 92)
    if len(header) < 92 or header[:8] != b"EFI PART":
        return None
    fields = struct.unpack("<8s4sIIIQQQQ16sQIII", header)
    entries_at, count, width, crc = fields[10:14]
    if (count, width) != (ENTRIES, ENTRY_BYTES) or fields[5] != header_at // sector:
        return None
    if zlib.crc32(header[:16] + bytes(4) + header[20:92]) != fields[3]:
        return None
    entries = read(entries_at * sector, ENTRIES * ENTRY_BYTES)
    if zlib.crc32(entries) != crc or any(entries[ENTRY_BYTES:]):
        return None
    kind, part, first, _, _, name = struct.unpack("<16s16sQQQ72s", entries[:ENTRY_BYTES])
    words = name.decode("utf-16-le", "replace").rstrip("\0")
    if uuid.UUID(bytes_le=kind) != LINUX_FILESYSTEM or words != NAME or first * sector != ALIGN:
        return None
    return str(uuid.UUID(bytes_le=fields[9])), str(uuid.UUID(bytes_le=part))


def names(first_bytes: bytes, sector: int) -> list[str]:
    """Names of the partitions in the primary table, where one of ours would have them (entries of
    128 bytes from sector 2 on); [] without a table. A look before the kernel is told to read it."""
    if first_bytes[sector : sector + 8] != b"EFI PART":
        return []
    at = range(2 * sector, min(2 * sector + ENTRIES * ENTRY_BYTES, len(first_bytes)), ENTRY_BYTES)
    used = [first_bytes[n : n + ENTRY_BYTES] for n in at if any(first_bytes[n : n + 16])]
    return [one[56:128].decode("utf-16-le", "replace").rstrip("\0") for one in used]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("size", type=int, help="of the disk, in bytes")
    parser.add_argument("--sector", type=int, default=512)
    args = parser.parse_args()
    print(geometry(args.size, args.sector))
    return 0


if __name__ == "__main__":
    sys.exit(main())
