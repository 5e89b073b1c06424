"""`kvhost monitoring`: what a Prometheus and a Grafana elsewhere are given."""

from __future__ import annotations

import json
from typing import Any

import click

from kvhost.commands.care import ask
from kvhost.commands.options import (
    DONE_HERE,
    MORE_ASKED,
    PASS_ALL,
    inventory_option,
    passed_on_really,
)
from kvhost.commands.run import copy_root, pyinfra
from kvhost.commands.up import Runner, stdout_kept

FILES = {"rules": "rules.yml", "dashboard": "dashboard.json"}
#: where node_exporter listens unless it was told otherwise
NODE_PORT = 9100


@click.group("monitoring")
def monitoring_group() -> None:
    """What Prometheus and Grafana are given.

    Alert rules, a dashboard and targets: docs/monitoring.md.
    """


@monitoring_group.command(epilog=DONE_HERE)
def rules() -> None:
    """Print the alert rules.

    kvhost monitoring rules > /etc/prometheus/kvhost-rules.yml
    """
    click.echo(file_text("rules"), nl=False)


@monitoring_group.command(epilog=DONE_HERE)
def dashboard() -> None:
    """Print the dashboard, for Grafana's import or its provisioning."""
    click.echo(file_text("dashboard"), nl=False)


@monitoring_group.command(context_settings=PASS_ALL, epilog=MORE_ASKED)
@inventory_option
@click.option("--port", type=click.IntRange(1, 65535), default=NODE_PORT, show_default=True,
              help="Where node_exporter listens.")  # fmt: skip
@passed_on_really
@click.pass_context
def scrape(
    context: click.Context, inventory: str, port: int, pyinfra_args: tuple[str, ...]
) -> None:
    """Print the hosts as targets of Prometheus.

    In the form of file_sd_configs.
    Exit: 0 all hosts that were asked write their figures; 1 one does not, or gave no answer; 2
    wrong usage; 130 broken off.
    """
    with stdout_kept() as stdout:  # a file is made of it
        code, found = targets(pyinfra, inventory, port, pyinfra_args)
        stdout.write(json.dumps(found, indent=1) + "\n")
    context.exit(code)


def file_text(name: str) -> str:
    return (copy_root() / "templates/monitoring" / FILES[name]).read_text(encoding="utf-8")


def targets(
    run: Runner, inventory: str, port: int, args: tuple[str, ...]
) -> tuple[int, list[dict[str, Any]]]:
    """Exit code, and one group of targets a host, as file_sd_configs reads them."""
    code, answers = ask(run, inventory, "deploys/monitoring_targets.py", args, {})
    found = []
    for one in answers:
        if not one["monitoring"]:
            click.echo(
                f"{one['host']}: it writes no figures; set monitoring = True and run kvhost up",
                err=True,
            )
            code = code or 1
            continue
        address = f"[{one['address']}]" if ":" in one["address"] else one["address"]
        found.append({"targets": [f"{address}:{port}"], "labels": {"kvhost": one["host"]}})
    return int(bool(code) or not answers), found
