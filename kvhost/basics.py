"""What every command needs, in a module that imports nothing else: a start should cost nothing."""

from __future__ import annotations

import hashlib
import re
import stat
import sys
from pathlib import Path
from typing import Literal

API_KEY_VARIABLE = "KVHOST_API_KEY"
HF_TOKEN_VARIABLE = "HF_TOKEN"
SHARED_PASSWORD_VARIABLE = "KVHOST_SHARED_PASSWORD"
#: Names a file to which a run appends lines of JSON: host, and persisted and time once known.
SUMMARY_VARIABLE = "KVHOST_SUMMARY"

#: NO_BY_DESIGN: of a runner that keeps no KV on disk in any case, so that nothing is tested
Persisted = Literal["PASS", "FAIL", "INCONCLUSIVE", "NO_BY_DESIGN"]
EXIT_CODES: dict[Persisted, int] = {"PASS": 0, "FAIL": 1, "INCONCLUSIVE": 2, "NO_BY_DESIGN": 3}


def text_of(path: Path, most: int | None = None) -> str:
    """A file of UTF-8, of ``most`` bytes. Raises OSError, also for what is no file (a pipe would be
    waited for) or too large, and UnicodeDecodeError."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(f"{path} is not a regular file")
    if most is None:
        return path.read_text(encoding="utf-8")
    with path.open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(f"{path} has more than {most} bytes")
    return data.decode("utf-8")


def lenient_output() -> None:
    """What a terminal's encoding does not have is printed escaped: in a locale without UTF-8 a
    table would end the command, or the run."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)  # None, or a stand-in: no such thing
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")


def up_command(copy: Path) -> str:
    """What provisions from this working copy: one that `kvhost init` made has no bin/."""
    return "bin/up" if (copy / "bin/up").is_file() else "kvhost up"


def counted(count: int, noun: str) -> str:
    """A count with its noun, which takes an s.

    >>> counted(1, "drive"), counted(0, "drive")
    ('1 drive', '0 drives')
    """
    return f"{count} {noun}" + ("" if count == 1 else "s")


def printable(text: str) -> str:
    """Text for a terminal: what would steer it (escape codes, directions of writing) is replaced.

    >>> printable("a\\x1b[31mb")
    'a\ufffd[31mb'
    """
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)


def host_folder(host: str) -> str:
    """A file name for a host's name: odd characters become "_", then a digest keeps hosts apart.

    >>> host_folder("@local"), host_folder("web-1.example")
    ('_local-e2d84095', 'web-1.example')
    """
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", host):
        return host
    plain = re.sub(r"[^A-Za-z0-9._-]", "_", host)[:90]
    return f"{plain}-{hashlib.sha256(host.encode()).hexdigest()[:8]}"
