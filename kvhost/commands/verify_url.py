"""The options of `kvhost verify --url` and what the command does with them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from kvhost.basics import printable
from kvhost.reports.kept import Report, latest_report, reports_dir
from kvhost.verdict.types import EXIT_CODES
from kvhost.verdict.verify_url import LOCAL, Asked, announcement, problems, run_here, to_json
from kvhost.verdict.view import headline, verdict_table

#: Names a file with what was asked, for deploys/verify_url.py.
ASKED_VARIABLE = "KVHOST_VERIFY_URL"

_OPTIONS = (
    click.option("--url", help="Test a server of others: its API, as seen from --where."),
    click.option("--metrics-url", help="With --url: its Prometheus page."),
    click.option("--restart-command", help="With --url: restarts the server; no shell runs it."),
    click.option(
        "--where", help="With --url: where the command runs: local (default) or one host."
    ),
    click.option("--cache-metrics-url", help="With --url: the page of an LMCache server."),
    click.option("--storage-dir", help="With --url: the directory that the connector writes to."),
    click.option("--model", help="With --url: a served name; default the first."),
    click.option("--api-key-file", help="With --url: a file here that holds the API key."),
    click.option("--vocab-size", type=int, help="With --url: random ids; else random words."),
    click.option("--prompt-tokens", type=int, help="With --url: default 4104."),
    click.option("--chunk-size", type=int, help="With --url: tokens of a chunk, default 256."),
    click.option("--name", help="With --url: the name in reports; default the address."),
)
Command = Callable[..., Any]
Pyinfra = Callable[[str, str, tuple[str, ...]], int]


def url_options(command: Command) -> Command:
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def asked_for(given: dict[str, Any], disrupt: bool) -> Asked | None:
    """What the options ask for; None without any. Raises click.UsageError naming all faults."""
    options = {key: value for key, value in given.items() if value is not None}
    if not options:
        return None
    wrong = [
        f"--{key.replace('_', '-')}: needed, too"
        for key in ("url", "metrics_url", "restart_command")
        if key not in options
    ]
    asked = None if wrong else Asked(**options, disrupt=disrupt)
    wrong += problems(asked) if asked else []
    if asked is None or wrong:
        raise click.UsageError("verify --url:\n  " + "\n  ".join(wrong))
    return asked


def verify_url(asked: Asked, pyinfra: Pyinfra, args: tuple[str, ...]) -> int:
    """Runs the test where it was asked for and shows the verdict; the exit code.

    ``pyinfra`` runs a deploy file on an inventory with ``args`` and gives its exit code.
    """
    if args and asked.where == LOCAL:
        raise click.UsageError(f"without --where HOST nothing takes these: {' '.join(args)}")
    click.echo(announcement(asked), err=True)
    if asked.where == LOCAL:
        try:
            report = run_here(asked)
        except (OSError, ValueError) as error:
            raise click.ClickException(printable(str(error))) from error
    else:
        report = _far(asked, pyinfra, args)
    verdict, evidence = report.verdict, report.result.evidence
    console = Console()
    if evidence.refused is None:
        console.print(verdict_table(report.host, verdict))
    else:
        console.print(headline(report.host, verdict))
        console.print(
            "The server has answered requests since it started, and the test would restart it. "
            "When it may be disturbed: --disrupt"
        )
    click.echo(f"{printable(report.host)}: persisted {report.persisted} ({report.time})")
    return EXIT_CODES[report.persisted]


def _far(asked: Asked, pyinfra: Pyinfra, args: tuple[str, ...]) -> Report:
    before = latest_report(reports_dir(), asked.host)
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder, "asked.json")
        told.write_text(to_json(asked))
        os.environ[ASKED_VARIABLE] = str(told)
        pyinfra(asked.where, "deploys/verify_url.py", ("-y", *args))
    report = latest_report(reports_dir(), asked.host)
    if report is None or (before is not None and before.time == report.time):
        raise click.ClickException("no verdict: the run failed, see above")
    return report
