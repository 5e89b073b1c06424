#!/usr/bin/env python3
"""One run of kvhost at a time on a host: runlock.py --file F take|keep|drop --owner JSON

take: writes the owner into the lock, unless another holds it. A lock is taken over when its
run is named by --break, when its controller says that the run is dead (--dead RUN_ID), or when
nothing refreshed it for 30 minutes. keep: refreshes it. drop: removes it, if it is still ours.
Exit: 0 done, 1 held by another (its owner is printed), 2 unusable.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import sys
import time

STALE_AFTER_S = 30 * 60


def read(path):
    try:
        with open(path, encoding="utf-8") as handle:
            lock = json.load(handle)
        return lock if isinstance(lock, dict) else {"run_id": "unreadable"}
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return {"run_id": "unreadable", "refreshed_unix": os.stat(path).st_mtime}


def write(path, lock):
    temporary = "%s.%d" % (path, os.getpid())
    with open(temporary, "w", encoding="utf-8") as handle:
        json.dump(lock, handle)
        handle.flush()
        os.fsync(handle.fileno())
    os.replace(temporary, path)


def free_to_take(lock, owner, args):
    if lock is None or lock.get("run_id") == owner["run_id"]:
        return True
    if lock.get("run_id") in (args.dead, args.break_):
        return True
    return time.time() - lock.get("refreshed_unix", 0) > STALE_AFTER_S


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=["take", "keep", "drop"])
    parser.add_argument("--file", required=True)
    parser.add_argument("--owner", required=True, help="JSON with run_id, user, controller, …")
    parser.add_argument("--dead", help="run id that its controller knows to be dead")
    parser.add_argument("--break", dest="break_", help="run id that a person gave up")
    args = parser.parse_args()
    owner = json.loads(args.owner)
    # what decides is the file's content; flock only keeps two takers apart for that moment
    guard = os.open(args.file + ".guard", os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(guard, fcntl.LOCK_EX)
    lock = read(args.file)
    if not free_to_take(lock, owner, args):
        print(json.dumps(lock))
        return 1
    if args.command == "drop":
        if lock is not None and lock.get("run_id") == owner["run_id"]:
            os.unlink(args.file)
        return 0
    now = time.time()
    started = now
    if lock is not None and lock.get("run_id") == owner["run_id"]:
        started = lock.get("started_unix", now)
    write(args.file, {**owner, "started_unix": started, "refreshed_unix": now})
    return 0


if __name__ == "__main__":
    sys.exit(main())
