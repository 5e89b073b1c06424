#!/usr/bin/env python3
"""Answers many looks at a host in one go: looks.py REQUEST, and prints one JSON object on a line.

REQUEST is a file with gzipped JSON: {"asks": [["argv", WORD, …] | ["sent", SCRIPT, WORD, …] |
["file", PATH] | ["text", PATH], …], "lock": PATH of the run lock or null, "take": null or arguments
for runlock.py}. "sent" is a command too: a Python script that lies beside this one. With "take"
the run lock is taken first; if that fails, nothing is looked at. Nothing else is written.

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
import pwd
import runpy
import selectors
import stat
import subprocess
import sys
import traceback
import zlib
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))
AT_ONCE = 6
MOST_TEXT = 4 << 20
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


def in_fork(argv: list[str]) -> None:
    """In the child: a Python script as `python3 SCRIPT …` would run it. Never returns."""
    code = 1
    try:
        sys.argv = argv[1:]
        sys.path[0] = os.path.dirname(argv[1])
        runpy.run_path(argv[1], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if code and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except BaseException:  # what Python itself would print before it ends
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def start(argv: list[str]) -> tuple[int, int]:
    """(PID, end of the pipe that its outputs come through)."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid:
        os.close(theirs)
        return pid, ours
    try:  # whatever fails here, this child must not go on as its parent
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (theirs, 1), (theirs, 2)):
            os.dup2(source, target)
        os.close(ours)
        if argv[0] == "python3" and len(argv) > 1 and os.path.isfile(argv[1]):
            in_fork(argv)
        os.execvp(argv[0], argv)
    except BaseException as error:
        why = getattr(error, "strerror", None) or error
        os.write(2, f"{argv[:1]}: {why}\n".encode(errors="replace"))
    finally:
        os._exit(127)


def commands(argvs: list[list[str]]) -> list[Data]:
    """Outputs and exit codes, in the order of the commands; a few run at once."""
    answers: list[Data] = [{} for _ in argvs]
    waiting, texts = list(enumerate(argvs)), [b""] * len(argvs)
    sys.stdout.flush()  # or a child would print it again
    with selectors.DefaultSelector() as pipes:
        running: dict[int, tuple[int, int]] = {}
        while waiting or running:
            while waiting and len(running) < AT_ONCE:
                number, argv = waiting.pop(0)
                pid, pipe = start(argv)
                running[pipe] = (number, pid)
                pipes.register(pipe, selectors.EVENT_READ)
            for key, _ in pipes.select():
                pipe = key.fd
                number, pid = running[pipe]
                block = os.read(pipe, 1 << 16)
                texts[number] = (texts[number] + block)[-MOST_TEXT:]
                if block:
                    continue
                pipes.unregister(pipe)
                os.close(pipe)
                del running[pipe]
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                answers[number] = {"exit": code, "out": texts[number].decode(errors="replace")}
    return answers


def lock_of(path: str) -> Data:
    """Who holds the run lock (null: nobody), and whose run was the last that held it."""
    held, last = text_of(path), text_of(path + ".guard")
    told: Data = {"held": None, "last": last.get("text", "").strip()}
    if held["status"] != "absent":
        told["held"] = held.get("text") or held.get("why")
    return told


def argv_of(ask: list[str]) -> list[str]:
    if ask[0] == "argv":
        return ask[1:]
    return ["python3", os.path.join(HERE, ask[1]), *ask[2:]]


def look(asks: list[list[str]]) -> list[Any]:
    answers: list[Any] = [None] * len(asks)
    numbers = [number for number, ask in enumerate(asks) if ask[0] in ("argv", "sent")]
    told = commands([argv_of(asks[number]) for number in numbers])
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
    answers = look(asks)
    after = lock_of(lock) if lock is not None else {}
    told = {"answers": answers, "before": before, "lock": after}
    print(json.dumps(told, separators=(",", ":")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
