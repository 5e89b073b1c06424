"""Commands that look after a provisioned host: its logs, and parts of its cache to be removed."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvhost.basics import counted, printable
from kvhost.commands import asking, options
from kvhost.commands.up import Runner, limits
from kvhost.plan.types import size
from kvhost.records import journal


def ask(
    run: Runner, inventory: str, deploy: str, args: tuple[str, ...], question: dict[str, Any]
) -> tuple[int, list[dict[str, Any]]]:
    """Exit code of the deploy, and the answers of the hosts that gave one."""
    with tempfile.TemporaryDirectory() as folder:  # 0700
        os.environ.update(asking.environment(question, folder))
        try:
            code = run(inventory, deploy, ("-y", *args))
        finally:
            for name in (asking.QUESTION, asking.ANSWERS):
                os.environ.pop(name, None)
        return code, asking.answers(folder)


def ask_all(
    run: Runner, inventory: str, deploy: str, args: tuple[str, ...], question: dict[str, Any]
) -> tuple[int, list[dict[str, Any]], dict[str, str]]:
    """As ask(), and host -> why of each that was asked and gave no answer, in the fleet's order."""
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder, "journal")
        os.environ[journal.VARIABLE] = str(kept)
        try:
            code, found = ask(run, inventory, deploy, args, question)
        finally:
            os.environ.pop(journal.VARIABLE, None)
        rows = journal.read_journal(kept).rows if kept.exists() else {}
    answered = {one["host"] for one in found}
    silent = {name: _silence(row) for name, row in rows.items() if name not in answered}
    return code, found, silent


def told_as_json(
    run: Runner,
    inventory: str,
    deploy: str,
    args: tuple[str, ...],
    key: str,
    question: Mapping[str, Any] | None = None,
) -> int:
    """Prints one object, host -> what it answered under ``key``, {"unreadable": [why]} for those
    that gave no answer. Exit code: that of the deploy."""
    asked = {"json": True, **(question or {})}
    code, found, silent = ask_all(run, inventory, deploy, args, asked)
    told = {name: {"unreadable": [why]} for name, why in silent.items()}
    click.echo(json.dumps(told | {one["host"]: one[key] for one in found}))
    return code


def _silence(row: journal.Row) -> str:
    if row.result != "unreachable":
        return "it gave no answer" + (f": {row.why}" if row.why else "")
    return "it could not be reached" + (f": {row.why}" if row.why else "")


_SERVICE = r"cache|runner(-[a-z][a-z0-9]*)?|slots|pruner|ollama|supervisord"


def service_names(given: tuple[str, ...]) -> tuple[str, ...]:
    """Names of services as they are, whichever runners a host has. Raises click.BadParameter."""
    for name in given:
        if not re.fullmatch(_SERVICE, name):
            raise click.BadParameter(
                f"{name!r} is none of cache, runner, runner-NAME, slots, pruner, ollama, "
                "supervisord"
            )
    return given


def purge_question(
    namespace: str | None, model: str | None, tenant: str | None, no_tenant: bool
) -> dict[str, str]:
    """What is to go. A salt becomes its digest here. Raises click.UsageError."""
    if tenant is not None and no_tenant:
        raise click.UsageError("--tenant and --no-tenant exclude each other")
    if tenant == "-":
        try:
            tenant = click.prompt("cache_salt of the tenant", hide_input=True)
        except click.Abort:
            if options.terminal():
                raise
            why = "--tenant -: no terminal to ask on, and no cache_salt on stdin"
            raise click.ClickException(f"nothing was removed: {why}") from None
    if tenant == "":
        raise click.UsageError("--tenant: an empty cache_salt is --no-tenant")
    digest = hashlib.sha256(os.fsencode(tenant)).hexdigest() if tenant is not None else None
    what = {"namespace": namespace, "model": model, "tenant_sha256": "-" if no_tenant else digest}
    return {key: value for key, value in what.items() if value is not None}


def purge(
    run: Runner, inventory: str, args: tuple[str, ...], what: dict[str, str], *, yes: bool
) -> int:
    """Shows what would go, asks, removes it. Without ``what`` it only shows what lies there."""
    console = Console()
    code, found = ask(run, inventory, "deploys/purge.py", args, {"verb": "look", **what})
    if code or not found:
        return code or 1
    total = sum(host["files"] for host in found)
    if any(host["rows"] for host in found):
        console.print(purge_table(found))
    elif not any(host.get("tier", True) is None for host in found):
        console.print(
            "No files of the cache are that; kvhost purge alone shows what there is."
            if what
            else "The cache holds no files."
        )
    for host in found:
        if host.get("tier", True) is None:
            console.print(f"{host['host']}: there is no cache yet: nothing lies in its place")
    if not what:
        return 0
    # without files there may still be memory: chunks that the pruner took from the disk
    restarts = [host["host"] for host in found if host["restarts"]]
    for host in found:
        if host.get("shared_why"):
            console.print(f"{host['host']}: the shared tier: {printable(host['shared_why'])}")
    shared = max((host.get("shared") or 0 for host in found), default=0)
    if not total and not restarts and not shared:
        unknown = any(host.get("shared_why") for host in found)
        console.print("nothing was removed" if unknown else "There is nothing to remove.")
        return int(unknown)
    if shared:
        console.print(
            f"{counted(shared, 'key')} of the tier that hosts share, for all of them. What other "
            "hosts hold themselves stays until this is done on them too."
        )
    if total:
        console.print(
            f"{counted(total, 'file')}, {size(sum(host['bytes'] for host in found))}. "
            f"{'It is' if total == 1 else 'They are'} unlinked, not "
            "overwritten: copies in backups and snapshots, and blocks on the disk, stay."
        )
    if restarts:
        why = "their memory holds KV too" if total else "their memory may hold it without a file"
        console.print(
            f"Cache server (where there is one) and runner of {', '.join(restarts)} are restarted, "
            f"because {why}: requests in work are lost."
        )
    if not yes and not options.agreed("Remove it?"):
        return 1
    todo = [
        host["host"]
        for host in found
        if host["files"] or host["restarts"] or host.get("shared") or host.get("shared_why")
    ]
    if len(todo) < len(found):  # a host that has nothing of it is left alone
        args = (*journal.drop_limits(args), *limits(todo))
    code, gone = ask(run, inventory, "deploys/purge.py", args, {"verb": "remove", **what})
    for host in gone:
        files = counted(host["files"], "file")
        more = (
            f", {counted(host['shared'], 'key')} of the shared tier" if host.get("shared") else ""
        )
        console.print(f"{host['host']}: removed {files}, {size(host['bytes'])}{more}")
    return code or int(len(gone) != len(todo))


def purge_table(found: list[dict[str, Any]]) -> Table:
    table = Table()
    for name in ("host", "namespace", "model", "tenant", "files", "size"):
        # namespace and model are what --namespace and --model ask for: never cut
        table.add_column(name, no_wrap=name == "namespace", overflow="fold")
    for host in found:
        for row in host["rows"]:
            tenant = row["tenant"]
            current = "\n(in use)" if row["namespace"] == host["current"] else ""
            table.add_row(
                host["host"],
                row["namespace"] + current,
                escape(printable(model_of(row))),
                {None: "?", "-": "none"}.get(tenant, f"sha256 {str(tenant)[:12]}…"),
                str(row["files"]),
                size(row["bytes"]),
            )
    return table


def model_of(row: dict[str, Any]) -> str:
    """What a row is of: the model, or of slots that were saved before it was noted its weights."""
    if row["model"]:
        return str(row["model"])
    return f"weights {row['weights'][:12]}…" if row.get("weights") else "?"


def logs(
    run: Runner, inventory: str, words: tuple[str, ...], asked: dict[str, Any], *, as_json: bool
) -> int:
    """Words before the first option are hosts. Exit code: that of the deploy."""
    first = next((n for n, word in enumerate(words) if word.startswith("-")), len(words))
    hosts = [arg for name in words[:first] for arg in ("--limit", name)]
    options = (*hosts, *words[first:])
    if as_json:
        return told_as_json(run, inventory, "deploys/logs.py", options, "services", asked)
    code, found = ask(run, inventory, "deploys/logs.py", options, asked)
    for host in found:
        show_logs(host["host"], host["services"])
    return code


def show_logs(host: str, services: dict[str, Any]) -> None:
    """Why services failed, their errors with the newest on top, and then the last lines."""
    for name, row in services.items():
        if row["failed"]:
            click.echo(f"{host} {name}: FAILED: {printable(failed_words(row))}")
    every = [(name, block) for name, row in services.items() for block in row["errors"]]
    for name, block in sorted(every, key=lambda item: item[1]["time"] or "", reverse=True):
        click.echo(f"{host} {name}: error at {block['time'] or 'an unknown time'}")
        for line in block["lines"]:
            click.echo(f"  {printable(line)}")
    for name, row in services.items():
        if not row.get("begun", True):
            click.echo(f"{host} {name}: not started yet, nothing is in {row['source']}")
            continue
        click.echo(
            f"{host} {name}: the last {counted(len(row['lines']), 'line')} of {row['source']}"
        )
        for line in row["lines"]:
            click.echo(f"  {printable(line)}")


def failed_words(row: dict[str, Any]) -> str:
    """Why a service failed, when, and whether it runs now, as far as its host tells (an older one
    tells the first).

    >>> failed_words({"failed": "it ended", "failed_time": "2026-11-29 10:00:00", "runs": True})
    'it ended (at 2026-11-29 10:00:00; it runs again now)'
    """
    more = [f"at {row['failed_time']}"] if row.get("failed_time") else []
    if row.get("runs") is not None:
        more.append("it runs again now" if row["runs"] else "it does not run now")
    return str(row["failed"]) + (f" ({'; '.join(more)})" if more else "")
