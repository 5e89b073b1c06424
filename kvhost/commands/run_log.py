"""The log of each run of pyinfra: logs/TIME-COMMAND.log of the working copy, 0600, the newest kept.

Secrets are masked although none should come this way: by their known values, however they are
written, and by their shapes.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

from kvhost.basics import API_KEY_VARIABLE, HF_TOKEN_VARIABLE, SHARED_PASSWORD_VARIABLE
from kvhost.onhost.masking import SECRET_TEXT

#: logs of more runs than this are removed, the oldest first
KEPT = 50
_MASK = "********"
#: what well-known secrets look like, whole; kvhost/schema/problems.py only has to tell them
_SHAPES = re.compile(
    r"(?<![A-Za-z0-9])(?:hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|gh[pousr]_[A-Za-z0-9]{20,}"
    r"|github_pat_\w+|AKIA[0-9A-Z]{12,}|eyJ[A-Za-z0-9_-]{8,}\.[\w.-]*)"
    r"|(?<=PYINFRA_SUDO_PASSWORD=)('[^']*'|\S+)"
)
_SHORTEST = 4  # a shorter "secret" would mask half of the log
_SHORTEST_LINE = 8  # of a secret of several, which a log has one by one
_BLANK = r"(?:\s|\\[nrt]|%0[9AaDd]|%20|\+)+"
_hidden: set[str] = set()


class Mask:
    """Takes secrets out of lines: known ones, and with ``shapes`` what looks like one."""

    def __init__(self, values: Iterable[str] = (), *, shapes: bool = True) -> None:
        self._shapes = shapes
        known = {value.strip() for value in values}
        lines = {line.strip() for value in known for line in value.splitlines()}
        known |= {line for line in lines if len(line) >= _SHORTEST_LINE}
        longest_first = sorted((v for v in known if len(v) >= _SHORTEST), key=len, reverse=True)
        self._known = re.compile("|".join(map(_written, longest_first))) if longest_first else None

    def __call__(self, line: str) -> str:
        if self._known:
            line = self._known.sub(_MASK, line)
        if not self._shapes:
            return line
        line = _SHAPES.sub(_MASK, line)
        for pattern, keep in SECRET_TEXT:
            line = pattern.sub(keep + _MASK, line)
        return line


def _written(secret: str) -> str:
    """A pattern of it as it is, in a URL, in JSON, in a shell's quotes, its lines joined."""
    parts = re.split(r"(\s+)", secret)
    return "".join(_BLANK if part.isspace() else "".join(map(_char, part)) for part in parts)


def _char(one: str) -> str:
    if one.isascii() and one.isalnum():
        return one
    percent = "".join(f"%{byte:02X}" for byte in one.encode(errors="replace"))
    escaped = json.dumps(one)[1:-1]
    code = f"\\u{ord(one):04x}"
    ways = {
        percent,
        percent.lower(),
        escaped,
        code,
        code.upper().replace("U", "u"),
        "\\" + one,
        one,
    }
    ways |= {"'\"'\"'", "'\\''"} if one == "'" else set()
    return f"(?:{'|'.join(re.escape(way) for way in sorted(ways, key=len, reverse=True))})"


def hide(secrets: Iterable[str]) -> None:
    """From now on this process knows these, for what it keeps (see `of_process`)."""
    _hidden.update(secrets)


def of_process(env: Mapping[str, str]) -> Mask:
    """A mask of all secrets that this process knows of."""
    return Mask([*_hidden, *secrets_of_env(env)])


def secrets_of_env(env: Mapping[str, str]) -> list[str]:
    """Values of the variables that kvhost reads secrets from."""
    names = (API_KEY_VARIABLE, HF_TOKEN_VARIABLE, SHARED_PASSWORD_VARIABLE)
    return [env[name] for name in names if env.get(name)]


class Sink:
    """A stream of lines that may end before the run does: a full disk, `| head`, no terminal.

    Who writes to it goes on: a run that stopped there would leave hosts half done, and their
    locks taken. `broken` says why nothing more is written.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self.broken: Exception | None = None

    def write(self, text: str) -> None:
        if self._stream is None or self.broken is not None:
            return
        try:
            self._stream.write(_writable(text, self._stream))
            self._stream.flush()
        except (OSError, ValueError) as error:  # ValueError: it is closed
            self.broken = error

    def close(self) -> None:
        try:
            if self._stream is not None:
                self._stream.close()
        except OSError as error:  # what it still held
            self.broken = self.broken or error


def _writable(text: str, stream: TextIO) -> str:
    """As far as the stream's encoding goes."""
    encoding = stream.encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def open_log(folder: Path, what: str) -> tuple[Path, TextIO]:
    """A new log, and the oldest ones removed. Raises OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    time = datetime.now(UTC).strftime("%Y-%m-%dT%H%M%SZ")
    path = folder / f"{time}-{re.sub(r'[^a-z_]', '', what)}-{os.getpid()}.log"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    for old in sorted(folder.glob("????-??-??T??????Z-*.log"))[:-KEPT]:
        old.unlink(missing_ok=True)
    return path, os.fdopen(descriptor, "w", encoding="utf-8", errors="replace")
