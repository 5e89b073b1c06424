#!/usr/bin/env python3
"""Keep the directory of KV cache files (the tier) within its limit, beside a live cache server.

The tier holds ``ns-<hex>/``, one directory a namespace, each with the L2 files of one ``lmcache
server``, or those of vLLM's own file tier in ``MODEL_rRANK/HHH/HH_gGROUP/HASH.bin``. LMCache's
adapters ``fs`` and ``fs_native`` and vLLM look for a file at every lookup and write to a temporary
name first, so a file may vanish at any time: its tokens are computed again.
Promise: above the limit for at most one interval. Only names of files are removed; of directories
only vLLM's empty ones, by a sweep, when nobody writes.

Order: namespaces that are not ``--current``, the one unused for longest first; then files by last
use. Files used in the same 2 s are taken as one prompt's, and of those the newest goes first: the
chunks of a prompt are written and read in order and serve only with those before them. A chunk that
the server answers from its own memory (L1) is not read, so that is not use.

Last use is the access time where this mount moves it. ``relatime`` lets a file's second read within
a day pass unseen; setting its times to what they are renews the change time, and the next read
counts (Linux, ``relatime_need_update``). Each scan does so for files read since the last: the order
is exact to one interval. Where access times stand still (noatime, NFS) it is first in, first out.

Hard links: the name in the tier goes, the other stays; counted for the limit, not as space won.
Hidden files, other sub-directories, symbolic links and other mounts are left alone, and reported.

Exit codes: 0 done; 1 files could not be removed; 2 usage; 3 refused; 4 another pruner held the lock
for 30 s; 5 nothing is left to remove and the limit or the floor is still crossed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

sys.dont_write_bytecode = True  # bin/ stays as it was installed
if TYPE_CHECKING or __package__:
    from kvhost.onhost.pruner_tier import (
        MARKER,
        NAMESPACE,
        NONSENSE,
        REARMED,
        Busy,
        File,
        Refused,
        Scan,
        Tier,
        Victim,
        above,
        free_bytes,
        read_small,
    )
else:  # it lies beside this file on a host, where there is no package kvhost
    from pruner_tier import (
        MARKER,
        NAMESPACE,
        NONSENSE,
        REARMED,
        Busy,
        File,
        Refused,
        Scan,
        Tier,
        Victim,
        above,
        free_bytes,
        read_small,
    )

POLL_S = 0.1
PROBE_EVERY_S = 600.0
ONE_PROMPT_NS = 2 * 10**9
TEMP_AGE_NS = 600 * 10**9  # a younger temporary file may be being written
AGREEING = 0.9
Status = dict[str, Any]


def limit_of(args: argparse.Namespace) -> int:
    """The limit in bytes; "all" is for a tier that has a filesystem of its own."""
    if args.limit_bytes != "all":
        return int(args.limit_bytes)
    st = os.statvfs(args.tier)
    return st.f_blocks * st.f_frsize - int(args.free_floor_bytes)


def choose(scan: Scan, args: argparse.Namespace, now_ns: int) -> tuple[list[Victim], bool]:
    """What to remove, in order, with the reason; and whether that will not be enough."""
    victims = []
    usage, keep_free = scan.usage, args.free_floor_bytes + args.headroom_bytes
    over = usage > args.limit_bytes * args.high
    for_limit = usage - int(args.limit_bytes * args.low) if over else 0
    # Twice the headroom, so that a steady writer does not call for a scan at every poll.
    for_floor = keep_free + args.headroom_bytes - scan.free if scan.free < keep_free else 0
    last_used: dict[str, int] = defaultdict(int)
    for f in scan.files:
        last_used[f.namespace] = max(last_used[f.namespace], f.used)

    def order(f: File) -> tuple[bool, int, str, int, int]:
        old = bool(args.current) and f.namespace not in args.current
        first = (False, last_used[f.namespace], f.namespace) if old else (True, 0, "")
        return (*first, f.used // ONE_PROMPT_NS, -f.used)

    enough = for_limit <= 0 and for_floor <= 0
    files = [f for f in scan.files if f.temporary] if enough else sorted(scan.files, key=order)
    for f in files:
        reason = "limit" if for_limit > 0 else "floor" if for_floor > 0 else None
        if f.temporary:
            reason = "temporary" if now_ns - f.mtime > TEMP_AGE_NS else None
        if reason:
            victims.append((f, reason))
            for_limit -= f.size
            for_floor -= f.size if f.links == 1 else 0
    return victims, for_limit > 0 or for_floor > 0


def choose_damaged(scan: Scan, unsynced_since_ns: int | None) -> list[Victim]:
    """What a sweep removes: temporary, empty, of a wrong size, or perhaps never synced.

    The size is the one declared for the namespace, else the one that 90 % of a kind have (nine of
    ten files, so ten at least), else not judged.
    """
    sizes: dict[tuple[str, ...], Counter[int]] = defaultdict(Counter)
    for f in scan.files:
        if not f.temporary:
            sizes[f.kind][f.apparent] += 1
    expected: dict[tuple[str, ...], int | None] = {}
    for kind, found in sizes.items():
        size, count = found.most_common(1)[0]
        learned = size if count >= AGREEING * sum(found.values()) else None
        expected[kind] = scan.declared[kind[0]] or learned
    victims = []
    for f in scan.files:
        if f.temporary:
            victims.append((f, "temporary"))
        elif not f.apparent:
            victims.append((f, "empty"))
        elif expected[f.kind] not in (None, f.apparent):
            victims.append((f, "wrong size"))
        elif unsynced_since_ns is not None and f.mtime >= unsynced_since_ns:
            victims.append((f, "unsynced"))
    return victims


def unsynced_since(args: argparse.Namespace, scan: Scan) -> int | None:
    """Files written since this moment (ns) may not have reached the disk; None: all did.

    Only a stop of the whole machine loses what was not synced: a killed server leaves its pages
    with the kernel. A clean stop is taken to be followed by an orderly shutdown, which syncs.
    When it stopped is not known, but it still ran when the newest file was written, and when this
    program last wrote its status: reckoning from there removes rather more than less.
    """
    record = read_record(args.record)
    in_order = record.get("clean_stop") is True if record else True
    this_boot = record.get("boot_id") == boot_id()
    if (in_order and not args.unclean) or this_boot:
        return None
    newest = max((f.mtime for f in scan.files if f.mtime <= time.time_ns()), default=0)
    ran = max(newest, last_sign(args.status, record.get("boot_id")))
    return ran - int(args.unsynced_seconds * 10**9)


def last_sign(status: str | None, boot: object) -> int:
    """When (ns) `run` last wrote its status in the boot that ended; 0 if that is not known."""
    try:
        told = json.loads(read_small(status)) if status else {}
        at = int(float(told["time_unix"]) * 10**9) if told.get("boot_id") == boot else 0
    except NONSENSE:
        return 0  # the newest file is always a sign, too
    return at if boot is not None and at <= time.time_ns() else 0


def read_record(path: str | None) -> Status:
    """What launch.py wrote of the run that ended; empty if that is not known."""
    try:
        record = json.loads(read_small(path)) if path else {}
    except FileNotFoundError:
        return {}
    except NONSENSE as why:
        log(f"{path} cannot be read, taken as an unclean stop of another boot: {why}")
        return {"clean_stop": False}
    return record if isinstance(record, dict) else {"clean_stop": False}


def writeback_seconds() -> float:
    """When the kernel begins to write a dirty page, at the latest, and 25 s for the writing."""
    waits = ("dirty_expire_centisecs", "dirty_writeback_centisecs")
    return 25 + sum(float(Path("/proc/sys/vm", name).read_text()) for name in waits) / 100


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def mib(size: int) -> str:
    return f"{size / (1 << 20):,.1f} MiB"


def log(line: str) -> None:
    with contextlib.suppress(OSError):  # a log that cannot be written must not stop the pruning
        print(time.strftime("%Y-%m-%dT%H:%M:%S%z"), "pruner:", line, file=sys.stderr, flush=True)


class Pruner:
    """The passes of one process over one tier."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.policy, self.probed = args, "unknown", 0.0
        self.removed: dict[str, Counter[str]] = defaultdict(Counter)  # since the start

    def one_pass(self) -> Status:
        """Scan, remove what is too much, return the status. Raises Refused, Busy, OSError."""
        args, dry = self.args, self.args.dry_run
        with contextlib.ExitStack() as stack:
            tier = Tier(args.tier, stack)
            if "unknown" in self.policy or time.monotonic() - self.probed > PROBE_EVERY_S:
                self.policy, self.probed = tier.probe(), time.monotonic()
            began = time.monotonic()
            scan = tier.scan(self.policy, rearm=self.policy == REARMED and not dry)
            seconds = time.monotonic() - began
            if args.command == "sweep":
                victims, short = choose_damaged(scan, unsynced_since(args, scan)), False
            else:
                victims, short = choose(scan, args, time.time_ns())
            gone, errors = ([], {}) if dry else tier.remove(victims, self.policy)
            if args.command == "sweep" and not dry:
                tier.remove_empty([*above(gone), *scan.empty])
        freed = sum(f.size for f, _ in gone)
        for f, reason in gone:
            self.removed[reason].update(files=1, bytes=f.size)
        if gone or errors:
            why = ", ".join(f"{n} {reason}" for reason, n in Counter(r for _, r in gone).items())
            failed = "".join(f"; {n} not removed: {text}" for text, n in errors.items())
            usage = f"usage {mib(scan.usage)} -> {mib(scan.usage - freed)}"
            log(f"removed {len(gone)} files, {mib(freed)} ({why}); {usage}{failed}")
        namespaces = {name: {"files": 0, "bytes": 0} for name in scan.declared}
        for files, sign in ((scan.files, 1), ([f for f, _ in gone], -1)):
            for f in files:
                namespaces[f.namespace]["files"] += sign
                namespaces[f.namespace]["bytes"] += sign * f.size
        return {
            **{k: v for k, v in vars(args).items() if k not in ("command", "dry_run", "json")},
            "state": "errors" if errors else "over, and nothing left" if short else "ok",
            "time_unix": time.time(),
            "boot_id": boot_id(),
            "pid": os.getpid(),
            "policy": self.policy,
            "usage_bytes": scan.usage - freed,
            "apparent_bytes": sum(f.apparent for f in scan.files)
            - sum(f.apparent for f, _ in gone),
            "files": len(scan.files) - len(gone),
            "free_bytes": scan.free + freed,
            "namespaces": namespaces,
            "left_alone": scan.left_alone,
            "last_scan_seconds": round(seconds, 4),
            "removed": self.removed,
            "errors": errors,
            "would_remove": [{"reason": r, **f._asdict()} for f, r in victims] if dry else [],
        }


def close_to_a_limit(status: Status, pass_seconds: float, since: float) -> bool:
    """Whether a cheap look at free space says not to wait for the interval.

    What the filesystem lost since the scan may all have gone into the tier. A pass is repeated only
    after a pause that keeps it below half of the time, and not at all when nothing could be done.
    """
    if since < pass_seconds or status["state"] != "ok":
        return False
    try:
        free = free_bytes(status["tier"])
    except OSError:
        return True  # the next pass will say what is wrong
    usage = int(status["usage_bytes"]) + int(status["free_bytes"]) - free
    keep_free = int(status["free_floor_bytes"]) + int(status["headroom_bytes"])
    return usage > int(status["limit_bytes"]) * float(status["high"]) or free < keep_free


def run(args: argparse.Namespace) -> NoReturn:
    """Pass after pass until SIGTERM. A tier that goes away later (unmounted) is waited for."""
    pruner, said = Pruner(args), ""
    status: Status = {}
    while True:
        began = time.monotonic()
        try:
            status = pruner.one_pass()
        except (Refused, Busy, OSError) as why:
            if not status:
                raise  # a mistake of whoever starts it
            status = {**status, "state": f"stopped: {why}", "time_unix": time.time()}
        if status["state"] != said:
            said = status["state"]
            log(f"{said}; {status['policy']}; usage {mib(status['usage_bytes'])}")
        if args.status:
            try:
                new = Path(f"{args.status}.tmp")
                new.write_text(json.dumps(status, indent=1))
                new.replace(args.status)
            except OSError as why:  # a full disk is no reason to stop making room
                log(f"status not written: {why}")
        ended = time.monotonic()
        while time.monotonic() < max(began + args.interval, ended + POLL_S):
            time.sleep(POLL_S)
            if close_to_a_limit(status, ended - began, time.monotonic() - ended):
                break


def show(status: Status) -> None:
    """For people: what a dry run would remove, and the sums."""
    for v in status["would_remove"]:
        used = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(v["used"] / 1e9))
        print(f"{v['reason']:<10} {v['size']:>14,} {used}  {v['namespace']}/{v['name']}")
    if status["dry_run"]:
        size = sum(v["size"] for v in status["would_remove"])
        print(f"would remove {len(status['would_remove'])} files, {mib(size)}; nothing was changed")
    usage = f"{status['files']} files, {mib(status['usage_bytes'])}"
    left = "".join(f"; {n} left alone: {why}" for why, n in status["left_alone"].items())
    print(f"{status['state']}: {usage}; {status['policy']}{left}")


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line; exits with 2 when it makes no sense."""
    about = str(__doc__)
    parser = argparse.ArgumentParser(
        description=about.split("\n\n")[0], epilog=about[about.index("Exit codes") :]
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for command, text in (
        ("run", "prune at every interval until SIGTERM"),
        ("once", "one pass"),
        ("sweep", "remove damaged files, before the cache server starts"),
    ):
        sub = commands.add_parser(command, help=text, description=text)
        add = sub.add_argument
        add("--tier", required=True, help=f"directory that holds ns-*/ and {MARKER}")
        add("--current", action="append", default=[], help="namespace in use; repeatable")
        if command == "sweep":
            add("--unclean", action="store_true", help="the run before did not stop in order")
            add("--record", help="what launch.py wrote of that run (JSON: boot_id, clean_stop)")
            add("--status", help="what `run` wrote last: the machine still ran then")
            window = "what was written this shortly before an unclean stop goes (%(default)s)"
            add("--unsynced-seconds", type=float, default=writeback_seconds(), help=window)
        else:
            whole = "or all: what the filesystem has, without the floor"
            add("--limit-bytes", required=True, help=whole)
            add("--high", type=float, default=0.95, help="prune above limit x HIGH (%(default)s)")
            add("--low", type=float, default=0.85, help="prune to limit x LOW (%(default)s)")
            add("--free-floor-bytes", type=int, default=0, help="always left free (%(default)s)")
            early = "begin this early above the floor (5 %% of the limit, 16 MiB to 1 GiB)"
            add("--headroom-bytes", type=int, help=early)
        if command == "run":
            add("--interval", type=float, default=5.0, help="seconds (%(default)s)")
            add("--status", help="file to write the status to, as JSON")
            sub.set_defaults(dry_run=False)
        else:
            add("--dry-run", action="store_true", help="say it, change nothing")
            add("--json", action="store_true", help="print the status as JSON")
    args = parser.parse_args(argv)
    wrong = [f"--current {c}: not ns-<hex>" for c in args.current if not NAMESPACE.match(c)]
    if not Path(args.tier).is_absolute():
        wrong.append(f"--tier {args.tier}: not an absolute path")
    if args.command != "sweep":
        try:
            args.limit_bytes = limit_of(args)
        except (OSError, ValueError) as why:
            parser.error(f"--limit-bytes {args.limit_bytes}: {why}")
        if args.headroom_bytes is None:  # what a burst writes until a pass has answered it
            args.headroom_bytes = min(1 << 30, max(16 << 20, args.limit_bytes // 20))
        if not 0 < args.low < args.high <= 1:
            wrong.append(f"--low {args.low} --high {args.high}: need 0 < low < high <= 1")
        if args.limit_bytes <= 0 or args.free_floor_bytes < 0 or args.headroom_bytes < 0:
            wrong.append("--limit-bytes must be above 0, the other bytes not below")
    if args.command == "run" and not args.interval > 0:
        wrong.append(f"--interval {args.interval}: need more than 0 seconds")
    if wrong:
        parser.error("; ".join(wrong))
    return args


def main(argv: list[str] | None = None) -> int:
    """See the top for the exit codes."""
    args = parse(argv)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
    try:
        if args.command == "run":
            run(args)
        status = Pruner(args).one_pass()
    except Refused as why:
        log(f"refused: {why}")
        return 3
    except Busy as why:
        log(str(why))
        return 4
    if args.json:
        print(json.dumps(status, indent=1))
    else:
        show({**status, "dry_run": args.dry_run})
    return {"ok": 0, "errors": 1}.get(status["state"], 5)


if __name__ == "__main__":
    sys.exit(main())
