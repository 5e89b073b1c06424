"""`kvhost drift` and `kvhost rebuild`: is a host still what it was, and is it again what it was?"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from kvhost.basics import counted, printable
from kvhost.commands.care import ask_all
from kvhost.commands.up import INTERRUPTED, Runner
from kvhost.records import receipts
from kvhost.schema.problems import nearest

SAME, ERROR, DRIFT = 0, 1, 2
_CODES = {"same": SAME, "unreadable": ERROR, "drift": DRIFT}


def drift(run: Runner, inventory: str, args: tuple[str, ...], *, as_json: bool) -> int:
    """Exit code: 0 all hosts are as they should be; 2 one is not; 1 one could not be looked at."""
    code, answers, silent = ask_all(run, inventory, "deploys/drift.py", args, {})
    if code == INTERRUPTED:
        return code
    found: dict[str, Any] = {
        name: {"status": "unreadable", "rows": [], "unreadable": [why]}
        for name, why in silent.items()
    }
    for told in answers:
        found[told.pop("host")] = told
    if as_json:
        click.echo(json.dumps(found, indent=1))
    else:
        show(found)
    codes = {_CODES[host["status"]] for host in found.values()}
    if not found or ERROR in codes:
        return ERROR
    return max(codes)


def show(found: dict[str, Any]) -> None:
    console, table = Console(), Table()
    for name in ("host", "part", "what", "should be", "is"):
        table.add_column(name, overflow="fold", no_wrap=name in ("part", "what"))
    lines: list[str] = []
    width = max(16, (console.width - 40) // 2)
    for host, told in found.items():
        for row in told["rows"]:
            path = at_slashes(row["what"], width)
            cells = (host, row["part"], path, row["wanted"], row["found"])
            table.add_row(*map(printable, cells))
        for why in told["unreadable"]:
            lines.append(f"{host}: not known: {why}")
    if table.row_count:
        console.print(table)
    for line in lines:
        click.echo(printable(line))
    for host, told in found.items():
        count = counted(len(told["rows"]), "difference")
        what = {"same": "no drift", "drift": f"DRIFT, {count}"}
        click.echo(f"{printable(host)}: {what.get(told['status'], 'COULD NOT BE COMPARED')}")
    if not found:
        click.echo("no host was asked: see above")


def at_slashes(text: str, width: int) -> str:
    """A path on lines of ``width``, each ending behind a slash: a name of a file is never cut.

    >>> at_slashes("/var/lib/kvhost/etc/vllm.yaml", 20)
    '/var/lib/kvhost/etc/\\nvllm.yaml'
    """
    lines = [""]
    for piece in re.split("(?<=/)", text):
        if lines[-1] and len(lines[-1] + piece) > width:
            lines.append("")
        lines[-1] += piece
    return "\n".join(lines)


def rebuild(host: str, up: Callable[[tuple[str, ...]], int], args: tuple[str, ...]) -> int:
    """Provisions a host and compares its receipt with the one kept of it: of before the first
    rebuild, where one before this came to no end or to another host.

    Exit code: 0 equal; 2 it is up, but not what it was; else that of `up`.
    """
    folder = receipts.receipts_dir()
    aside = receipts.aside_of(folder, host)
    give_up = f"rm {shlex.quote(str(aside))}"
    before = _before(folder, host, give_up)
    if before is None:
        return ERROR
    again = os.path.lexists(aside)
    try:
        if not again:
            receipts.set_aside(folder, host)
    except OSError as error:
        click.echo(f"the receipt cannot be set aside, and nothing was done: {error}")
        return ERROR
    try:
        code = up(("--limit", host, *args))
    except (click.exceptions.Exit, click.ClickException):  # wrong arguments: nothing was done
        if not again:
            aside.unlink()  # the receipt itself is where it was
        raise
    if code:
        click.echo(
            f"{printable(host)}: not rebuilt, see above; kvhost rebuild goes on from here, and "
            f"compares with what it was ({aside})"
        )
        return code
    try:
        after = receipts.load(folder, host)
    except receipts.NoReceipt as why:
        click.echo(str(why))
        return ERROR
    differing = receipts.differences(before.receipt, after.receipt)
    if not differing:
        aside.unlink()
        click.echo(f"{printable(host)}: rebuilt, its receipt equals that of {before.time}")
        return SAME
    table = Table()
    for name in ("key", f"receipt of {before.time}", "rebuilt"):
        table.add_column(name, overflow="fold")
    for key, old, new in differing:
        table.add_row(*map(printable, (key, str(old)[:80], str(new)[:80])))
    Console().print(table)
    click.echo(
        f"{printable(host)}: rebuilt, but its receipt differs in "
        f"{counted(len(differing), 'place')}. What it was stays in {aside}, and is what the next "
        f"kvhost rebuild compares with. To take the host as it is now:\n  {give_up}"
    )
    return DRIFT


def _before(folder: Path, host: str, give_up: str) -> receipts.Kept | None:
    """What the host was; None, with the reason told, if that is not known."""
    if os.path.lexists(receipts.aside_of(folder, host)):
        try:
            before = receipts.load_aside(folder, host)
        except receipts.NoReceipt as why:
            click.echo(
                f"{why}. It is what the host was before a rebuild that is not over: nothing was "
                f"done. To compare with the receipt of the last run instead:\n  {give_up}"
            )
            return None
        click.echo(
            f"{printable(host)}: a rebuild before this one is not over; compared is with what the "
            f"host was at {before.time}. To compare with the last run instead:\n  {give_up}"
        )
        return before
    try:
        return receipts.load(folder, host)
    except receipts.NoReceipt as why:
        meant = nearest(host, [path.stem for path in folder.glob("*.json")])
        hint = f" Did you mean {printable(meant)}?" if meant and meant != host else ""
        click.echo(
            f"{why}: there is nothing to compare a rebuilt host with. kvhost up makes one.{hint}"
        )
        return None
