"""The command `kvhost`. What reaches a host is a pyinfra deploy; this only wraps it.

Exit codes of `up`, `verify` and `status`: 0 persisted PASS, 1 FAIL or the run failed,
2 INCONCLUSIVE or no verdict. Of the others: 0 done, 1 refused or failed, 2 wrong usage.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import click
from rich.console import Console

from kvhost import __version__

REPO = Path(__file__).resolve().parents[1]

_inventory = click.option(
    "--inventory",
    default="inventory.py",
    show_default=True,
    help="pyinfra inventory; the default is the machine that you are on.",
)
_passed_on = click.argument("pyinfra_args", nargs=-1, type=click.UNPROCESSED)
_pass_all = {"ignore_unknown_options": True, "help_option_names": ["-h", "--help"]}


def reports_dir() -> Path:
    """Where verdicts are kept on the controller: reports/, or KVHOST_REPORTS."""
    return Path(os.environ.get("KVHOST_REPORTS", REPO / "reports"))


def pyinfra(inventory: str, deploy: str, args: tuple[str, ...]) -> int:
    """Runs a deploy file from the repository's root; pyinfra's own exit code."""
    program = Path(sys.executable).with_name("pyinfra")
    if not program.exists():
        raise click.ClickException(
            f"no pyinfra beside {sys.executable}: bin/up sets up the environment"
        )
    done = subprocess.run([program, inventory, deploy, *args], cwd=REPO, check=False)
    return done.returncode


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def main() -> None:
    """Hosts whose KV cache provably survives a restart."""


@main.command(context_settings=_pass_all)
@_inventory
@_passed_on
def up(inventory: str, pyinfra_args: tuple[str, ...]) -> None:
    """Provision, test, and show the verdict."""
    code = pyinfra(inventory, "deploy.py", ("-y", *pyinfra_args))
    if "--dry" in pyinfra_args:
        sys.exit(code)
    sys.exit(_show_verdicts(code))


@main.command(context_settings=_pass_all)
@_inventory
@click.option("--disrupt", is_flag=True, help="Also on a server that is in use.")
@_passed_on
def verify(inventory: str, disrupt: bool, pyinfra_args: tuple[str, ...]) -> None:
    """Repeat the restart-persistence test on hosts that are provisioned."""
    extra = ("--data", "disrupt=true") if disrupt else ()
    sys.exit(_show_verdicts(pyinfra(inventory, "verify.py", ("-y", *extra, *pyinfra_args))))


@main.command(context_settings=_pass_all)
@_inventory
@click.option("--json", "as_json", is_flag=True, help="One JSON object, host -> plan.")
@_passed_on
def plan(inventory: str, as_json: bool, pyinfra_args: tuple[str, ...]) -> None:
    """What a run would do to each host, what it costs, and every reason not to."""
    if as_json:
        os.environ["KVHOST_PLAN_JSON"] = "1"
    sys.exit(pyinfra(inventory, "deploys/plan.py", ("-y", *pyinfra_args)))


@main.command()
@click.option("--json", "as_json", is_flag=True, help="The last verdicts as JSON.")
def status(as_json: bool) -> None:
    """The last verdict of every host."""
    from kvhost.reports import latest_of_all

    if as_json:
        verdicts = {r.host: r.model_dump(mode="json") for r in latest_of_all(reports_dir())}
        click.echo(json.dumps(verdicts, indent=1))
    sys.exit(_show_verdicts(0, quiet=as_json))


def _show_verdicts(run_code: int, *, quiet: bool = False) -> int:
    """Shows the last verdicts; the exit code: a failed run is 1 whatever an old verdict says."""
    from kvhost.reports import exit_code, latest_of_all
    from kvhost.verdict_view import render_report

    console = Console()
    reports = latest_of_all(reports_dir())
    if not quiet:
        for report in reports:
            console.print(render_report(report))
        if not reports:
            console.print("No verdict yet: bin/up, or kvhost verify on a provisioned host.")
    codes = [exit_code(report) for report in reports]
    worst = 1 if 1 in codes else max(codes, default=2)
    return worst or run_code
