"""`kvhost verify` and `kvhost status`: the test again, and the last verdicts."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from kvhost import cli
from kvhost.basics import printable
from kvhost.commands.options import (
    MORE,
    PASS_ALL,
    VERDICTS,
    inventory_if_needed,
    passed_on,
    up_here,
)
from kvhost.commands.run import copy_root, default_inventory, fleet_hosts
from kvhost.commands.verify_url import asked_for, url_options, verify_url
from kvhost.fleet.yaml import FleetError
from kvhost.reports.kept import (
    Report,
    list_reports,
    newest_first,
    reports_dir,
    standing,
    why_no_report,
)
from kvhost.reports.since import Since, last_removal, since
from kvhost.verdict.evidence import EVENTS
from kvhost.verdict.foreign_evidence import ForeignEvidence
from kvhost.verdict.view import history_line, left_out_line, since_line, verdict_table


@click.command(context_settings=PASS_ALL, epilog=f"{VERDICTS} {MORE}")
@inventory_if_needed
@click.option("--disrupt", is_flag=True, help="Also on a server that is in use.")
@click.option(
    "--event",
    "events",
    type=click.Choice(EVENTS),
    multiple=True,
    help="What is done to the services, in place of verify_events; repeatable.",
)
@url_options
@passed_on
def verify(
    inventory: str | None,
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
        sys.exit(verify_url(asked, cli.pyinfra, pyinfra_args))
    extra: tuple[str, ...] = ("--data", "disrupt=true") if disrupt else ()
    if events:
        extra += ("--data", f"verify_events={json.dumps(events)}")
    inventory = inventory or default_inventory()
    sys.exit(cli.run_and_tell(inventory, "verify.py", (*extra, *pyinfra_args)))


@click.command()
@click.option("--json", "as_json", is_flag=True, help="The last verdicts as JSON, host -> report.")
@click.option("--all", "all_of_them", is_flag=True, help="Count hosts and servers of others too.")
def status(as_json: bool, all_of_them: bool) -> None:
    """The last verdict of every host; reaches none.

    Of the hosts in fleet.yaml; where there are none, of all but servers of others (verify --url).
    A test that was left out because the server was in use takes nothing away from the one before.
    Of a host that was removed, or changed and not tested since, no verdict stands: it is said when.
    Exit: 0 all PASS; 1 one FAIL or more; 2 one INCONCLUSIVE or more, or no verdict of a host; 3
    none of these, and a runner that keeps no KV on disk (Ollama).
    """
    try:
        names = fleet_hosts(copy_root())
    except FleetError as error:
        click.echo(str(error), err=True)
        sys.exit(2)  # whose verdicts are asked for is not known
    except click.ClickException:
        names = []  # no working copy: what KVHOST_REPORTS holds
    found, left_out, missing = last_verdicts()
    reports = [one for one in found if all_of_them or _counts(one, names)]
    apart = [one for one in found if one not in reports]
    without = [name for name in names if name not in {one.host for one in reports}]
    gone = {one.host: why for one in found if (why := since(reports_dir(), one)) is not None}
    if as_json:
        verdicts: dict[str, Any] = dict.fromkeys(without)
        verdicts |= {one.host: _as_json(one, gone.get(one.host)) for one in reports}
        click.echo(json.dumps(verdicts, indent=1))
        for later in (left_out[one.host] for one in reports if one.host in left_out):
            click.echo(left_out_line(later).plain, err=True)
    else:
        _show(reports, left_out, gone)
        if not reports and not without:
            click.echo(f"No verdict yet: {up_here()}, or kvhost verify on a provisioned host.")
    for name in without:
        removed, again = last_removal(reports_dir(), name)
        when = f"removed at {removed} by kvhost remove, " if removed and not again else ""
        click.echo(f"{printable(name)}: {when}no verdict yet", err=as_json)
    if apart:
        of = "not in fleet.yaml" if names else "servers of others"
        click.echo(f"\nNot counted, for they are {of} (--all counts them):", err=as_json)
    console = Console(stderr=as_json)
    for one in apart:
        if one.host in gone:
            console.print(since_line(one.host, gone[one.host]), soft_wrap=True)
        console.print(history_line(one), soft_wrap=True)
    broken = missing if all_of_them or not names else 0  # of the fleet's they are in `without`
    codes = [2 if one.host in gone else one.exit_code for one in reports]
    codes += [2] * (broken + len(without))
    sys.exit(cli.worst(codes))


def _counts(report: Report, names: list[str]) -> bool:
    if names:
        return report.host in names
    return not any(isinstance(one.evidence, ForeignEvidence) for one in report.results)


def _as_json(report: Report, gone: Since | None) -> dict[str, Any]:
    """The report; of a host that is not what it was then no verdict, and the report as "before"."""
    told = report.model_dump(mode="json", by_alias=True)
    return told if gone is None else {"persisted": None, **asdict(gone), "before": told}


def _show(reports: list[Report], left_out: dict[str, Report], gone: dict[str, Since]) -> None:
    console = Console()
    for one in reports:
        if one.host in gone:
            console.print(since_line(one.host, gone[one.host]), soft_wrap=True)
            console.print(history_line(one), soft_wrap=True)
            continue
        for result in one.results:
            console.print(verdict_table(one.host, result.verdict))
        console.print(history_line(one), soft_wrap=True)
        if one.host in left_out:
            console.print(left_out_line(left_out[one.host]), soft_wrap=True)


def last_verdicts() -> tuple[list[Report], dict[str, Report], int]:
    """The report that stands of every host; host -> a newer one whose test was left out; of how
    many hosts the newest file is no report, which is said: no verdict of theirs stands."""
    folders: dict[Path, list[Path]] = {}
    for path in list_reports(reports_dir()):  # oldest first
        folders.setdefault(path.parent, []).append(path)
    reports: list[Report] = []
    left_out: dict[str, Report] = {}
    missing = 0
    for paths in folders.values():
        try:
            report, later = standing(newest_first(paths))
        except (OSError, ValueError):
            why = printable(why_no_report(paths[-1]))
            click.echo(f"not a report, so no verdict stands: {paths[-1]}: {why}", err=True)
            missing += 1
            continue
        if report is not None:
            reports.append(report)
        if report is not None and later is not None:
            left_out[report.host] = later
    return reports, left_out, missing
