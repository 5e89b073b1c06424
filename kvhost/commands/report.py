"""`kvhost report`: what is in reports/, as tables, pages, JSON or JUnit XML. Reaches no host."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import Console
from rich.text import Text

from kvhost.basics import counted, printable
from kvhost.commands.options import up_here
from kvhost.reports.html import write_pages, write_text
from kvhost.reports.junit import junit
from kvhost.reports.kept import Report, reports_dir, why_no_report
from kvhost.reports.views import HostView, fleet, load_hosts
from kvhost.verdict.view import history_line, left_out_line, since_line, verdict_table


@click.command()
@click.argument("host", required=False)
@click.option("--html", type=click.Path(path_type=Path), help="Folder for pages to look at.")
@click.option("--junit", "junit_file", type=click.Path(path_type=Path), help="JUnit XML for a CI.")
@click.option("--json", "as_json", is_flag=True, help="All of it as JSON (kvhost/fleet/1).")
@click.option("--history", is_flag=True, help="One line a run, oldest first, and nothing else.")
def report(
    host: str | None, html: Path | None, junit_file: Path | None, as_json: bool, history: bool
) -> None:
    """The verdicts in reports/: of every host, or of HOST.

    Exit: 0 done, whatever the verdicts are (`kvhost status` tells them by its exit code); 1 there
    is no report of that host, or a file could not be written; 2 wrong usage.
    """
    if as_json and history:
        raise click.UsageError("--json and --history: one of them; the JSON holds the history")
    folder = reports_dir()
    views = load_hosts(folder, host)
    if host is not None and not views:
        known = ", ".join(printable(view.host) for view in load_hosts(folder)) or "none"
        raise click.ClickException(f"no report of {host!r} in {folder}; hosts: {known}")
    for view in views:
        for path in view.unreadable:
            why = printable(why_no_report(path))
            click.echo(f"not a report, left out: {path}: {why}", err=True)
    try:
        told = _write(views, html, junit_file)
    except OSError as error:
        raise click.ClickException(f"not written: {error}") from error
    if as_json:
        click.echo(fleet(views).model_dump_json(by_alias=True, indent=1))
    elif history or not told:
        _show(views, host, history)
    for line in told:
        click.echo(line, err=True)
    sys.exit(0)


def _write(views: Sequence[HostView], html: Path | None, junit_file: Path | None) -> list[str]:
    told = []
    if html is not None:
        pages = write_pages(html, views)
        told.append(f"{counted(len(pages), 'page')}, begin with {html / 'index.html'}")
    if junit_file is not None:
        write_text(junit_file, junit(views))
        told.append(f"JUnit XML: {junit_file}")
    return told


def _show(views: Sequence[HostView], host: str | None, history: bool) -> None:
    console = Console()
    if not views:
        console.print(f"No report yet: {up_here()}, or kvhost verify on a provisioned host.")
    for view in views:
        stands = view.stands
        if history:
            _lines(console, view.reports)
        elif view.since is not None and stands is not None:
            console.print(since_line(view.host, view.since), soft_wrap=True)
            _lines(console, view.reports[-10:] if host is not None else [stands])
        elif host is not None and stands is not None:
            for result in stands.results:
                console.print(verdict_table(view.host, result.verdict))
            _not_made(console, view)
            console.print(Text(f"\n{counted(len(view.reports), 'run')}, the newest last:"))
            _lines(console, view.reports[-10:])
        elif stands is not None:
            _lines(console, [stands])
            _not_made(console, view)
        if view.latest_unreadable:
            name = view.unreadable[-1].name
            words = (
                f"{printable(view.host)}: no verdict stands, the newest file is no report: {name}"
            )
            console.print(Text(words, style="bold red"))


def _not_made(console: Console, view: HostView) -> None:
    if view.left_out is not None:
        console.print(left_out_line(view.left_out), soft_wrap=True)


def _lines(console: Console, reports: Sequence[Report]) -> None:
    for one in reports:
        console.print(history_line(one), soft_wrap=True)
