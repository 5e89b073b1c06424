"""The log of each run of pyinfra: logs/TIME-COMMAND.log of the working copy, 0600, the newest kept.

Secrets are masked although none should come this way: by their known values and by their shapes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

from kvhost.basics import API_KEY_VARIABLE, HF_TOKEN_VARIABLE, SHARED_PASSWORD_VARIABLE

#: logs of more runs than this are removed, the oldest first
KEPT = 50
_MASK = "********"
#: what well-known secrets look like, whole; kvhost/schema/problems.py only has to tell them
_SHAPES = re.compile(
    r"(?<![A-Za-z0-9])(?:hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|gh[pousr]_[A-Za-z0-9]{20,}"
    r"|github_pat_\w+|AKIA[0-9A-Z]{12,}|eyJ[A-Za-z0-9_-]{8,}\.[\w.-]*)"
    r"|(?<=[Bb]earer )\S+|(?<=PYINFRA_SUDO_PASSWORD=)('[^']*'|\S+)"
    r"|(?<=://)[^\s/@:]*:[^\s@]+(?=@)"
)
_SHORTEST = 4  # a shorter "secret" would mask half of the log


class Mask:
    """Takes secrets out of lines."""

    def __init__(self, values: Iterable[str] = ()) -> None:
        known = sorted({v for v in values if len(v) >= _SHORTEST}, key=len, reverse=True)
        self._known = re.compile("|".join(map(re.escape, known))) if known else None

    def __call__(self, line: str) -> str:
        if self._known:
            line = self._known.sub(_MASK, line)
        return _SHAPES.sub(_MASK, line)


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
