"""`kvhost drives`: all drives of all hosts, and what kvhost thinks of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvhost.basics import counted
from kvhost.drives.claim import claim
from kvhost.drives.claim_match import mismatches, sizes
from kvhost.drives.claim_reasons import IN_USE
from kvhost.drives.claim_table import drive_lines
from kvhost.drives.types import Drive, Drives
from kvhost.onhost.drive_probe import NEVER
from kvhost.plan.view import plain
from kvhost.settings import Settings


def opinion(settings: Settings, drives: Drives, drive: Drive) -> tuple[str, str]:
    """What kvhost thinks of a drive: a word (with its style in rich), and why."""
    device = drive.device
    kinds = {finding.kind for finding in drive.findings}
    if device is None or (drive.status != "ok" and not kinds & NEVER):
        return "not readable", "magenta"
    if settings.claims_a_drive and not mismatches(settings, device):
        found = claim(settings, drives)
        for one in found.claimed:
            if one.drive == drive:
                return f"claimed: {one.action}", "bold green"
        return f"claimed, refused ({', '.join(r.code for r in found.refusals)})", "bold red"
    if device.kvhost is not None:
        return "kvhost's own", "green"
    if kinds & IN_USE:
        return "in use", "yellow"
    if kinds & NEVER:
        return "not usable", "red"
    if kinds:
        return "holds something", "yellow"
    return "no header on it", "green"


def render_drives(hosts: Mapping[str, tuple[Settings, Drives | str]]) -> RenderableType:
    """One table a host; a text in the place of drives says why there are none."""
    parts: list[RenderableType] = []
    for host, (settings, drives) in hosts.items():
        if isinstance(drives, str):
            parts.append(Text(plain(f"{host}: drives not readable: {drives}"), "bold red"))
            continue
        table = Table(title=f"{host}: {counted(len(drives.drives), 'drive')}", title_justify="left",
                      title_style="bold", box=None, padding=(0, 2, 0, 0))  # fmt: skip
        for name in ("drive", "what it is", "what kvhost thinks, and why"):
            table.add_column(name, overflow="fold")
        for drive in drives.drives:
            table.add_row(*_row(settings, drives, drive))
        parts += [table, Text()]
    parts.append(Text("To claim one: drive_by_id = the path in /dev/disk/by-id, in the data of its "
                      "host. Headers were read, not whole drives."))  # fmt: skip
    return Group(*parts)


def _row(settings: Settings, drives: Drives, drive: Drive) -> tuple[Text, Text, Text]:
    device = drive.device
    word, style = opinion(settings, drives, drive)
    thinks = Text(word, style)
    thinks.append(plain(f"\n{drive_lines(drive)}"), "dim")
    if device is None:
        return Text("?"), Text("?"), thinks
    what = [device.model or "no model", f"serial {device.serial or 'none'}"]
    what.append(f"{sizes(device.size_bytes)}, {device.transport}")
    if device.health.data:
        what.append(f"{device.health.data.percentage_used} % worn")
    what.append(device.by_id or (f"wwn {device.wwn}" if device.wwn else "no link in by-id"))
    return Text(device.path), Text(plain("\n".join(what))), thinks


def drives_to_json(hosts: Mapping[str, tuple[Settings, Drives | str]]) -> dict[str, Any]:
    """Host -> {"status", "why", "machine_id", "drives": [… with "opinion"]}."""
    told: dict[str, Any] = {}
    for host, (settings, drives) in hosts.items():
        if isinstance(drives, str):
            told[host] = {"status": "unreadable", "why": drives, "machine_id": None, "drives": []}
            continue
        rows = [
            {**drive.model_dump(mode="json"), "opinion": opinion(settings, drives, drive)[0]}
            for drive in drives.drives
        ]
        told[host] = {"status": "ok", "why": None, "machine_id": drives.machine_id, "drives": rows}
    return told
