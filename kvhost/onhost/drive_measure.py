#!/usr/bin/env python3
"""Measures the tier with fio, as the service's user: what it writes for long, what it reads.

Run as root: `drive_measure.py --tier DIR --user NAME --write-bytes N --file-bytes N`. It writes
N bytes in files of the cache's size below DIR/.kvhost-measure, reads them whole as the cache does,
then in one stream, and removes them; also when it is killed. Nothing else is written or read. The
drive's link, health and temperature are looked at before and after. One JSON object on standard
output, progress on standard error. Exit 1: refused or failed, the reason on standard error.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.dont_write_bytecode = True  # bin/ stays as it was installed
if TYPE_CHECKING:
    from kvhost.onhost import drive_sys
    from kvhost.onhost.drive_health import look_at, written_to
else:  # they lie beside this file on a host, where there is no package kvhost
    import drive_sys
    from drive_health import look_at, written_to

FOLDER = ".kvhost-measure"
MEMORY = frozenset({"tmpfs", "ramfs", "hugetlbfs"})
#: filesystems whose bytes lie on another machine
NETWORK = frozenset({"nfs", "nfs4", "cifs", "smb3", "smbfs", "ceph", "glusterfs", "9p", "afs",
                     "lustre", "beegfs", "fuse.sshfs", "fuse.glusterfs", "fuse.juicefs",
                     "fuse.s3fs", "fuse.rclone", "fuse.mfs", "fuse.ceph", "virtiofs"})  # fmt: skip
#: no more files than this are written and read, whatever their size: fio holds each in memory
MOST_FILES = 1 << 16
#: the largest of one request; and of the stream, where 16 of them are on their way at once
MOST_BLOCK, MOST_STREAM = 4 << 20, 1 << 20
PAGE = 4096
GIB = 1 << 30
DAY_S = 86400
PR_SET_PDEATHSIG = 1


class Refused(Exception):
    """Why nothing is measured."""


def say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def with_parent() -> None:
    """This process ends when its parent does, however that ends (prctl(2))."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def mount_of(path: str) -> drive_sys.Mount:
    """The mount that a directory lies on; the last of several at one point is the one in force."""
    real = os.path.realpath(path)
    inside = [m for m in drive_sys.mounts() if real == m.point or m.point == "/"
              or real.startswith(m.point + "/")]  # fmt: skip
    return max(enumerate(inside), key=lambda pair: (len(pair[1].point), pair[0]))[1]


def disks_below(name: str) -> list[str]:
    """Whole disks that a block device lies on; a loop device, and what holds its file."""
    found = drive_sys.below(name)
    return [one for one in found if not drive_sys.is_partition(one)
            and not drive_sys.entries(drive_sys.block(one, "slaves"))]  # fmt: skip


def fio_command(folder: Path, name: str, *words: str) -> list[str]:
    """One fio job that is one process, so that it ends with us."""
    return ["fio", f"--name={name}", "--output-format=json", f"--output={folder / name}.json",
            "--thread", "--group_reporting", "--fallocate=none", "--randrepeat=0",
            "--refill_buffers", *words]  # fmt: skip


def run_fio(folder: Path, name: str, *words: str) -> dict[str, Any]:
    """The answer of one job. Raises Refused with fio's own words."""
    done = subprocess.run(fio_command(folder, name, *words), cwd=folder, check=False,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          preexec_fn=with_parent)  # fmt: skip
    told = done.stdout.decode(errors="replace").strip().splitlines()
    try:
        text = (folder / f"{name}.json").read_text()
        answer = json.loads(text[text.index("{") :])  # warnings may come before it
    except (OSError, ValueError):
        answer = None
    if done.returncode or not isinstance(answer, dict):
        raise Refused(f"fio {name}: exit {done.returncode}: {' | '.join(told[-3:])}")
    return answer


def rate(answer: dict[str, Any], way: str) -> dict[str, Any]:
    """Bytes, seconds and bytes a second of a job; of the slowest percent of its reads, seconds."""
    (job,) = answer["jobs"]
    if job["error"]:
        raise Refused(f"fio {job['jobname']}: error {job['error']}")
    part = job[way]
    if not part["io_bytes"]:
        raise Refused(f"fio {job['jobname']}: not a byte in {part['runtime']} ms")
    late = part.get("clat_ns", {}).get("percentile", {}).get("99.000000")
    return {"bytes": part["io_bytes"], "seconds": part["runtime"] / 1000,
            "bytes_per_s": part["bw_bytes"] or part["io_bytes"] * 1000.0,
            "p99_s": late / 1e9 if late is not None else None}  # fmt: skip


def series(path: Path) -> list[list[float]]:
    """[seconds, bytes a second] of fio's log of bandwidth (ms, KiB/s, …), in order of time."""
    rows = []
    for line in path.read_text().splitlines():
        words = [word.strip() for word in line.split(",")]
        rows.append([int(words[0]) / 1000, int(words[1]) * 1024.0])
    return sorted(rows)


def hold(folder: Path) -> int:
    """The folder is ours; one that a killed run left behind is emptied. Raises Refused."""
    folder.mkdir(mode=0o700, exist_ok=True)
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise Refused(f"{folder} is in use: another measurement runs") from None
    for one in folder.iterdir():
        shutil.rmtree(one) if one.is_dir() and not one.is_symlink() else one.unlink()
    return fd


@contextlib.contextmanager
def cleaned_up(folder: Path) -> Iterator[None]:
    """The folder is removed by a process of its own, which also outlives our end by any signal."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write)
        os.setsid()
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):  # nobody waits for us
            os.dup2(null, fd)
        os.read(read, 1)
        for _ in range(50):
            shutil.rmtree(folder, ignore_errors=True)
            if not folder.exists():
                break
            time.sleep(0.1)  # fio is ending
        os._exit(0)
    os.close(read)
    try:
        yield
    finally:
        os.close(write)
        os.waitpid(child, 0)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """As the service's user: write, read whole files, read in a stream. Raises Refused, OSError."""
    folder = Path(options.tier, FOLDER)
    hold(folder)
    with cleaned_up(folder):
        return jobs(folder, options)


def blocks_of(file_bytes: int) -> tuple[int, int]:
    """Bytes of a request for whole files, and of one of the stream, pages all: a whole number of
    either makes a file, for fio leaves out what is no whole block. That file may be a few pages
    larger than was asked: of an odd number of pages the only parts may be single pages."""
    parts = 1 if file_bytes <= MOST_STREAM else MOST_BLOCK // MOST_STREAM
    parts_of_file = -(-file_bytes // MOST_BLOCK) * parts
    part = -(-file_bytes // (parts_of_file * PAGE)) * PAGE
    return part * parts, part


def whole_size(file_bytes: int) -> int:
    """Bytes of a file as it is written: so many whole blocks that it holds that much."""
    block, _ = blocks_of(file_bytes)
    return -(-file_bytes // block) * block


def gib(count: int) -> str:
    """As --write-gib takes it, and not less than that."""
    return f"{-(-count * 1000 // GIB) / 1000:g}"


def jobs(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    size = whole_size(options.file_bytes)
    block, part = blocks_of(options.file_bytes)
    files = options.write_bytes // size
    data = folder / "data"
    data.mkdir()
    # names are made, not listed: fio takes 4096 characters of them
    common = [f"--directory={data}", "--filename_format=f.$filenum", f"--runtime={options.seconds}",
              "--invalidate=1", "--file_service_type=sequential"]  # fmt: skip
    found: dict[str, Any] = {"direct": True}
    say(f"writing {files} files of {size} bytes, at most {options.seconds} s")
    write = [*of_files(files, size), "--rw=write", "--openfiles=1", "--end_fsync=1",
             f"--bs={block}", f"--write_bw_log={folder / 'write'}", "--log_avg_msec=500",
             "--per_job_logs=0"]  # fmt: skip
    try:
        answer = run_fio(folder, "write", *common, "--direct=1", *write)
    except Refused as why:
        if "direct" not in str(why) and "Invalid argument" not in str(why):
            raise
        found["direct"] = False  # this filesystem knows no O_DIRECT
        answer = run_fio(folder, "write", *common, "--direct=0", *write)
    found["fio"] = answer["fio version"]
    found["write"] = {**rate(answer, "write"), "series": series(folder / "write_bw.log")}
    whole = whole_files(data, size)
    if not whole:
        raise Refused(
            f"not one file of {size} bytes was written in "
            f"{options.seconds} s: {found['write']['bytes_per_s']} bytes a second"
        )
    read = [*common, *of_files(whole, size), "--rw=read"]
    say(f"reading {whole} whole files")
    one_by_one = ("--direct=0", f"--bs={block}", "--openfiles=1", "--ioengine=psync")
    found["read_files"] = rate(run_fio(folder, "files", *read, *one_by_one), "read")
    say("reading in a stream")
    # 16 requests may be of as many files; all of them open would be more than a user may have
    at_once = (f"--direct={int(found['direct'])}", f"--bs={part}", "--openfiles=32",
               "--ioengine=libaio", "--iodepth=16")  # fmt: skip
    found["read"] = rate(run_fio(folder, "stream", *read, *at_once), "read")
    return found


def of_files(count: int, size: int) -> list[str]:
    return [f"--nrfiles={count}", f"--filesize={size}", f"--size={count * size}"]


def whole_files(data: Path, size: int) -> int:
    """How many files, from f.0 on, were written to their end; all others are removed, so that no
    job writes them on."""
    whole = 0
    while True:
        one = data / f"f.{whole}"
        if not one.exists() or one.stat().st_size != size or one.stat().st_blocks * 512 < size:
            break
        whole += 1
    for one in data.iterdir():
        if int(one.name.removeprefix("f.")) >= whole:
            one.unlink()
    return whole


def check(options: argparse.Namespace) -> dict[str, Any]:
    """Where the tier lies. Raises Refused before anything is written."""
    if options.file_bytes <= 0 or options.file_bytes % PAGE:
        raise Refused(f"--file-bytes: a multiple of {PAGE}")
    size = whole_size(options.file_bytes)
    if options.write_bytes < size:
        raise Refused(f"a file of the cache has {size} bytes here: --write-gib {gib(size)} or more")
    if options.write_bytes // size > MOST_FILES:
        raise Refused(
            f"the cache has files of {size} bytes here; of those that is more than {MOST_FILES}: "
            f"--write-gib {MOST_FILES * size / GIB:g} at most"
        )
    try:
        there = os.lstat(options.tier)
    except OSError as why:
        raise Refused(f"no tier: {why}") from None
    owner = pwd.getpwnam(options.user).pw_uid
    if not os.path.isdir(options.tier) or os.path.islink(options.tier) or there.st_uid != owner:
        raise Refused(f"{options.tier} is not a directory of {options.user}: it is no tier")
    if shutil.which("fio") is None:
        raise Refused("no fio here: install the package fio, or ask for it (--install)")
    mount = mount_of(options.tier)
    if mount.fs in MEMORY:
        raise Refused(f"{options.tier} lies in memory ({mount.fs}): there is no drive to measure")
    room = os.statvfs(options.tier)
    free, keep = room.f_bavail * room.f_frsize, options.keep_bytes
    if free - options.write_bytes < keep:
        raise Refused(
            f"{options.write_bytes} bytes are to be written, {keep} to stay free, and "
            f"{free} are free at {options.tier}"
        )
    names = sorted({disk for one in drive_sys.devices_of(mount) for disk in disks_below(one)})
    return {"filesystem": mount.fs, "network": mount.fs in NETWORK, "disks": names}


def as_user(options: argparse.Namespace) -> dict[str, Any]:
    """measure(), in a process of the service's user. Raises Refused.

    A fork, not a new interpreter: root's Python may be one that no other user can start.
    """
    account = pwd.getpwnam(options.user)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        if os.geteuid() == 0 and account.pw_uid != 0:
            os.setgroups([])
            os.setgid(account.pw_gid)
            os.setuid(account.pw_uid)
        with_parent()  # after setuid, which undoes it
        os._exit(answer(write, options))
    os.close(write)
    with os.fdopen(read) as pipe:
        told = pipe.read()
    _, status = os.waitpid(child, 0)
    if status or not told:
        raise Refused("the measurement failed" + (", see above" if status > 255 else ""))
    loaded: dict[str, Any] = json.loads(told)
    return loaded


def answer(write: int, options: argparse.Namespace) -> int:
    """The child's work: its answer goes into the pipe."""
    try:
        found = measure(options)
        with os.fdopen(write, "w") as pipe:
            json.dump(found, pipe)
        return 0
    except (Refused, OSError, KeyError, ValueError) as why:
        say(f"drive_measure: {why}")
        return 1


def remembered(path: Path) -> dict[str, Any] | None:
    """What the last measurement left: its time, and bytes written by then, by serial number. None,
    and said, where it is damaged: nothing but the comparison is lost by that."""
    try:
        found = drive_sys.json_file(str(path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as why:
        found = f"{type(why).__name__}: {why}"
    if isinstance(found, dict) and found.get("schema") == 1:
        moment, written = found.get("time"), found.get("written")
        if isinstance(written, dict) and all(
            type(one) is int for one in (moment, *written.values())
        ):
            return {"schema": 1, "time": moment, "written": written}
    said = found if isinstance(found, str) else "it is not as kvhost writes it"
    say(f"drive_measure: {path} is damaged ({said:.100}): taken as no earlier measurement")
    return None


def remember(
    path: Path, disks: list[dict[str, Any]], now: int, previous: dict[str, Any] | None
) -> None:
    """Kept for the next measurement, so that it can tell what was written in between. What is less
    than a day old stays: measured anew, it would tell of no whole day for ever."""
    counts = {disk["serial"]: written_to(disk) for disk in disks if disk["serial"]}
    written = {serial: count for serial, count in counts.items() if count is not None}
    if (
        previous
        and 0 <= now - previous["time"] < DAY_S
        and written.keys() <= previous["written"].keys()
    ):
        return
    kept = {"schema": 1, "time": now, "written": written}
    new = path.with_name(path.name + ".new")
    new.write_text(json.dumps(kept) + "\n")
    new.replace(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tier", required=True, help="the tier's directory")
    parser.add_argument("--user", required=True, help="the service's user, whose it is")
    parser.add_argument("--write-bytes", type=int, required=True, help="all that is written")
    parser.add_argument("--file-bytes", type=int, required=True, help="of a file of the cache")
    parser.add_argument("--keep-bytes", type=int, default=1 << 30, help="that stay free")
    parser.add_argument("--memory", type=Path, required=True, help="a file of root's, for the next")
    parser.add_argument("--seconds", type=int, default=60, help="at most, of each of three jobs")
    options = parser.parse_args()
    try:
        where = check(options)
        where["previous"] = remembered(options.memory)
        before = [look_at(name) for name in where["disks"]]
        found = as_user(options)
    except (Refused, OSError, KeyError, ValueError) as why:
        say(f"drive_measure: {why}")
        return 1
    # what was measured has worn the drive: nothing that fails now may lose it
    after, now = [look_at(name) for name in where["disks"]], int(time.time())
    try:
        remember(options.memory, after, now, where["previous"])
    except (OSError, ValueError, KeyError, TypeError) as why:
        say(f"drive_measure: not kept for the next measurement: {why}")
    size = whole_size(options.file_bytes)
    where.update(schema=1, time=now, file_bytes=size, before=before, after=after, **found)
    print(json.dumps(where))
    return 0


if __name__ == "__main__":
    sys.exit(main())
