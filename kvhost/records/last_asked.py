"""What the last run asked a host, kept by the controller: runs/asked/HOST.json.

The next run asks it as soon as the host is connected to, while it still loads what it needs to tell
what it must ask. It decides nothing: of the answers, those count whose question is asked again.
Paths and commands that only look; no secret.

Commands of it run as root, so a file counts only with the seal of this user, made by a run: an
HMAC with a key that lies outside of the working copy, in the user's cache directory.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import stat
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from kvhost.basics import host_folder

#: a run's questions are some 10 KB
MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class LastAsked:
    """``report``: arguments of onhost/report.py; ``looks``: as onhost/looks.py takes them."""

    report: tuple[str, ...]
    looks: tuple[tuple[str, ...], ...]
    lock: str


def path_of(runs: Path, host: str) -> Path:
    return runs / "asked" / f"{host_folder(host)}.json"


def load(runs: Path, host: str) -> LastAsked | None:
    """None where there is none, or it is of no use: then nothing is asked ahead."""
    path = path_of(runs, host)
    try:
        data = json.loads(_own_file(path, MOST_BYTES))
        looks = tuple(tuple(map(str, look)) for look in data["looks"])
        asked = LastAsked(tuple(map(str, data["report"])), looks, str(data["lock"]))
        sealed = hmac.compare_digest(
            str(data["seal"]), _seal(path, asked, _own_file(key_path(), 64))
        )
        return asked if sealed else None
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None


def keep(runs: Path, host: str, asked: LastAsked) -> None:
    """Writes it, if it is another than the one there. Raises OSError."""
    if load(runs, host) == asked:
        return
    path = path_of(runs, host)
    _write(path, json.dumps({**asdict(asked), "seal": _seal(path, asked, _key())}).encode())


def key_path() -> Path:
    """Of the seal's key: where only this user writes."""
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "kvhost/asked.key"


def _key() -> bytes:
    """Made at random where there is none of use; another run's at once costs one that is slower."""
    with contextlib.suppress(OSError, ValueError):
        key = _own_file(key_path(), 64)
        if len(key) >= 32:
            return key
    key = secrets.token_bytes(32)
    _write(key_path(), key)
    return key


def key_id() -> str | None:
    """Tells this user's cache from others', one on a copy of this machine too, and tells nothing of
    the key. None where none can be kept."""
    try:
        return hmac.new(_key(), b"controller", "sha256").hexdigest()[:32]
    except (OSError, RuntimeError):  # it takes none, or there is no home directory
        return None


def _seal(path: Path, asked: LastAsked, key: bytes) -> str:
    """Of what was asked, and of its place: another host's, or another working copy's, is none."""
    if len(key) < 32:
        raise ValueError("no key")
    text = json.dumps([str(path.resolve()), asdict(asked)])
    return hmac.new(key, text.encode(), "sha256").hexdigest()


def _own_file(path: Path, most: int) -> bytes:
    """Of a regular file, no link, of this user, that no other can write to. Raises OSError,
    ValueError."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # a pipe is not waited for
    with os.fdopen(handle, "rb") as file:
        about = os.fstat(handle)
        if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & 0o022:
            raise ValueError(f"{path} is not this user's own file")
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"{path} is too large")
    return data


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
