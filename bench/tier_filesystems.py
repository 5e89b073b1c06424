"""xfs, ext4 and btrfs under the load of a tier, and what knowing the last use costs.

python -m bench.tier_filesystems FOLDER [--rounds N]     as root; makes images of 3 GiB in FOLDER

The load: files of 1-8 MiB written through a temporary name, read whole in random order with an
empty page cache, 4096 small files listed with their times as the pruner does. All filesystems lie
in images on the same disk, take turns in every round, and are compared as ratios of one run: the
disk below and its other users make the absolute figures worth little. For last use: files are
read, and what the device writes within 40 s is counted, under relatime (with the pruner's
re-arming by utime) and under strictatime,lazytime.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from kvhost.onhost import drive_fs
from tests.lab.loop import MIB, Loop, Loops

SIZE = 3 << 30
WRITEBACK_S, TRIES = 40, 3
FILES, LISTED, READ_FOR_TIMES = 300, 4096, 400
Filesystem = Literal["xfs", "ext4", "btrfs"]
KINDS: tuple[Filesystem, ...] = ("xfs", "ext4", "btrfs")
SAFE = "rw,nodev,nosuid,noexec"


def run(*argv: str | Path) -> None:
    subprocess.run([str(word) for word in argv], check=True, capture_output=True)


@contextmanager
def mounted(loop: Loop, place: Path, options: str) -> Iterator[Path]:
    place.mkdir(exist_ok=True)
    run("mount", "-o", options, loop.node, place)
    try:
        yield place
    finally:
        run("umount", place)


def timed(work: Callable[[], None]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began


def drop_caches() -> None:
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")


def write_files(place: Path, seed: int) -> None:
    source = random.Random(seed)
    data = source.randbytes(8 * MIB)
    for number in range(FILES):
        path = place / f"{number:04}.data"
        temporary = path.with_suffix(".tmp")
        temporary.write_bytes(data[: source.randint(1, 8) * MIB])
        temporary.rename(path)
    fd = os.open(place, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
    os.sync()


def read_files(place: Path, seed: int) -> None:
    names = sorted(place.glob("*.data"))
    random.Random(seed).shuffle(names)
    buffer = bytearray(8 * MIB)
    for name in names:
        with name.open("rb", buffering=0) as handle:
            while handle.readinto(buffer):
                pass


def list_files(place: Path) -> None:
    for entry in os.scandir(place):
        entry.stat(follow_symlinks=False)


def one_round(loop: Loop, kind: Filesystem, place: Path, seed: int) -> dict[str, float]:
    """Seconds of each part, on a new filesystem."""
    run("wipefs", "--all", loop.node)
    drive_fs.make(str(loop.node), kind, str(uuid.uuid4()), ())
    told = {}
    options = drive_fs.OPTIONS[kind]
    with mounted(loop, place, options) as top:
        told["write"] = timed(lambda: write_files(top, seed))
        drop_caches()
        told["read"] = timed(lambda: read_files(top, seed))
        many = top / "many"
        many.mkdir()
        for number in range(LISTED):
            (many / f"{number:05}").write_bytes(b"x" * 64)
    with mounted(loop, place, options) as top:
        drop_caches()
        told["list"] = timed(lambda: list_files(top / "many"))
    return told


def read_and_rearm(names: list[Path], rearm: bool) -> None:
    for name in names:
        name.read_bytes()
        if rearm:
            st = name.stat()
            os.utime(name, ns=(st.st_atime_ns, st.st_mtime_ns))


def written_for_times(loop: Loop, place: Path, options: str, rearm: bool) -> float:
    """KiB that the device writes because 400 files were read once."""
    with mounted(loop, place, f"{SAFE},{options}") as top:
        names = sorted((top / "many").iterdir())[:READ_FOR_TIMES]
        read_and_rearm(names, rearm)  # times as a cache has them: read before
        os.sync()
        time.sleep(0.5)
        os.sync()
        before = loop.sectors_written()
        read_and_rearm(names, rearm)
        # by itself, within the kernel's 30 s: a sync would write out lazy times too
        time.sleep(WRITEBACK_S)
        return (loop.sectors_written() - before) / 2


def is_exact(loop: Loop, place: Path, options: str) -> bool:
    """Whether a second read moves the access time, and a remount keeps it."""
    with mounted(loop, place, f"{SAFE},{options}") as top:
        path = top / "many" / "00000"
        path.read_bytes()
        first = path.stat().st_atime_ns
        time.sleep(0.05)
        path.read_bytes()
        second = path.stat().st_atime_ns
    with mounted(loop, place, f"{SAFE},noatime") as top:
        return second > first and (top / "many" / "00000").stat().st_atime_ns == second


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    seconds: dict[str, dict[str, list[float]]] = {kind: {} for kind in KINDS}
    times: dict[str, dict[str, object]] = {}
    with Loops(args.folder) as loops:
        drives = {kind: loops.make(kind, SIZE) for kind in KINDS}
        for number in range(args.rounds):
            order = random.Random(number).sample(KINDS, len(KINDS))
            for kind in order:
                told = one_round(drives[kind], kind, args.folder / "mnt", number)
                print(number, kind, {k: round(v, 2) for k, v in told.items()}, file=sys.stderr)
                for part, value in told.items():
                    seconds[kind].setdefault(part, []).append(value)
        for kind in KINDS:
            for options, rearm in (("relatime", True), ("strictatime,lazytime", False)):
                times[f"{kind} {options}"] = {
                    "exact": is_exact(drives[kind], args.folder / "mnt", options),
                    # the least of several: a sync by anybody writes lazy times out
                    "kib": min(
                        written_for_times(drives[kind], args.folder / "mnt", options, rearm)
                        for _ in range(TRIES)
                    ),
                }
        middle = {k: {p: statistics.median(v) for p, v in seconds[k].items()} for k in KINDS}
        ratios = {
            kind: {
                part: round(value / middle["xfs"][part], 2) for part, value in middle[kind].items()
            }
            for kind in KINDS
        }
        print(json.dumps({"seconds": middle, "ratio_to_xfs": ratios, "last_use": times}, indent=1))
        for loop in drives.values():
            loop.image.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
