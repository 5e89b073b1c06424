"""Facts that fail closed: each answers {"status": "ok"|"unreadable", "data", "why"}, never {}.

pyinfra's own facts return their default when a program is missing or fails, which then looks like
"nothing there". Here a part that could not be read says so.
"""

from __future__ import annotations

import json
import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

from pyinfra.api import FactBase
from typing_extensions import override

from deploys.common.sent import ONHOST, report_scripts, sent
from kvhost.onhost import DRIVE_SCRIPTS

#: what vLLM and LMCache load as a module: they lie in lib/ on the host
LIBRARY = tuple(
    ONHOST / f"kvhost_{name}.py"
    for name in ("guard", "connector", "offload", "shared", "store", "resp", "s3")
)


@cache
def scripts() -> tuple[Path, ...]:
    """The scripts that lie in bin/ on the host."""
    return tuple(sorted(path for path in ONHOST.glob("[a-z]*.py") if path not in LIBRARY))


@cache
def script_text(path: Path) -> str:
    """Of one of those, or of LIBRARY: read once in a run, not once for each host."""
    return path.read_text(encoding="utf-8")


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


class HostReportText(FactBase[str]):
    """What onhost/report.py prints, in one round trip; the scripts travel with the command."""

    @override
    def command(self, argv: tuple[str, ...]) -> str:
        return sent(report_scripts(argv), shlex.join(argv))

    @staticmethod
    @override
    def default() -> str:
        return ""


class DrivesText(FactBase[str]):
    """What onhost/report_drives.py prints, in one round trip."""

    @override
    def command(self, argv: tuple[str, ...]) -> str:
        return sent(DRIVE_SCRIPTS, shlex.join(argv))

    @staticmethod
    @override
    def default() -> str:
        return ""


class DriftText(FactBase[str]):
    """What onhost/drift_look.py prints, in one round trip; it and what it needs travel along."""

    @override
    def command(self, ask: str) -> str:
        return sent(with_siblings("drift_look.py"), shlex.join(("--ask", ask)))

    @staticmethod
    @override
    def default() -> str:
        return ""


class DriveCheck(FactBase[str]):
    """What `onhost/drive_apply.py check` prints, of the controller's copy."""

    @override
    def command(self, order: str, state: str) -> str:
        words = ("check", "--state", state, "--order-text", order)
        return sent(with_siblings("drive_apply.py"), shlex.join(words))

    @staticmethod
    @override
    def default() -> str:
        return ""


def with_siblings(name: str) -> tuple[str, ...]:
    """A script, and the others of kvhost/onhost that it imports, directly or through one."""
    names = [name]
    for one in names:
        imported = re.findall(r"(?m)^ *(?:from|import) (\w+)", (ONHOST / one).read_text("utf-8"))
        more = [f"{module}.py" for module in imported if (ONHOST / f"{module}.py").exists()]
        names += [found for found in dict.fromkeys(more) if found not in names]
    return tuple(names)
