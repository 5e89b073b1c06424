#!/usr/bin/env python3
"""Moves some KV files into a namespace of their own beside theirs, and puts them back.

    evidence_aside.py move --namespace DIR      names on stdin, a JSON list; prints where they went
    evidence_aside.py put-back --namespace DIR
    evidence_aside.py heal --tier DIR           whatever a test that is dead has left moved

The place is the journal: what lies in a directory that holds .kvhost-aside.json belongs into the
namespace that this file names, whoever moved it. Each file is one rename: a crash leaves it in
one of the two places. `heal` runs before the cache server starts and before each test; it leaves
alone what a living process of this machine, or another machine, has moved. Runs as the service's
user. Prints JSON: {"files", "put_back", "left", "place"}. Exit: 0, or 1 with the error on stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import sys
from typing import Any

JOURNAL = ".kvhost-aside.json"
Json = dict[str, Any]


def place_of(namespace: str) -> str:
    """The other namespace: its name is as kvhost gives them, a server could read it by mistake."""
    top, name = os.path.split(os.path.normpath(namespace))
    digest = hashlib.sha256(f"moved aside from {name}".encode()).hexdigest()
    return os.path.join(top, f"ns-{digest[:24]}")


def machine_id() -> str:
    for path in ("/etc/machine-id", "/proc/sys/kernel/random/boot_id"):
        with contextlib.suppress(OSError), open(path, encoding="ascii") as handle:
            return handle.read().strip()
    return "unknown"


def start_ticks(pid: int) -> int | None:
    """Field 22 of the process's stat (proc(5)); None when there is none, or only its zombie."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as handle:
            fields = handle.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def move(namespace: str, names: list[str], pid: int) -> Json:
    """``pid``: of the test for which this is; it is dead when that process is. Raises OSError."""
    place = place_of(namespace)
    with contextlib.suppress(OSError):
        os.rmdir(place)  # of a test that died before it wrote its journal
    os.mkdir(place, 0o700)  # one test at a time: fails when another has moved files
    journal = {
        "home": os.path.basename(os.path.normpath(namespace)),
        "pid": pid,
        "start_ticks": start_ticks(pid),
        "machine_id": machine_id(),
    }
    with open(os.path.join(place, JOURNAL), "w", encoding="utf-8") as handle:
        json.dump(journal, handle)
        handle.flush()
        os.fsync(handle.fileno())
    moved = 0
    for name in names:
        target = os.path.join(place, name)
        os.makedirs(os.path.dirname(target), 0o700, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # pruned
            os.rename(os.path.join(namespace, name), target)
            moved += 1
    return {"files": moved, "put_back": 0, "left": 0, "place": place}


def put_back(place: str, home: str) -> Json:
    """Every file of ``place`` to ``home``, over what was written there anew. Raises OSError."""
    found: Json = {"files": 0, "put_back": 0, "left": 0, "place": place}
    for folder, _, names in os.walk(place):
        for name in names:
            path = os.path.join(folder, name)
            if path == os.path.join(place, JOURNAL):
                continue
            found["files"] += 1
            target = os.path.join(home, os.path.relpath(path, place))
            try:
                os.makedirs(os.path.dirname(target), 0o700, exist_ok=True)
                os.rename(path, target)
                found["put_back"] += 1
            except OSError as error:
                found["left"] += 1
                print(f"{path} cannot be put back: {error}", file=sys.stderr)
    if not found["left"]:
        for folder, _, names in os.walk(place, topdown=False):
            for name in names:  # the journal; last, so that a crash here is healed again
                os.unlink(os.path.join(folder, name))
            os.rmdir(folder)
    return found


def heal(tier: str) -> Json:
    """Puts back what dead tests of this machine have moved. Raises OSError."""
    total: Json = {"files": 0, "put_back": 0, "left": 0, "place": None}
    with os.scandir(tier) as entries:
        places = [e.path for e in entries if e.name.startswith("ns-") and not e.is_symlink()]
    for place in places:
        try:
            with open(os.path.join(place, JOURNAL), encoding="utf-8") as handle:
                journal = json.load(handle)
            name, pid = str(journal["home"]), int(journal["pid"])
            if "/" in name or name in ("", ".", ".."):
                raise ValueError(f"not a namespace: {name!r}")
        except FileNotFoundError:
            continue
        except (OSError, ValueError, KeyError, TypeError) as error:
            print(f"{place}: its journal is not usable: {error}", file=sys.stderr)
            total["left"] += 1
            continue
        ticks = start_ticks(pid)
        if journal.get("machine_id") != machine_id():
            continue
        if ticks is not None and ticks == journal.get("start_ticks"):
            continue  # the test goes on
        found = put_back(place, os.path.join(tier, name))
        for key in ("files", "put_back", "left"):
            total[key] += found[key]
        total["place"] = place
    return total


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sub = parser.add_subparsers(dest="command", required=True)
    for command in ("move", "put-back"):
        sub.add_parser(command).add_argument("--namespace", required=True)
    sub.add_parser("heal").add_argument("--tier", required=True)
    sub.choices["move"].add_argument("--pid", type=int, required=True)
    args = parser.parse_args()
    try:
        if args.command == "move":
            found = move(args.namespace, json.load(sys.stdin), args.pid)
        elif args.command == "put-back":
            place = place_of(args.namespace)
            nothing = {"files": 0, "put_back": 0, "left": 0, "place": place}
            found = put_back(place, args.namespace) if os.path.isdir(place) else nothing
        else:
            found = heal(args.tier)
    except (OSError, ValueError) as error:
        print(f"evidence_aside: {error}", file=sys.stderr)
        return 1
    print(json.dumps(found))
    # a server is not kept from starting by files that cannot be put back
    return 1 if found["left"] and args.command != "heal" else 0


if __name__ == "__main__":
    sys.exit(main())
