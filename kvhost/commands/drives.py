"""`kvhost drives`: what is there, and whether it is fast enough."""

from __future__ import annotations

import sys
from typing import Any

import click

from kvhost import cli
from kvhost.commands.care import told_as_json
from kvhost.commands.measure import measure, measure_options
from kvhost.commands.options import MORE_ASKED, PASS_ALL, inventory_option, no_dry, passed_on


@click.command(context_settings=PASS_ALL, epilog=MORE_ASKED)
@inventory_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object, host -> drives.")
@measure_options
@passed_on
def drives(inventory: str, as_json: bool, pyinfra_args: tuple[str, ...], **measured: Any) -> None:
    """All drives of all hosts, and what kvhost thinks of each.

    Changes nothing. The table goes to stderr, --json to stdout. Exit: 0 done; 1 a host could not be
    reached or looked at; 2 wrong usage; 130 broken off. With --measure, which writes: whether the
    tier of each provisioned host is fast enough to be worth it (docs/sizing.md). Exit then: 0 worth
    it; 1 not on one host or more, or it failed; 2 cannot tell; 130 broken off.
    """
    if measured.pop("measure"):
        sys.exit(measure(cli.pyinfra, inventory, no_dry(pyinfra_args), as_json=as_json, **measured))
    source = click.get_current_context().get_parameter_source
    for name in measured:
        if source(name) is click.core.ParameterSource.COMMANDLINE:
            raise click.UsageError(f"--{name.replace('_', '-')}: of --measure alone")
    if as_json:
        sys.exit(told_as_json(cli.pyinfra, inventory, "deploys/drives.py", pyinfra_args, "drives"))
    sys.exit(cli.pyinfra(inventory, "deploys/drives.py", ("-y", *pyinfra_args)))
