"""The command `kvhost`. What reaches a host is a pyinfra deploy; this only wraps it.

Exit codes of `up`, `verify` and `status`: 0 persisted PASS, 1 FAIL or the run failed,
2 INCONCLUSIVE or no verdict. Of the others: 0 done, 1 refused or failed, 2 wrong usage.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from kvhost import __version__, cli_care, cli_drift, cli_up
from kvhost.cli_bundle import bundle_command
from kvhost.cli_fleet import init, inventory_group
from kvhost.cli_matrix import lock_command, matrix_command
from kvhost.cli_measure import measure, measure_options
from kvhost.cli_model import model_command
from kvhost.cli_report import report
from kvhost.cli_run import default_inventory, pyinfra
from kvhost.cli_size import size_command
from kvhost.cli_verify_url import asked_for, url_options, verify_url
from kvhost.evidence_model import EVENTS
from kvhost.reports import (
    SUMMARY_VARIABLE,
    Report,
    list_reports,
    load_report,
    reports_dir,
    why_no_report,
)
from kvhost.verdict_types import EXIT_CODES, Persisted
from kvhost.verdict_view import history_line, printable, verdict_table

_inventory = click.option(
    "--inventory",
    default=default_inventory,
    help="pyinfra inventory. Without it: the hosts of fleet.yaml, and where there are none the "
    "machine that you are on (inventory.py).",
)


def _options_only(_: click.Context, __: click.Parameter, words: tuple[str, ...]) -> tuple[str, ...]:
    """pyinfra would take a word for an operation, and fail with a traceback."""
    if words and not words[0].startswith("-"):
        raise click.UsageError(f"{words[0]!r}: a host is chosen with --limit {words[0]}")
    return words


_passed_on = click.argument(
    "pyinfra_args", nargs=-1, type=click.UNPROCESSED, callback=_options_only
)
_hosts_and_passed_on = click.argument("pyinfra_args", nargs=-1, type=click.UNPROCESSED)
_more = (
    "Further arguments go to pyinfra: --data KEY=VALUE (docs/settings.md), --limit HOST, --dry, -v."
)
_verdicts = "Exit: 0 persisted PASS; 1 FAIL, or the run failed; 2 INCONCLUSIVE."
_pass_all = {"ignore_unknown_options": True, "help_option_names": ["-h", "--help"]}


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def main() -> None:
    """Hosts whose KV cache provably survives a restart."""


main.add_command(matrix_command)
main.add_command(lock_command)
main.add_command(bundle_command)
main.add_command(init)
main.add_command(inventory_group)
main.add_command(size_command)
main.add_command(model_command)


@main.command(context_settings=_pass_all, epilog=f"{_verdicts} {_more}")
@_inventory
@click.option(
    "--batch", type=click.IntRange(min=1), help="As many hosts at a time, the next once all pass."
)
@click.option("--canary", metavar="HOST|N", help="This host, or the first N, before all others.")
@click.option(
    "--wait", "wait_s", type=click.IntRange(0, 86_400), default=0, help="Seconds between batches."
)
@_passed_on
def up(
    inventory: str,
    batch: int | None,
    canary: str | None,
    wait_s: int,
    pyinfra_args: tuple[str, ...],
) -> None:
    """Provision, test, and show the verdict.

    With --batch or --canary: one plan over all, then a part of the hosts after the other; it stops
    as soon as one of them is not PASS, and the rest is left as it was (docs/fleets.md).
    """

    def one(args: tuple[str, ...]) -> int:
        return _run_and_tell(inventory, "deploy.py", args)

    if "--dry" in pyinfra_args:
        sys.exit(one(pyinfra_args))
    rolling = cli_up.Rolling(batch, canary, wait_s)
    sys.exit(cli_up.up(pyinfra, one, inventory, pyinfra_args, rolling))


@main.command(context_settings=_pass_all, epilog=_more)
@_inventory
@click.option("--json", "as_json", is_flag=True, help="One JSON object, host -> what differs.")
@_passed_on
def drift(inventory: str, as_json: bool, pyinfra_args: tuple[str, ...]) -> None:
    """What of the hosts is not as settings, lock and the last run's receipt say.

    Changes nothing. Exit: 0 no drift; 2 drift; 1 a host could not be reached or looked at.
    """
    sys.exit(cli_drift.drift(pyinfra, inventory, pyinfra_args, as_json=as_json))


@main.command(context_settings=_pass_all, epilog=_more)
@_inventory
@click.argument("host")
@_passed_on
def rebuild(inventory: str, host: str, pyinfra_args: tuple[str, ...]) -> None:
    """Provision a fresh machine in the place of HOST, and compare it with what HOST was.

    Exit: 0 its receipt equals the one kept; 2 it differs; 1 or 2 as of up if that failed.
    """

    def up_one(args: tuple[str, ...]) -> int:
        return cli_up.up(pyinfra, one, inventory, args, cli_up.Rolling())

    def one(args: tuple[str, ...]) -> int:
        return _run_and_tell(inventory, "deploy.py", args)

    sys.exit(cli_drift.rebuild(host, up_one, pyinfra_args))


@main.command(context_settings=_pass_all, epilog=f"{_verdicts} {_more}")
@_inventory
@click.option("--disrupt", is_flag=True, help="Also on a server that is in use.")
@click.option(
    "--event",
    "events",
    type=click.Choice(EVENTS),
    multiple=True,
    help="What is done to the services, in place of verify_events; repeatable.",
)
@url_options
@_passed_on
def verify(
    inventory: str,
    disrupt: bool,
    events: tuple[str, ...],
    pyinfra_args: tuple[str, ...],
    **url: Any,
) -> None:
    """Repeat the restart test on provisioned hosts.

    With --url, --metrics-url and --restart-command: of a server that kvhost did not install.
    """
    asked = asked_for(url, disrupt)
    if asked is not None:
        if events:
            raise click.UsageError("--event: not with --url, whose event is the restart command")
        sys.exit(verify_url(asked, pyinfra, pyinfra_args))
    extra: tuple[str, ...] = ("--data", "disrupt=true") if disrupt else ()
    if events:
        extra += ("--data", f"verify_events={json.dumps(events)}")
    sys.exit(_run_and_tell(inventory, "verify.py", (*extra, *pyinfra_args)))


@main.command(context_settings=_pass_all, epilog=_more)
@_inventory
@click.option("--json", "as_json", is_flag=True, help="One JSON object, host -> plan.")
@_passed_on
def plan(inventory: str, as_json: bool, pyinfra_args: tuple[str, ...]) -> None:
    """What a run would do, what it costs, every reason not to.

    Changes nothing. The table goes to stderr, --json to stdout. Exit: 0; 1 if a host is refused.
    """
    if as_json:
        os.environ["KVHOST_PLAN_JSON"] = "1"
    sys.exit(pyinfra(inventory, "deploys/plan.py", ("-y", *pyinfra_args)))


@main.command(context_settings=_pass_all, epilog=_more)
@_inventory
@click.option("--json", "as_json", is_flag=True, help="One JSON object, host -> drives.")
@measure_options
@_passed_on
def drives(inventory: str, as_json: bool, pyinfra_args: tuple[str, ...], **measured: Any) -> None:
    """All drives of all hosts, and what kvhost thinks of each.

    Changes nothing. The table goes to stderr, --json to stdout. With --measure: whether the tier
    of each provisioned host is fast enough to be worth it (docs/sizing.md). Exit then: 0 worth it;
    1 not on one host or more, or it failed; 2 cannot tell.
    """
    if measured.pop("measure"):
        sys.exit(measure(pyinfra, inventory, pyinfra_args, as_json=as_json, **measured))
    if as_json:
        os.environ["KVHOST_DRIVES_JSON"] = "1"
    sys.exit(pyinfra(inventory, "deploys/drives.py", ("-y", *pyinfra_args)))


@main.command(context_settings=_pass_all, epilog=_more)
@_inventory
@_passed_on
def storage(inventory: str, pyinfra_args: tuple[str, ...]) -> None:
    """Format and mount the claimed drive, without an engine."""
    sys.exit(pyinfra(inventory, "storage.py", ("-y", *pyinfra_args)))


@main.command(context_settings=_pass_all, epilog=_more)
@_inventory
@_passed_on
def release(inventory: str, pyinfra_args: tuple[str, ...]) -> None:
    """Stop the services, give the drive back.

    Its data stay on it, until it is wiped with a token (docs/drives.md).
    """
    sys.exit(pyinfra(inventory, "release.py", ("-y", *pyinfra_args)))


@main.command(context_settings=_pass_all, epilog=_more)
@_inventory
@_passed_on
def grow(inventory: str, pyinfra_args: tuple[str, ...]) -> None:
    """Use all of a disk that became larger."""
    sys.exit(pyinfra(inventory, "grow.py", ("-y", *pyinfra_args)))


@main.command()
@click.option("--json", "as_json", is_flag=True, help="The last verdicts as JSON.")
def status(as_json: bool) -> None:
    """The last verdict of every host; reaches none.

    Exit: 0 all PASS; 1 one FAIL or more; 2 one INCONCLUSIVE or more, or no report at all.
    """
    reports = latest_reports()
    if as_json:
        verdicts = {r.host: r.model_dump(mode="json", by_alias=True) for r in reports}
        click.echo(json.dumps(verdicts, indent=1))
    else:
        console = Console()
        for one in reports:
            for result in one.results:
                console.print(verdict_table(one.host, result.verdict))
            console.print(history_line(one))
        if not reports:
            console.print("No verdict yet: bin/up, or kvhost verify on a provisioned host.")
    sys.exit(_worst([one.persisted for one in reports]))


main.add_command(report)


def latest_reports() -> list[Report]:
    """The newest report of every host."""
    newest = {path.parent: path for path in list_reports(reports_dir())}  # oldest first
    reports = []
    for path in newest.values():
        try:
            reports.append(load_report(path))
        except (OSError, ValueError):
            why = printable(why_no_report(path))
            click.echo(f"not a report, left out: {path}: {why}", err=True)
    return reports


@main.command(context_settings=_pass_all, epilog=_more)
@_inventory
@click.option("--namespace", help="All of this one: ns-…, as the table shows it.")
@click.option("--model", help="Its path or name, as the table shows it.")
@click.option("--tenant", help="cache_salt of its requests; - asks for it, so that no one sees it.")
@click.option("--no-tenant", is_flag=True, help="Requests that came without a cache_salt.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@_passed_on
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
    """
    what = cli_care.purge_question(namespace, model, tenant, no_tenant)
    sys.exit(cli_care.purge(pyinfra, inventory, pyinfra_args, what, yes=yes))


@main.command(context_settings=_pass_all, epilog=_more)
@_inventory
@click.option(
    "--service",
    "services",
    metavar="NAME",
    callback=cli_care.service_names,
    multiple=True,
    help="Only cache, runner, runner-NAME, pruner or supervisord; repeatable.",
)
@click.option("--since", help="30m, 2h, or a time of the host: '2026-11-29 19:00'.")
@click.option("--lines", type=click.IntRange(0, 10_000), default=20, show_default=True)
@click.option(
    "--level",
    type=click.Choice(["DEBUG", "INFO", "WARNING", "ERROR"], case_sensitive=False),
    default="INFO",
    show_default=True,
    help="The lowest that is shown.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object, host -> service.")
@_hosts_and_passed_on
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
    asked = {"services": services, "lines": lines, "level": level.upper()}
    asked |= {"since": since} if since else {}
    sys.exit(cli_care.logs(pyinfra, inventory, pyinfra_args, asked, as_json=as_json))


def _worst(verdicts: list[Persisted]) -> int:
    """Exit code of several verdicts: a FAIL outweighs an INCONCLUSIVE; none at all is 2."""
    codes = [EXIT_CODES[persisted] for persisted in verdicts]
    return 1 if 1 in codes else max(codes, default=2)


def _run_and_tell(inventory: str, deploy: str, args: tuple[str, ...]) -> int:
    """Runs a deploy and shows the verdict of each of its hosts; the exit code of both."""
    if "--dry" in args:
        return pyinfra(inventory, deploy, args)
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder, "verdicts")
        os.environ[SUMMARY_VARIABLE] = str(told)
        code = pyinfra(inventory, deploy, ("-y", *args))
        lines = told.read_text().splitlines() if told.exists() else []
    verdicts: dict[str, Persisted] = {}
    entries = [json.loads(line) for line in lines]
    for entry in (entry for entry in entries if "persisted" in entry):
        verdicts[entry["host"]] = entry["persisted"]
        click.echo(f"{printable(entry['host'])}: persisted {entry['persisted']} ({entry['time']})")
    back = [entry for entry in entries if "rolled_back" in entry]
    for entry in back:
        click.echo(
            f"{printable(entry['host'])}: WENT BACK to what passed last: {entry['rolled_back']}"
        )
    if back:
        return 1
    if not verdicts:
        untested = not code and bool(entries)
        click.echo(
            "no verdict: " + ("verify is never" if untested else "the run failed, see above")
        )
        return 0 if untested else 1
    worst = _worst(list(verdicts.values()))
    # pyinfra fails a host whose verdict is not PASS; another host's failure is a 1
    return worst if worst or not code else 1


if __name__ == "__main__":
    main()
