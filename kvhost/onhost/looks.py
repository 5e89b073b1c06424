#!/usr/bin/env python3
"""Answers many looks at a host in one go: looks.py REQUEST, and prints one JSON object on a line.

REQUEST is a file with gzipped JSON: {"asks": [["argv", WORD, …] | ["user", USER, WORD, …] |
["sent", SCRIPT, WORD, …] | ["file", PATH] | ["text", PATH], …], "lock": PATH of the run lock or
null, "take": null or arguments for runlock.py}. "user" is a command run as that user, in an empty
environment, and "sent" a Python script that lies beside this one; with "apart": true those run
before all else. With "take" the run lock is taken first; if that fails, nothing is looked at.
Nothing else is written.

Of a command comes {"exit", "out"} (both outputs, as they came), of a file null when there is none,
else {"kind", "owner", "group", "mode", "sha256", "target"}, of a text {"status": ok, absent or
unreadable, "text" or "why"}. "lock" is what runlock.py keeps, after the looks, and "before" what it
kept before them: {"held", "last"}. Commands run side by side; a Python script is run in a fork of
this process, which is its start saved. Exit: 0; 1 the lock is held by another ("refused" says by
whom), 2 no usable request.
"""

from __future__ import annotations

import argparse
import grp
import gzip
import hashlib
import json
import os
import pathlib
import pwd
import shutil
import stat
import subprocess
import sys
import tempfile
import urllib.request
import zlib
from typing import TYPE_CHECKING, Any

sys.dont_write_bytecode = True
if TYPE_CHECKING:
    from kvhost.onhost.forked import MOST_TEXT, Command, commands
else:  # it lies beside this file
    from forked import MOST_TEXT, Command, commands

#: what several of the scripts load, so that it is loaded once, before the forks
LOADED = (pathlib, shutil, tempfile, urllib.request)
HERE = os.path.dirname(os.path.abspath(__file__))
Data = dict[str, Any]


def file_of(path: str) -> Data | None:
    """What lies at a path, links not followed; None if nothing does, or it cannot be looked at."""
    try:
        st = os.lstat(path)
        found: Data = {"kind": "other", "sha256": None, "target": None}
        found["mode"] = oct(stat.S_IMODE(st.st_mode))[2:]
        found["owner"], found["group"] = name_of(st.st_uid, True), name_of(st.st_gid, False)
        if stat.S_ISDIR(st.st_mode):
            found["kind"] = "directory"
        elif stat.S_ISLNK(st.st_mode):
            found.update(kind="link", target=os.readlink(path))
        elif stat.S_ISREG(st.st_mode):
            with open(path, "rb") as handle:
                found.update(kind="file", sha256=hashlib.sha256(handle.read()).hexdigest())
    except OSError:
        return None  # it is not as wanted, whatever it is
    return found


def name_of(number: int, user: bool) -> str:
    try:
        return pwd.getpwuid(number).pw_name if user else grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)


def text_of(path: str) -> Data:
    try:
        # O_NONBLOCK: a pipe in its place would be waited for
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), encoding="utf-8") as handle:
            about = os.fstat(handle.fileno())
            if not stat.S_ISREG(about.st_mode):
                raise ValueError("not a regular file")
            if about.st_size > MOST_TEXT:
                raise ValueError("larger than any that kvhost writes")
            return {"status": "ok", "text": handle.read()}
    except FileNotFoundError:
        return {"status": "absent", "why": "not there"}
    except (OSError, ValueError) as error:
        return {"status": "unreadable", "why": str(error)}


def lock_of(path: str) -> Data:
    """Who holds the run lock (null: nobody), and whose run was the last that held it."""
    held, last = text_of(path), text_of(path + ".guard")
    told: Data = {"held": None, "last": last.get("text", "").strip()}
    if held["status"] != "absent":
        told["held"] = held.get("text") or held.get("why")
    return told


def command_of(ask: list[str]) -> Command:
    if ask[0] == "argv":
        return ask[1:], None
    if ask[0] == "user":
        return ask[2:], ask[1]
    return ["python3", os.path.join(HERE, ask[1]), *ask[2:]], None


def look(asks: list[list[str]], apart: bool = False) -> list[Any]:
    """``apart``: what was sent along runs before all else, not beside it."""
    answers: list[Any] = [None] * len(asks)
    for kinds in (("sent",), ("argv", "user")) if apart else (("sent", "argv", "user"),):
        numbers = [number for number, ask in enumerate(asks) if ask[0] in kinds]
        told = commands([command_of(asks[number]) for number in numbers])
        for place, number in enumerate(numbers):
            answers[number] = told[place]
    for number, ask in enumerate(asks):
        if ask[0] == "file":
            answers[number] = file_of(ask[1])
        elif ask[0] == "text":
            answers[number] = text_of(ask[1])
    return answers


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("request", help="file with gzipped JSON")
    args = parser.parse_args()
    try:
        with gzip.open(args.request, "rt", encoding="utf-8") as handle:
            request = json.load(handle)
        asks, lock, take = request["asks"], request["lock"], request["take"]
    except (OSError, ValueError, KeyError, TypeError, EOFError, zlib.error) as error:
        print(f"looks: {args.request} is no request: {error}", file=sys.stderr)
        return 2
    if take is not None:
        try:
            os.makedirs(os.path.dirname(lock), exist_ok=True)
        except OSError as error:  # not exit 1: nobody holds it
            print(f"looks: the run lock {lock} cannot be used: {error}", file=sys.stderr)
            return 2
        script = os.path.join(HERE, "runlock.py")
        done = subprocess.run(
            [sys.executable, script, "take", *take], stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            print(json.dumps({"refused": done.stdout.strip() or f"exit {done.returncode}"}))
            return 1
    # without a lock: of an operation outside of a run (verify's, measure's)
    before = lock_of(lock) if lock is not None else {}
    answers = look(asks, request.get("apart", False))
    after = lock_of(lock) if lock is not None else {}
    told = {"answers": answers, "before": before, "lock": after}
    print(json.dumps(told, separators=(",", ":")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
