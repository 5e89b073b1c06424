#!/usr/bin/env python3
"""Runs commands side by side, for looks.py and report.py, which this lies beside.

A Python script is run in a fork of this process, which saves its start; so begin before the first
thread. By hand: forked.py WORD… runs one command and prints {"exit", "out"} as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import pkgutil
import pwd
import runpy
import selectors
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Any

#: runpy loads it when it runs something, which another user may not be able to
LOADED = pkgutil
AT_ONCE = 6
#: bytes; of a longer output the end is kept
MOST_TEXT = 4 << 20
Data = dict[str, Any]
#: argv, and the user that it is run as; None: this one. In quotes: Python 3.9 has no "|" of types
Command = tuple[Sequence[str], "str | None"]


def _as_python_would(argv: Sequence[str]) -> None:
    """In the child: a script as `python3 SCRIPT …` would run it. Never returns."""
    code = 1
    try:
        sys.argv = list(argv[1:])
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


def become(user: str) -> None:
    """For good, with this user's groups and an empty environment. Raises OSError, KeyError."""
    entry = pwd.getpwnam(user)
    os.initgroups(user, entry.pw_gid)
    os.setresgid(entry.pw_gid, entry.pw_gid, entry.pw_gid)
    os.setresuid(entry.pw_uid, entry.pw_uid, entry.pw_uid)
    os.environ.clear()


class Running:
    """A command that has been started. Its two outputs come through ``pipe``."""

    def __init__(self, argv: Sequence[str], user: str | None = None) -> None:
        self.text, self.argv = b"", list(argv)
        self.answer: Data | None = None
        sys.stdout.flush()  # or the child would print it again
        self.pipe, theirs = os.pipe()
        self.pid = os.fork()
        if self.pid:
            os.close(theirs)
            return
        try:  # whatever fails here, this child must not go on as its parent
            nothing = os.open(os.devnull, os.O_RDONLY)
            for source, target in ((nothing, 0), (theirs, 1), (theirs, 2)):
                os.dup2(source, target)
            os.close(self.pipe)
            if user is not None:
                become(user)
            if argv[0] == "python3" and len(argv) > 1 and os.path.isfile(argv[1]):
                _as_python_would(argv)
            os.execvp(argv[0], list(argv))
        except BaseException as error:
            why = getattr(error, "strerror", None) or error
            os.write(2, f"{list(argv[:1])}: {why}\n".encode(errors="replace"))
        finally:
            os._exit(127)

    def read(self) -> bool:
        """What has come; whether that was the end."""
        block = os.read(self.pipe, 1 << 16)
        self.text = (self.text + block)[-MOST_TEXT:]
        if block:
            return False
        os.close(self.pipe)
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self.answer = {"exit": code, "out": self.text.decode(errors="replace")}
        return True


def wait(running: Sequence[Running], until: float | None = None) -> None:
    """Until at least one has ended. At ``until`` (time.monotonic) those that run are killed.

    Then they are not waited for: what waits for a dead drive does not end. Raises TimeoutError.
    """
    with selectors.DefaultSelector() as pipes:
        for one in running:
            pipes.register(one.pipe, selectors.EVENT_READ, one)
        while True:
            left = None if until is None else max(0.0, until - time.monotonic())
            ready = pipes.select(left)
            if not ready and left == 0.0:
                for one in running:
                    os.kill(one.pid, signal.SIGKILL)
                raise TimeoutError("did not answer in time")
            ended = [key.data.read() for key, _ in ready]
            if any(ended):
                return


def commands(asked: Sequence[Command]) -> list[Data]:
    """{"exit", "out"} of each, in their order; a few run at once."""
    begun: list[Running] = []
    while True:
        running = [one for one in begun if one.answer is None]
        while len(begun) < len(asked) and len(running) < AT_ONCE:
            begun.append(Running(*asked[len(begun)]))
            running.append(begun[-1])
        if not running:
            return [one.answer or {} for one in begun]
        wait(running)


def said(one: Running, until: float) -> str:
    """Last line of a script, once it has ended well. Raises OSError with what it said else."""
    while one.answer is None:
        wait([one], until)
    lines = [line for line in one.answer["out"].splitlines() if line.strip()] or ["no output"]
    if one.answer["exit"]:
        raise OSError(f"{os.path.basename(one.argv[1])} exits {one.answer['exit']}: {lines[-1]}")
    return str(lines[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("word", nargs=argparse.REMAINDER, help="the command and its arguments")
    print(json.dumps(commands([(parser.parse_args().word, None)])[0]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
