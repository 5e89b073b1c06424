"""A part of what is told of a host, and how it is read; report.py says what its statuses mean.

For the scripts beside this that look at a host. None of it changes anything.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvhost.onhost.bounded import run as bounded
else:  # it lies beside this file
    from bounded import run as bounded

ROOT = Path("/")  # tests put a directory with its own proc, sys and etc here
Data = dict[str, Any]


class Absent(Exception):
    """What was asked for is known not to be there."""


def part(read_it: Callable[[], Any]) -> Data:
    """One part of the report; whatever goes wrong in it becomes its reason."""
    try:
        return {"status": "ok", "why": None, "data": read_it()}
    except Absent as why:
        return {"status": "absent", "why": str(why), "data": None}
    except Exception as why:  # the reason is handed on; the other parts must still be read
        return {"status": "unreadable", "why": f"{type(why).__name__}: {why}", "data": None}


def gather(parts: dict[str, Callable[[], Any]], timeout_s: float) -> Data:
    """All parts, each in a thread of its own: a mount that hangs costs its part, not the run."""
    late = f"did not answer within {timeout_s:g} s"
    found: Data = {n: {"status": "unreadable", "why": late, "data": None} for n in parts}

    def fill(name: str) -> None:
        found[name] = part(parts[name])

    threads = [threading.Thread(target=fill, args=(name,), daemon=True) for name in parts]
    for thread in threads:
        thread.start()
    end = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return dict(found)


def st(path: Path, follow: bool = True) -> os.stat_result | None:
    """stat(), None only when nothing is there: no permission and link loops are errors."""
    try:
        return path.stat() if follow else path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None


def is_dir(path: Path) -> bool:
    found = st(path)
    return found is not None and stat.S_ISDIR(found.st_mode)


def host(*parts: str) -> Path:
    return ROOT.joinpath(*parts)


def read(*parts: str) -> str:
    return host(*parts).read_text(errors="replace")


def listing(path: Path) -> list[Path]:
    if not is_dir(path):
        if st(path, follow=False) is None:
            raise Absent(f"{path} does not exist")
        raise ValueError(f"{path} is not a directory")
    return sorted(path.iterdir())


def json_file(path: Path) -> Any:
    """The JSON in a file of at most 4 MiB, no link. Raises Absent, OSError, ValueError."""
    found = st(path, follow=False)
    if found is None:
        raise Absent(f"{path} does not exist")
    if not stat.S_ISREG(found.st_mode) or found.st_size > 4 << 20:
        raise ValueError(f"{path} is not a regular file of at most 4 MiB")
    try:
        return json.loads(path.read_text())
    except ValueError as why:
        raise ValueError(f"{path} is not JSON: {why}") from None


def tree_size(top: Path) -> Data:
    """Files, bytes and newest mtime below a directory; links are never followed."""
    files, size, newest = 0, 0, 0.0
    todo = [str(top)]
    while todo:
        with os.scandir(todo.pop()) as entries:
            for entry in entries:
                try:
                    found = entry.stat(follow_symlinks=False)
                except FileNotFoundError:  # pruned under our hands
                    continue
                if stat.S_ISDIR(found.st_mode):
                    todo.append(entry.path)
                elif stat.S_ISREG(found.st_mode):
                    files, size = files + 1, size + found.st_size
                    newest = max(newest, found.st_mtime)
    return {"files": files, "bytes": size, "newest_mtime": newest or None}


def run(argv: list[str], uid: int | None = None, gids: list[int] | None = None) -> tuple[int, str]:
    """Exit code and stdout of a program, as another user when ``uid`` is given (root only)."""
    more: Data = {} if uid is None else {"user": uid}
    if uid is not None and gids:
        more.update(group=gids[0], extra_groups=gids)
    got = bounded(argv, 15, stderr=subprocess.DEVNULL, cwd="/", **more)
    return got.code, got.out
