"""`kvhost shared`: the store of the tier that hosts share, made, tested between two, taken away."""

from __future__ import annotations

import sys

import click

from kvhost import cli
from kvhost.commands.options import MORE, PASS_ALL, inventory_option, passed_on


@click.command("shared", context_settings=PASS_ALL, epilog=MORE)
@inventory_option
@click.option("--remove", is_flag=True, help="Take the store away, with all that it holds.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask (--remove).")
@passed_on
def shared_command(inventory: str, remove: bool, yes: bool, pyinfra_args: tuple[str, ...]) -> None:
    """Make the store that hosts share KV through.

    On the hosts of the inventory that have a shared_store_address (docs/shared-tier.md). Hosts use
    it by the setting shared_tier, with kvhost up. Exit: 0 done; 1 refused or failed; 2 wrong usage.
    """
    if not remove:
        sys.exit(cli.pyinfra(inventory, "shared.py", ("-y", *pyinfra_args)))
    if not yes and "--dry" not in pyinfra_args:
        if not (sys.stdin is not None and sys.stdin.isatty()):
            raise click.ClickException("nothing was removed: no terminal to ask on; add -y")
        if not click.confirm("Remove the store, and all KV that it holds?", default=False):
            click.echo("nothing was removed")
            sys.exit(1)
    sys.exit(cli.pyinfra(inventory, "deploys/shared_remove.py", ("-y", *pyinfra_args)))
