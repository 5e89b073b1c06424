"""All drives of all hosts, looked at and shown; what a model asks of one. Nothing is changed."""

from __future__ import annotations

from typing import Any

from pyinfra import context, host
from rich.console import Console

from deploys.common.context import Visit
from deploys.common.facts import DrivesText
from deploys.common.prepare import all_settings
from deploys.common.refused import refused
from deploys.common.settled import model_need, settled
from kvhost.commands.asking import answer, question
from kvhost.drives.types import Drives
from kvhost.drives.view import drives_to_json, render_drives
from kvhost.plan.restored import restored
from kvhost.report import ReportError, parse_drives
from kvhost.settings import Settings

_seen: dict[str, tuple[Settings, Drives | str]] = {}


def look_at_drives() -> None:
    """One host's drives; with the last host, those of all are printed."""
    settings = all_settings()[host.name]
    argv = ("--mount", settings.resolved_drive_mount, "--state", settings.paths.state)
    try:
        _seen[host.name] = (settings, parse_drives(host.get_fact(DrivesText, argv=argv)))
    except ReportError as why:
        _seen[host.name] = (settings, str(why))
        refused(name="drives: not looked at", why=str(why))
    answer(host.name, {"drives": drives_to_json({host.name: _seen[host.name]})[host.name]})
    if question().get("json") or len(_seen) < len(context.state.inventory.get_active_hosts()):
        return
    # stderr: stdout is pyinfra's --json
    Console(stderr=True).print(render_drives(_seen))


def asked_of(at: Visit) -> dict[str, Any]:
    """What the runner would read of the drive for a prompt (kvhost/plan/restored.py)."""
    need = model_need(at.settings, at.report)
    settings = at.settings if need is None else settled(at.settings, at.report).settings
    return restored(settings, need)
