#!/usr/bin/env python3
"""Reads a disk and says whether every byte is zero: drive_blank.py PATH [--sampled]

Only what was read as zero from end to end counts as blank; --sampled reads the ends and 1 MiB at
each of 1024 places, and says how much that was. Reads past the page cache (O_DIRECT), changes
nothing. JSON on stdout, progress on stderr. Exit: 0 blank, 1 not blank, 2 could not be read.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import mmap
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

MIB = 1 << 20
STEP = 4 * MIB
SAMPLE_ENDS = 64 * MIB
SAMPLE_PLACES = 1024
TELL_EVERY_S = 5.0
BLOCK = 4096


def parts(size: int, sampled: bool) -> Iterator[tuple[int, int]]:
    """(offset, length) to be read, in order and without overlap."""
    if not sampled or size <= 2 * SAMPLE_ENDS + SAMPLE_PLACES * MIB:
        yield 0, size
        return
    yield 0, SAMPLE_ENDS
    inner = size - 2 * SAMPLE_ENDS
    stride = inner // SAMPLE_PLACES // MIB * MIB
    for place in range(SAMPLE_PLACES):
        yield SAMPLE_ENDS + place * stride, MIB
    tail = (size - SAMPLE_ENDS) // MIB * MIB
    yield tail, size - tail


def first_nonzero(data: memoryview) -> int | None:
    """Index of the first byte that is not zero; comparing with zeros is as fast as memcmp."""
    if bytes(data) == bytes(len(data)):
        return None
    for at in range(0, len(data), BLOCK):
        piece = bytes(data[at : at + BLOCK])
        stripped = piece.lstrip(b"\0")
        if stripped:
            return at + len(piece) - len(stripped)
    raise AssertionError("unreachable")


def check(path: str, begin: int, size: int, *, sampled: bool = False) -> dict[str, Any]:
    """Reads `size` bytes from byte `begin` on (a multiple of the sector) for one that is not zero.

    {"blank", "read_bytes", "size_bytes", "seconds", "offset", "sha256"}: offset of the first
    byte that is not zero and digest of its 4 KiB block, None of a blank disk. Raises OSError."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:  # a few devices take no O_DIRECT
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    buffer = mmap.mmap(-1, STEP)  # aligned to a page, as O_DIRECT wants it
    began = told = time.monotonic()
    done, total = 0, sum(length for _, length in parts(size, sampled))
    result: dict[str, Any] = {"blank": True, "size_bytes": size, "offset": None, "sha256": None}
    try:
        for start, length in parts(size, sampled):
            at, end = begin + start, begin + start + length
            while at < end:
                count = _read(fd, buffer, at, min(STEP, end - at))
                with memoryview(buffer) as whole, whole[:count] as data:
                    found = first_nonzero(data)
                    if found is not None:
                        block = found // BLOCK * BLOCK
                        digest = hashlib.sha256(data[block : block + BLOCK]).hexdigest()
                        result.update(blank=False, offset=at + found, sha256=digest)
                done, at = done + count, at + count
                if not result["blank"]:
                    break
                if time.monotonic() - told > TELL_EVERY_S:
                    told = time.monotonic()
                    _tell(path, done, total, told - began)
            if not result["blank"]:
                break
    finally:
        os.close(fd)
        with contextlib.suppress(BufferError):
            buffer.close()
    seconds = time.monotonic() - began
    result.update(read_bytes=done, seconds=round(seconds, 3))
    _tell(path, done, total, seconds)
    if sampled:
        share = done / size
        print(f"{path}: sampled, {done / MIB:.0f} of {size / MIB:.0f} MiB ({share:.2%}) were read; "
              "the rest may hold anything", file=sys.stderr, flush=True)  # fmt: skip
    return result


def _read(fd: int, buffer: mmap.mmap, at: int, want: int) -> int:
    """Bytes read into the buffer. Raises OSError: what cannot be read is not zero."""
    with memoryview(buffer) as whole, whole[:want] as target:
        count = os.preadv(fd, [target], at)
    if count <= 0:
        raise OSError(f"nothing could be read at offset {at}")
    return count


def _tell(path: str, done: int, total: int, seconds: float) -> None:
    rate = done / MIB / max(seconds, 1e-6)
    left = (total - done) / MIB / max(rate, 1e-6)
    line = f"{path}: read {done / MIB:.0f} of {total / MIB:.0f} MiB ({done / max(total, 1):.0%}), "
    line += f"{rate:.0f} MiB/s"
    print(line + (f", {left:.0f} s left" if done < total else ""), file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path")
    parser.add_argument("--sampled", action="store_true")
    args = parser.parse_args()
    try:
        fd = os.open(args.path, os.O_RDONLY)
        size = os.lseek(fd, 0, os.SEEK_END)
        os.close(fd)
        result = check(args.path, 0, size, sampled=args.sampled)
    except OSError as error:
        print(json.dumps({"blank": None, "why": str(error)}))
        return 2
    print(json.dumps(result))
    return 0 if result["blank"] else 1


if __name__ == "__main__":
    sys.exit(main())
