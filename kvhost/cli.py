"""The command `kvhost`. What reaches a host is a pyinfra deploy; this only wraps it.

Exit codes: every command's --help ends with its own (kvhost/commands/options.py). 1 is a refusal or
a failure, 2 wrong usage or "cannot tell", 130 broken off.
"""

from __future__ import annotations

import errno
import importlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from kvhost import __version__
from kvhost.basics import EXIT_CODES, SUMMARY_VARIABLE, lenient_output, printable
from kvhost.commands import up as cli_up
from kvhost.commands.options import (
    DONE,
    MORE,
    MORE_ASKED,
    PASS_ALL,
    VERDICTS,
    hosts_and_passed_on,
    inventory_option,
    no_dry,
    passed_on,
    passed_on_really,
    unasked,
)
from kvhost.commands.run import pyinfra as pyinfra  # the modules of LAZY take it from here
from kvhost.records import journal

#: commands whose modules are imported only when they are asked for: a run starts at once
LAZY = {
    "bundle": ("kvhost.commands.bundle", "bundle_command"),
    "drives": ("kvhost.commands.drives", "drives"),
    "init": ("kvhost.commands.fleet", "init"),
    "inventory": ("kvhost.commands.fleet", "inventory_group"),
    "lock": ("kvhost.commands.matrix", "lock_command"),
    "matrix": ("kvhost.commands.matrix", "matrix_command"),
    "model": ("kvhost.commands.model", "model_command"),
    "monitoring": ("kvhost.commands.monitoring", "monitoring_group"),
    "remove": ("kvhost.commands.remove", "remove_command"),
    "report": ("kvhost.commands.report", "report"),
    "shared": ("kvhost.commands.shared", "shared_command"),
    "size": ("kvhost.commands.size", "size_command"),
    "status": ("kvhost.commands.verify", "status"),
    "verify": ("kvhost.commands.verify", "verify"),
}


#: what an OSError says of this machine, and not of a fault in kvhost
_OF_THE_MACHINE = frozenset(
    {errno.EACCES, errno.EDQUOT, errno.EIO, errno.EISDIR, errno.ELOOP, errno.EMFILE}
    | {errno.ENAMETOOLONG, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.ENOTDIR}
    | {errno.EPERM, errno.EROFS, errno.ESTALE}
)


#: of more hosts it is not told where the API of each answers
FEW = 4


class Commands(click.Group):
    """The commands of this module, and those of LAZY. A full or read-only disk is one line."""

    def invoke(self, ctx: click.Context) -> Any:
        lenient_output()
        try:
            return super().invoke(ctx)
        except OSError as error:
            if error.errno not in _OF_THE_MACHINE:
                raise
            raise click.ClickException(str(error)) from error

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *LAZY})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in LAZY:
            return super().get_command(ctx, cmd_name)
        module, name = LAZY[cmd_name]
        found: click.Command = getattr(importlib.import_module(module), name)
        return found


@click.group(
    cls=Commands, context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Every command tells its exit codes: kvhost COMMAND --help.",
)  # fmt: skip
@click.version_option(__version__)
def main() -> None:
    """Hosts whose KV cache provably survives a restart."""


@main.command(context_settings=PASS_ALL, epilog=f"{VERDICTS} {MORE}")
@inventory_option
@click.option(
    "--batch", type=click.IntRange(min=1), help="As many hosts at a time, the next once all pass."
)
@click.option("--canary", metavar="HOST|N", help="This host, or the first N, before all others.")
@click.option(
    "--wait", "wait_s", type=click.IntRange(0, 86_400), default=0, help="Seconds between batches."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object at the end, on stdout.")
@passed_on
def up(
    inventory: str,
    batch: int | None,
    canary: str | None,
    wait_s: int,
    as_json: bool,
    pyinfra_args: tuple[str, ...],
) -> None:
    """Provision, test, and show the verdict.

    With --batch or --canary: one plan over all, then a part of the hosts after the other; it stops
    as soon as one of them is not PASS, and the rest is left as it was (docs/fleets.md).
    --dry changes nothing: the plan, and what operations there would be.
    """

    def one(args: tuple[str, ...]) -> int:
        return run_and_tell(inventory, "deploy.py", args)

    if "--dry" in pyinfra_args:
        if as_json:
            raise click.UsageError("--json is of a run; what one would do: kvhost plan --json")
        sys.exit(one(pyinfra_args))
    rolling = cli_up.Rolling(batch, canary, wait_s)
    if not as_json:
        sys.exit(cli_up.up(pyinfra, one, inventory, pyinfra_args, rolling).code)
    with cli_up.stdout_kept() as stdout:
        ended = cli_up.up(pyinfra, one, inventory, pyinfra_args, rolling)
        stdout.write(cli_up.as_json(ended) + "\n")
    sys.exit(ended.code)


@main.command(context_settings=PASS_ALL, epilog=MORE_ASKED)
@inventory_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object, host -> what differs.")
@passed_on
def drift(inventory: str, as_json: bool, pyinfra_args: tuple[str, ...]) -> None:
    """What is no longer as it was made.

    Each host is compared with its settings, its lock and the last run's receipt. Changes nothing.
    Exit: 0 no drift; 2 drift, or wrong usage; 1 a host could not be reached or looked at; 130
    broken off.
    """
    from kvhost.commands import drift as cli_drift

    sys.exit(cli_drift.drift(pyinfra, inventory, pyinfra_args, as_json=as_json))


@main.command(context_settings=PASS_ALL, epilog=MORE_ASKED)
@inventory_option
@click.argument("host")
@passed_on
def rebuild(inventory: str, host: str, pyinfra_args: tuple[str, ...]) -> None:
    """Provision a fresh machine in HOST's place.

    Then its receipt is compared with what HOST was: with the one of before the first rebuild, until
    it is equal.
    Exit: 0 its receipt equals the one kept; 2 it differs, or wrong usage; 1, 2 or 130 as of up if
    that failed.
    """
    no_dry(
        pyinfra_args, "--dry rebuilds nothing; what a run would do: kvhost up --dry --limit HOST"
    )

    def up_one(args: tuple[str, ...]) -> int:
        typed = ("rebuild", "--inventory", inventory, host, *pyinfra_args)
        return cli_up.up(pyinfra, one, inventory, args, cli_up.Rolling(), typed).code

    def one(args: tuple[str, ...]) -> int:
        return run_and_tell(inventory, "deploy.py", args)

    from kvhost.commands import drift as cli_drift

    sys.exit(cli_drift.rebuild(host, up_one, pyinfra_args))


@main.command(context_settings=PASS_ALL, epilog=MORE_ASKED)
@inventory_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object, host -> plan.")
@passed_on
def plan(inventory: str, as_json: bool, pyinfra_args: tuple[str, ...]) -> None:
    """What a run would do, what it costs, every reason not to.

    Changes nothing. The table goes to stderr, --json to stdout; a host that gave no report is in
    it with "unreadable". Exit: 0; 1 if a host is refused or not reached; 2 wrong usage; 130 broken
    off.
    """
    if not as_json:
        sys.exit(pyinfra(inventory, "deploys/plan.py", ("-y", *pyinfra_args)))
    from kvhost.commands import care as cli_care

    sys.exit(cli_care.told_as_json(pyinfra, inventory, "deploys/plan.py", pyinfra_args, "plan"))


@main.command(context_settings=PASS_ALL, epilog=f"{DONE} {MORE}")
@inventory_option
@passed_on
def storage(inventory: str, pyinfra_args: tuple[str, ...]) -> None:
    """Format and mount the claimed drive, without an engine."""
    sys.exit(pyinfra(inventory, "storage.py", unasked(pyinfra_args)))


@main.command(context_settings=PASS_ALL, epilog=f"{DONE} {MORE}")
@inventory_option
@passed_on
def release(inventory: str, pyinfra_args: tuple[str, ...]) -> None:
    """Stop the services, give the drive back.

    Its data stay on it, until it is wiped with a token (docs/drives.md).
    """
    sys.exit(pyinfra(inventory, "release.py", unasked(pyinfra_args)))


@main.command(context_settings=PASS_ALL, epilog=f"{DONE} {MORE}")
@inventory_option
@passed_on
def grow(inventory: str, pyinfra_args: tuple[str, ...]) -> None:
    """Use all of a disk that became larger."""
    sys.exit(pyinfra(inventory, "grow.py", unasked(pyinfra_args)))


@main.command(context_settings=PASS_ALL, epilog=MORE_ASKED)
@inventory_option
@click.option("--namespace", help="All of this one: ns-…, as the table shows it.")
@click.option("--model", help="Its path or name, as the table shows it.")
@click.option("--tenant", help="cache_salt of its requests; - asks for it, so that no one sees it.")
@click.option("--no-tenant", is_flag=True, help="Requests that came without a cache_salt.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@passed_on_really
def purge(
    inventory: str,
    namespace: str | None,
    model: str | None,
    tenant: str | None,
    no_tenant: bool,
    yes: bool,
    pyinfra_args: tuple[str, ...],
) -> None:
    """Show the cache, or remove a part of it.

    Without --namespace, --model or a tenant: what lies there, and nothing is removed.
    Exit: 0 done; 1 refused, failed, not reached, or not agreed to; 2 wrong usage; 130 broken off.
    """
    from kvhost.commands import care as cli_care

    what = cli_care.purge_question(namespace, model, tenant, no_tenant)
    sys.exit(cli_care.purge(pyinfra, inventory, pyinfra_args, what, yes=yes))


@main.command(context_settings=PASS_ALL, epilog=f"{DONE} {MORE_ASKED}")
@inventory_option
@click.option(
    "--service",
    "services",
    metavar="NAME",
    multiple=True,
    help="Only cache, runner, runner-NAME, slots, pruner, ollama or supervisord; repeatable.",
)
@click.option("--since", help="30m, 2h, or a time of the host: '2026-11-29 19:00'.")
@click.option(
    "--lines", type=click.IntRange(0, 10_000), default=20, show_default=True,
    help="The last so many of each service.",
)  # fmt: skip
@click.option(
    "--level",
    type=click.Choice(["DEBUG", "INFO", "WARNING", "ERROR"], case_sensitive=False),
    default="INFO",
    show_default=True,
    help="The lowest that is shown.",
)
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="One JSON object, host -> service; why there is none: 'unreadable'.",
)
@hosts_and_passed_on
def logs(
    inventory: str,
    services: tuple[str, ...],
    since: str | None,
    lines: int,
    level: str,
    as_json: bool,
    pyinfra_args: tuple[str, ...],
) -> None:
    """The services' logs, the last error first.

    kvhost logs [HOST…] [--service runner] [--since 2h]
    """
    from kvhost.commands import care as cli_care

    asked = {"services": cli_care.service_names(services), "lines": lines, "level": level.upper()}
    asked |= {"since": since} if since else {}
    sys.exit(cli_care.logs(pyinfra, inventory, pyinfra_args, asked, as_json=as_json))


def worst(codes: list[int]) -> int:
    """Exit code of several verdicts, in the order of their weight; none at all is 2."""
    return next((code for code in (1, 2, 3, 0) if code in codes), 2)


def run_and_tell(inventory: str, deploy: str, args: tuple[str, ...]) -> int:
    """Runs a deploy and shows the verdict of each of its hosts; the exit code of both."""
    if "--dry" in args:
        return pyinfra(inventory, deploy, args)
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder, "verdicts")
        os.environ[SUMMARY_VARIABLE] = str(told)
        own = journal.VARIABLE not in os.environ  # of up it is kept
        kept = Path(os.environ.setdefault(journal.VARIABLE, str(Path(folder, "journal"))))
        try:
            code = pyinfra(inventory, deploy, ("-y", *args))
        finally:
            os.environ.pop(SUMMARY_VARIABLE, None)  # its folder goes
            if own:
                os.environ.pop(journal.VARIABLE)
        rows = list(journal.read_journal(kept).rows.values()) if kept.exists() else []
        lines = told.read_text(encoding="utf-8").splitlines() if told.exists() else []
    verdicts: dict[str, int] = {}
    entries = [json.loads(line) for line in lines]
    for entry in (entry for entry in entries if "persisted" in entry):
        verdicts[entry["host"]] = int(entry.get("code", EXIT_CODES[entry["persisted"]]))
        click.echo(f"{printable(entry['host'])}: persisted {entry['persisted']} ({entry['time']})")
    back = [entry for entry in entries if "rolled_back" in entry]
    for entry in back:
        click.echo(
            f"{printable(entry['host'])}: WENT BACK to what passed last: {entry['rolled_back']}"
        )
    if back:
        return 1
    if code == cli_up.INTERRUPTED:
        click.echo("the run was broken off, see above")
        return code
    if not verdicts:
        untested = not code and bool(entries)
        click.echo("no verdict: " + ("verify is never" if untested else cli_up.none_done(rows)))
        if untested:
            _tell_apis(entries)
        return 0 if untested else 1
    code_of_all = worst(list(verdicts.values()))
    if code_of_all == EXIT_CODES["NO_BY_DESIGN"] and (code or deploy == "deploy.py"):
        code_of_all = 0  # a deploy was not asked whether it persists
    # pyinfra fails a host whose verdict is not PASS; another host's failure is a 1
    if code_of_all or code:
        return code_of_all or 1
    _tell_apis(entries)
    return 0


def _tell_apis(entries: list[dict[str, str]]) -> None:
    """Where the API answers, after a good run of a few hosts."""
    apis = {(one["host"], one["api"]): one["model"] for one in entries if "api" in one}
    if len({host for host, _ in apis}) <= FEW:
        for (host, url), model in apis.items():
            where = "" if host == "@local" else f" on {printable(host)}"
            click.echo(f"API{where}: {url} (model {printable(model)})")


if __name__ == "__main__":
    main()
