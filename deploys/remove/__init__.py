"""Stage remove: what a host is told that it loses, and the loss itself."""

from __future__ import annotations

import re
import shlex
from typing import Any

from pyinfra import host
from pyinfra.api import FunctionCommand, operation
from rich.console import Console
from rich.table import Table

from deploys.common.context import Visit
from deploys.common.facts import CommandJson
from deploys.common.operations import Commands, shown
from deploys.common.sent import ONHOST
from deploys.common.since import note, removal_unnoted
from kvhost.basics import printable
from kvhost.plan.types import size


def argv(at: Visit, *more: str) -> tuple[str, ...]:
    """The script travels with the command: it removes the directory that it would lie in."""
    words = ("--base", at.paths.base_dir, "--tier", at.paths.tier_dir, "--user", at.user, *more)
    words += ("--scripts", ",".join(path.name for path in sorted(ONHOST.glob("[a-z]*.py"))))
    words += ("--caches",) if at.settings.remove_cache else ()
    words += ("--models",) if at.settings.remove_models else ()
    text = (ONHOST / "uninstall.py").read_text(encoding="utf-8")
    return ("sh", "-c", f"python3 - {shlex.join(words)} <<'KVHOST-END'\n{text}\nKVHOST-END")


def look(at: Visit) -> Any:
    return host.get_fact(CommandJson, argv=argv(at, "--check"))


def what_stays(at: Visit) -> dict[str, str]:
    """Of what only is removed when asked: setting -> what of it is there, in a directory of
    kvhost's; {} where that cannot be told."""
    base = at.report.kvhost.data.base if at.report.kvhost.data else None
    if base is None or base.data is None or base.data.owner != "kvhost":
        return {}
    answer = look(at)
    lines = answer["data"]["stays"] if answer["status"] == "ok" else []
    ends = {name: f" ({name})" for name in ("remove_cache", "remove_models")}
    return {
        name: line.removesuffix(end)
        for name, end in ends.items()
        for line in lines
        if line.endswith(end)
    }


def show_removal(at: Visit) -> bool | None:
    """Prints what would go and what would stay; whether anything would. None if it may not."""
    console = Console(stderr=True)
    base = at.report.kvhost.data.base if at.report.kvhost.data else None
    if base is None or base.status == "unreadable" or (base.data and base.data.owner == "foreign"):
        why = "is not kvhost's" if base and base.data else "could not be read"
        console.print(f"{at.host}: {at.paths.base_dir} {why}: nothing is removed", style="red")
        return None
    if base.data is None or base.data.owner != "kvhost":
        console.print(f"{at.host}: nothing of kvhost is at {at.paths.base_dir}")
        return False
    answer = look(at)
    if answer["status"] != "ok":
        console.print(f"{at.host}: {printable(str(answer['why']))}", style="red")
        return None
    data = answer["data"]
    table = Table(title=f"{at.host}: what is removed")
    table.add_column("goes", overflow="fold")
    table.add_column("size")
    for row in data["remove"]:
        table.add_row(printable(row["path"]), size(row["bytes"]))
    if data["user"]:
        table.add_row(f"the user {at.user}", "")
    if data["remove"] or data["user"]:
        console.print(table)
    for line in data["stays"]:
        line = re.sub(r" \((remove_\w+)\)$", r" (--data \1=true removes it)", printable(line))
        console.print(f"  stays: {line}", highlight=False, soft_wrap=True)
    goes = bool(data["remove"] or data["user"])
    if not goes and data["stays"]:
        console.print(f"{at.host}: kvhost itself is removed already; what stays is above")
    elif not goes:
        console.print(f"{at.host}: nothing of kvhost is at {at.paths.base_dir}")
    return goes


@operation()
def remove(at: Visit) -> Commands:
    """Stops the services and removes what is kvhost's.

    + at: the host
    """
    answer = look(at)
    if answer["status"] == "ok" and not answer["data"]["remove"] and not answer["data"]["user"]:
        yield from _note_if_lacking(at)
        return
    yield shown(f"{shlex.join(argv(at))} > /dev/null")
    yield FunctionCommand(noted, (), {})


def noted(state: Any, host: Any) -> bool:
    """That the host was removed is kept where its verdicts are."""
    return note(host, "removed")


def lacks_note(at: Visit) -> bool:
    """Whether an earlier removal was not noted: the link was lost, a disk was full."""
    return removal_unnoted(at.host, at.paths.base_dir)


def _note_if_lacking(at: Visit) -> Commands:
    if lacks_note(at):
        yield FunctionCommand(noted, (), {})


@operation()
def nothing(at: Visit) -> Commands:
    """No change: there is nothing to remove. A removal that was not noted is noted now.

    + at: the host
    """
    yield from _note_if_lacking(at)
