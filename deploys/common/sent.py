"""Scripts that travel with the command that runs them, and are gone when it ends."""

from __future__ import annotations

import base64
import io
import tarfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from kvhost import onhost
from kvhost.onhost import DRIVE_SCRIPTS

ONHOST = Path(str(onhost.__file__)).parent

#: looks.py, and what it imports or runs
LOOKS = ("looks.py", "forked.py", "runlock.py")


def report_scripts(argv: tuple[str, ...]) -> tuple[str, ...]:
    """report.py, and what it runs."""
    more = DRIVE_SCRIPTS if "--drives" in argv else ()
    if any(word.endswith(".gguf") for word in argv):
        more = (*more, "gguf.py")
    return ("report.py", "bounded.py", "forked.py", "report_held.py", "report_gpu.py", *more)


def sent(names: tuple[str, ...], words: str, files: Mapping[str, str] | None = None) -> str:
    """A command that brings scripts along, runs the first of them, and leaves nothing behind.

    ``words``: its arguments, quoted for the shell, which knows the scripts' directory as $d;
    ``files``: name -> base64 of further files in there.
    """
    more = "".join(
        f"base64 -d > \"$d/{name}\" <<'KVHOST-END'\n{text}KVHOST-END\n"
        for name, text in (files or {}).items()
    )
    return "\n".join(
        (
            "d=$(mktemp -d) || exit 1",
            f"base64 -d <<'KVHOST-END' | tar xzo -C \"$d\"\n{_as_text(names)}KVHOST-END",
            f'{more}python3 "$d/{names[0]}" {words} 2>&1; rm -rf "$d"',
        )
    )


@cache
def packed(names: tuple[str, ...]) -> bytes:
    """A tar archive, gzipped: an argument may have 128 KiB (Linux, MAX_ARG_STRLEN)."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as archive:
        for name in names:
            archive.add(ONHOST / name, name)
    return made.getvalue()


@cache
def _as_text(names: tuple[str, ...]) -> str:
    return base64.encodebytes(packed(names)).decode()
