#!/usr/bin/env python3
"""Holds one whole disk while something is done to it (for drive_apply.py and its siblings).

A name like /dev/nvme0n1 can come to mean another drive at any moment. What is opened is compared
with what was planned (major:minor and diskseq, the kernel's number of this appearance of a disk),
locked with the lock that udev honours (flock on the whole disk, systemd's BLOCK_DEVICE_LOCKING),
and kept open, so that its numbers cannot be given to another drive.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import re
import stat
import struct
import subprocess
import sys
import time
from typing import Any

BLKGETDISKSEQ = 0x80081280
BLKGETSIZE64 = 0x80081272
BLKSSZGET = 0x1268
BLKRRPART = 0x125F
LOCK_WAIT_S = 120.0
EXCLUSIVE_WAIT_S = 4.0
TOOL_ENV = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"}


class Refused(Exception):
    """A reason not to go on, found before anything was written unless `written` says otherwise."""

    def __init__(self, code: str, why: str, **more: Any) -> None:
        super().__init__(why)
        self.code, self.why, self.more = code, why, more


def say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def step(name: str) -> None:
    """A place at which a run may be cut off; KVHOST_TEST_DRIVE_STOP=NAME:kill (or :pause) does."""
    wanted, _, how = os.environ.get("KVHOST_TEST_DRIVE_STOP", "").partition(":")
    if wanted == name and how in ("kill", "pause"):
        say(f"test: {how} at {name}")
        os.kill(os.getpid(), 9 if how == "kill" else 19)


def cut_off_while(argv: tuple[str, ...]) -> None:
    """KVHOST_TEST_DRIVE_STOP=mkfs-running-MS:kill ends a mkfs and us after MS milliseconds."""
    wanted = re.fullmatch(r"(\w+)-running-(\d+):kill", os.environ.get("KVHOST_TEST_DRIVE_STOP", ""))
    if wanted and argv[0].startswith(wanted[1]):
        with subprocess.Popen(argv, env=TOOL_ENV, stdout=subprocess.DEVNULL) as process:
            time.sleep(int(wanted[2]) / 1000)
            process.kill()
            os.kill(os.getpid(), 9)


def tool(*argv: str, keep: tuple[int, ...] = (), accept: tuple[int, ...] = (0,)) -> str:
    """stdout of a program. `keep`: descriptors that it inherits, so that locks outlive us.

    Raises RuntimeError with what it said if its exit code is not in `accept`, or it is missing.
    """
    cut_off_while(argv)
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=TOOL_ENV,
            pass_fds=keep, check=False,
        )  # fmt: skip
    except FileNotFoundError as error:
        raise RuntimeError(f"{argv[0]} is not installed on this host") from error
    if done.returncode not in accept:
        said = " | ".join((done.stderr or done.stdout).strip().splitlines()[-4:])
        raise RuntimeError(f"{' '.join(argv)} failed (exit {done.returncode}): {said}")
    return done.stdout


def maj_min(rdev: int) -> str:
    return f"{os.major(rdev)}:{os.minor(rdev)}"


def read_text(path: str) -> str:
    with open(path, encoding="utf-8") as handle:
        return handle.read().strip()


class Disk:
    """One whole disk, open for reading, locked for all who ask for the lock; a context."""

    def __init__(self, path: str, numbers: str, diskseq: int | None) -> None:
        """`numbers` "major:minor" and `diskseq` (None where the kernel has none) as planned.

        Raises Refused when the path leads elsewhere by now.
        """
        self.path, self.numbers = path, numbers
        try:
            self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise Refused("drive_gone", f"{path} cannot be opened: {error}") from error
        try:
            self._is_what_was_planned(diskseq)
        except BaseException:
            os.close(self.fd)
            raise
        self.exclusive_fd: int | None = None
        self.size = struct.unpack("Q", self.ask(BLKGETSIZE64, 8))[0]
        self.sector = struct.unpack("I", self.ask(BLKSSZGET, 4))[0]
        self.sysfs = os.path.realpath(f"/sys/dev/block/{numbers}")
        self.name = os.path.basename(self.sysfs)

    def _is_what_was_planned(self, diskseq: int | None) -> None:
        st = os.fstat(self.fd)
        if not stat.S_ISBLK(st.st_mode):
            raise Refused("drive_gone", f"{self.path} is not a block device")
        if maj_min(st.st_rdev) != self.numbers:
            raise Refused(
                "drive_swapped",
                f"{self.path} was {self.numbers} when the plan was made and is "
                f"{maj_min(st.st_rdev)} now: another drive has its name",
            )
        now = self.diskseq()
        if diskseq is not None and now != diskseq:
            raise Refused(
                "drive_swapped",
                f"{self.path} is not the disk that the plan saw: its diskseq was {diskseq} and is "
                f"{now}; a drive was taken away and another one got its name",
            )

    def ask(self, request: int, length: int) -> bytes:
        answer = bytearray(length)
        fcntl.ioctl(self.fd, request, answer)
        return bytes(answer)

    def diskseq(self) -> int | None:
        try:
            return int(struct.unpack("Q", self.ask(BLKGETDISKSEQ, 8))[0])
        except OSError:  # Linux before 5.15
            return None

    def __enter__(self) -> Disk:
        return self

    def __exit__(self, *_: object) -> None:
        self.let_others_in()
        os.close(self.fd)

    def lock(self, seconds: float = LOCK_WAIT_S) -> None:
        """Raises Refused when another program keeps the lock."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    why = f"another program has held the lock of {self.path} for {seconds:.0f} s"
                    raise Refused("drive_busy", why) from None
            time.sleep(0.1)

    def unlock(self) -> None:
        """For udev, which looks at a new filesystem only once the lock is free."""
        fcntl.flock(self.fd, fcntl.LOCK_UN)

    def keep_others_out(self, writing: bool = False) -> int:
        """O_EXCL: nobody can mount the disk or a part of it meanwhile. The descriptor.

        Raises Refused when somebody has: a mount, a holder, another exclusive user.
        """
        if self.exclusive_fd is not None:
            self.let_others_in()
        flags = (os.O_RDWR if writing else os.O_RDONLY) | os.O_EXCL | os.O_CLOEXEC
        deadline = time.monotonic() + EXCLUSIVE_WAIT_S
        while True:
            try:
                fd = os.open(self.path, flags)
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    why = f"{self.path} is in use: it cannot be opened for us alone ({error})"
                    raise Refused("drive_busy", why) from error
            time.sleep(0.2)  # another one may look at all drives at this moment
        self.exclusive_fd = fd
        if maj_min(os.fstat(fd).st_rdev) != self.numbers:
            raise Refused("drive_swapped", f"{self.path} has come to lead to another drive")
        return fd

    def let_others_in(self) -> None:
        if self.exclusive_fd is not None:
            os.close(self.exclusive_fd)
            self.exclusive_fd = None

    def written(self) -> int:
        """Sectors of 512 bytes that were written to the disk since it appeared."""
        os.fsync(self.fd)  # what others wrote and the kernel still keeps counts too
        return int(read_text(f"{self.sysfs}/stat").split()[6])

    def partitions(self) -> dict[int, str]:
        """Number -> "major:minor" of the partitions that the kernel knows."""
        found = {}
        for name in sorted(os.listdir(self.sysfs)):
            base = f"{self.sysfs}/{name}"
            if os.path.exists(f"{base}/partition"):
                found[int(read_text(f"{base}/partition"))] = read_text(f"{base}/dev")
        return found

    def reread_partitions(self, wanted: int) -> None:
        """Has the kernel know partition `wanted`; some kernels cannot read GPT by themselves."""
        self.let_others_in()
        with contextlib.suppress(OSError):
            fcntl.ioctl(self.fd, BLKRRPART)
        if wanted not in self.partitions():
            tool("partx", "--add", "--nr", str(wanted), self.path, accept=(0, 1))
        if wanted not in self.partitions():
            raise RuntimeError(f"the kernel does not take the partition table of {self.path}")

    def partition_path(self, number: int, seconds: float = 15.0) -> str:
        """Path of the node of a partition, waited for; checked by its numbers, not by its name."""
        deadline = time.monotonic() + seconds
        numbers = self.partitions()[number]
        name = os.path.basename(os.path.realpath(f"/sys/dev/block/{numbers}"))
        path = f"/dev/{name}"
        while True:
            with contextlib.suppress(OSError):
                st = os.stat(path)
                if stat.S_ISBLK(st.st_mode) and maj_min(st.st_rdev) == numbers:
                    return path
            if time.monotonic() > deadline:
                raise RuntimeError(f"no {path} for partition {number} after {seconds:.0f} s")
            time.sleep(0.05)


def blkid(path: str) -> dict[str, str]:
    """What lies on a device, read from the device itself ({} for nothing that is known).

    Raises RuntimeError: it could not be read, or several things claim it.
    """
    with open(path, "rb") as handle:  # blkid's exit code 2 is "nothing" and "cannot read" alike
        handle.read(4096)
    text = tool("blkid", "--probe", "--output", "export", path, accept=(0, 2))
    pairs = (line.partition("=") for line in text.splitlines() if "=" in line)
    # what the partition table says of a partition is not what lies in it
    about_it = ("DEVNAME", "PART_ENTRY_")
    return {k: v.replace("\\", "") for k, _, v in pairs if not k.startswith(about_it)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", help="a whole disk; shows its numbers and partitions")
    path = parser.parse_args().path
    with Disk(path, maj_min(os.stat(path).st_rdev), None) as disk:
        told = {
            "path": path, "maj_min": disk.numbers, "diskseq": disk.diskseq(), "size": disk.size,
            "sector": disk.sector, "partitions": disk.partitions(), "written": disk.written(),
        }  # fmt: skip
    print(json.dumps(told))
    return 0


if __name__ == "__main__":
    sys.exit(main())
