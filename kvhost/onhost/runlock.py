#!/usr/bin/env python3
"""One run of kvhost at a time on a host: runlock.py --file F take|keep|drop --owner JSON

take: writes the owner into the lock, unless another holds it. A lock is taken over when its
run is named by --break, when its controller says that the run is dead (--dead RUN_ID), or when
nothing refreshed it for 30 minutes; with --last not if another run held it since that one, for what
was looked at without the lock may have changed. keep: refreshes it. drop: removes it, if it is
still ours.
What a run that is gone left at work (a connection's end does not end it) is ended before its lock
goes to another, or is dropped.
A lock that cannot be read counts as held by the run "unreadable" since it was written.
Exit: 0 done; 1 held by another (its owner is printed; {} when keep finds no lock at all; a last
run that is not the one of --last);
2 the arguments or the file cannot be used.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import signal
import stat
import sys
import time
from typing import Any

STALE_AFTER_S = 30 * 60
#: what a run starts and waits for; each may be killed at any step, and the next run completes it
PROGRAMS = (
    "drive_apply", "drive_grow", "drive_release", "engine", "evidence", "generations",
    "model_builtin", "model_fetch", "own_files", "purge", "resolve", "services", "uninstall",
)  # fmt: skip
PATIENCE_S = 5.0


def boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as handle:
        return handle.read().strip()


def boottime() -> float:
    """Seconds since the host started; runs on while it sleeps and when its clock is set."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def read(path: str) -> dict[str, Any] | None:
    """The lock, None without one. Raises OSError."""
    try:
        # O_NONBLOCK: a pipe in its place would be waited for
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), encoding="utf-8") as handle:
            about = os.fstat(handle.fileno())
            if not stat.S_ISREG(about.st_mode):
                raise OSError(f"{path} is not a regular file")
            written = about.st_mtime
            try:
                lock = json.load(handle)
            except (ValueError, RecursionError):
                lock = None
    except FileNotFoundError:
        return None
    if not isinstance(lock, dict) or not isinstance(lock.get("run_id"), str):
        return {"run_id": "unreadable", "refreshed_unix": written}
    return lock


def write(path: str, lock: dict[str, Any]) -> None:
    with open(path + ".new", "w", encoding="utf-8") as handle:
        json.dump(lock, handle)
        handle.flush()
        os.fsync(handle.fileno())
    os.replace(path + ".new", path)


def number(value: Any) -> float | None:
    """A time of the lock, None if it is none that a run writes."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not abs(value) < 1e15:
        return None  # nan too
    return float(value)


def age_s(lock: dict[str, Any]) -> float:
    """Seconds since it was refreshed; by the clock only across a restart of the host. If that was
    far in the future, its clock was wrong: then as many as the host is up."""
    boot, refreshed = lock.get("boot_id"), number(lock.get("refreshed_boottime"))
    if boot == boot_id() and refreshed is not None:
        return boottime() - refreshed
    refreshed = number(lock.get("refreshed_unix"))
    age = time.time() - refreshed if refreshed is not None else 0.0
    # another boot may be another machine, with the same volume: near the present it counts
    return boottime() if age < -STALE_AFTER_S and isinstance(boot, str) else age


def may_take(lock: dict[str, Any], args: argparse.Namespace) -> bool:
    return lock["run_id"] in (args.dead, args.break_) or age_s(lock) > STALE_AFTER_S


def sees_our_files(pid: int) -> bool:
    """Whether a process has our root directory: one of a container on this host has another, and
    what it calls by the same path is not ours."""
    try:
        return os.path.samefile(f"/proc/{pid}/root", "/")
    except OSError:
        return False  # it has just ended


def left_at_work(base: str) -> list[int]:
    """Processes that run one of PROGRAMS of this installation."""
    wanted = {f"{base}/bin/{name}.py" for name in PROGRAMS}
    found = []
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as handle:
                argv = handle.read().decode(errors="replace").split("\0")
        except OSError:
            continue  # it has just ended
        # the program itself, not a shell or sudo that has it in its command line
        if wanted & set(argv[:3]) and sees_our_files(pid):
            found.append(pid)
    return found


def end_left(base: str) -> None:
    """Ends them: SIGTERM, and SIGKILL to what does not listen."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        pids = left_at_work(base)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
                print(f"runlock: ended process {pid} of a run that is gone", file=sys.stderr)
        deadline = time.monotonic() + PATIENCE_S
        while pids and left_at_work(base) and time.monotonic() < deadline:
            time.sleep(0.05)


def act(args: argparse.Namespace, owner: dict[str, Any]) -> int:
    """Raises OSError."""
    # what decides is the file's content; flock only keeps two takers apart for that moment
    guard = os.open(args.file + ".guard", os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600)
    fcntl.flock(guard, fcntl.LOCK_EX)  # until this process ends
    lock = read(args.file)
    ours = lock is not None and lock["run_id"] == owner["run_id"]
    base = os.path.dirname(os.path.dirname(os.path.abspath(args.file)))
    if args.command == "drop":
        if ours:
            end_left(base)
            os.unlink(args.file)
        elif lock is not None:
            print(json.dumps(lock))
            return 1
        return 0
    free = args.command == "take" and (lock is None or may_take(lock, args))
    if not ours and not free:
        print(json.dumps(lock or {}))
        return 1
    if not ours:
        last = os.pread(guard, 200, 0).decode(errors="replace").strip()
        if args.last is not None and last != args.last:
            print(json.dumps({"last_run": last}))
            return 1
        os.ftruncate(guard, 0)
        os.pwrite(guard, owner["run_id"].encode(), 0)
    if lock is not None and not ours:
        end_left(base)
    now = time.time()
    started = lock.get("started_unix", now) if ours and lock else now
    times = {"refreshed_unix": now, "boot_id": boot_id(), "refreshed_boottime": boottime()}
    write(args.file, {**owner, "started_unix": started, **times})
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("command", choices=["take", "keep", "drop"])
    parser.add_argument("--file", required=True)
    parser.add_argument("--owner", required=True, help="JSON with run_id, user, controller, …")
    parser.add_argument("--dead", help="run id that its controller knows to be dead")
    parser.add_argument("--break", dest="break_", help="run id that a person gave up")
    parser.add_argument("--last", help="take: run id of the last run that is known of, may be ''")
    args = parser.parse_args()
    try:
        owner = json.loads(args.owner)
    except ValueError as error:
        parser.error(f"--owner is not JSON: {error}")
    if not isinstance(owner, dict) or not isinstance(owner.get("run_id"), str):
        parser.error("--owner must be a JSON object with a run_id")
    try:
        return act(args, owner)
    except OSError as error:
        print(f"runlock: {args.file} cannot be used: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
