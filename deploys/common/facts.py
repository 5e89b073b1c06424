"""Facts that fail closed: each answers {"status": "ok"|"unreadable", "data", "why"}, never {}.

pyinfra's own facts return their default when a program is missing or fails, which then looks like
"nothing there". Here a part that could not be read says so.
"""

from __future__ import annotations

import base64
import io
import json
import re
import shlex
import tarfile
from pathlib import Path
from typing import Any

from pyinfra.api import FactBase
from typing_extensions import override

from kvhost import onhost
from kvhost.onhost import DRIVE_SCRIPTS

ONHOST = Path(str(onhost.__file__)).parent

#: what vLLM loads as a module: they lie in lib/ on the host
LIBRARY = (ONHOST / "kvhost_guard.py", ONHOST / "kvhost_connector.py")


def scripts() -> list[Path]:
    """The scripts that lie in bin/ on the host."""
    return sorted(path for path in ONHOST.glob("[a-z]*.py") if path not in LIBRARY)


_FAILED = "KVHOST-EXIT:"


def unreadable(why: str) -> dict[str, Any]:
    return {"status": "unreadable", "why": why, "data": None}


class CommandJson(FactBase[dict[str, Any]]):
    """Runs a command that prints one JSON value as its last line."""

    @override
    def command(self, argv: tuple[str, ...]) -> str:
        # a failing command must still give an answer, or pyinfra would fail the host or default
        return f"{shlex.join(argv)} 2>&1 || echo {_FAILED}$?"

    @staticmethod
    @override
    def default() -> dict[str, Any]:
        return unreadable("the command could not be run")

    @override
    def process(self, output: list[str]) -> dict[str, Any]:
        lines = [line for line in output if line.strip()]
        if not lines:
            return unreadable("it printed nothing")
        if lines[-1].startswith(_FAILED):
            why = " | ".join(lines[-4:-1]) or "no output"
            return {**unreadable(why[:600]), "exit": int(lines[-1][len(_FAILED) :])}
        try:
            return {"status": "ok", "why": None, "data": json.loads(lines[-1])}
        except ValueError:
            return unreadable(f"not JSON: {lines[-1][:200]}")


class JsonFile(FactBase[dict[str, Any]]):
    """A JSON file on the host; status "absent" when it is known not to be there."""

    @override
    def command(self, path: str) -> str:
        quoted = shlex.quote(path)
        return f"if [ -e {quoted} ]; then cat {quoted} || echo {_FAILED}; else echo {_FAILED}0; fi"

    @staticmethod
    @override
    def default() -> dict[str, Any]:
        return unreadable("the file could not be asked for")

    @override
    def process(self, output: list[str]) -> dict[str, Any]:
        text = "\n".join(output)
        if text.strip() == f"{_FAILED}0":
            return {"status": "absent", "why": "not there", "data": None}
        try:
            return {"status": "ok", "why": None, "data": json.loads(text)}
        except ValueError:
            return unreadable(f"not JSON: {text[:200]}")


class HostReportText(FactBase[str]):
    """What onhost/report.py prints, in one round trip; the scripts travel with the command."""

    @override
    def command(self, argv: tuple[str, ...]) -> str:
        more = DRIVE_SCRIPTS if "--drives" in argv else ()
        return _sent(("report.py", "report_held.py", "report_gpu.py", *more), argv)

    @staticmethod
    @override
    def default() -> str:
        return ""


class DrivesText(FactBase[str]):
    """What onhost/report_drives.py prints, in one round trip."""

    @override
    def command(self, argv: tuple[str, ...]) -> str:
        return _sent(DRIVE_SCRIPTS, argv)

    @staticmethod
    @override
    def default() -> str:
        return ""


class DriftText(FactBase[str]):
    """What onhost/drift_look.py prints, in one round trip; it and what it needs travel along."""

    @override
    def command(self, ask: str) -> str:
        return _sent(with_siblings("drift_look.py"), ("--ask", ask))

    @staticmethod
    @override
    def default() -> str:
        return ""


class DriveCheck(FactBase[str]):
    """What `onhost/drive_apply.py check` prints, of the controller's copy."""

    @override
    def command(self, order: str, state: str) -> str:
        words = ("check", "--state", state, "--order-text", order)
        return _sent(with_siblings("drive_apply.py"), words)

    @staticmethod
    @override
    def default() -> str:
        return ""


def with_siblings(name: str) -> tuple[str, ...]:
    """A script, and the others of kvhost/onhost that it imports, directly or through one."""
    names = [name]
    for one in names:
        imported = re.findall(r"(?m)^ *(?:from|import) (\w+)", (ONHOST / one).read_text())
        more = [f"{module}.py" for module in imported if (ONHOST / f"{module}.py").exists()]
        names += [found for found in dict.fromkeys(more) if found not in names]
    return tuple(names)


def _sent(names: tuple[str, ...], argv: tuple[str, ...]) -> str:
    """A command that brings scripts along, runs the first of them, and leaves nothing behind."""
    # packed: one argument of a command may have 128 KiB (Linux, MAX_ARG_STRLEN)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name in names:
            archive.add(ONHOST / name, name)
    text = base64.encodebytes(packed.getvalue()).decode()
    return "\n".join(
        (
            "d=$(mktemp -d) || exit 1",
            f"base64 -d <<'KVHOST-END' | tar xzo -C \"$d\"\n{text}KVHOST-END",
            f'python3 "$d/{names[0]}" {shlex.join(argv)} 2>&1; rm -rf "$d"',
        )
    )
