"""`kvhost remove`: what would go is shown, then asked for, then it goes."""

from __future__ import annotations

import sys

import click

from kvhost import cli
from kvhost.basics import printable
from kvhost.commands.care import ask
from kvhost.commands.options import MORE, PASS_ALL, agreed, inventory_option, passed_on
from kvhost.commands.up import INTERRUPTED, limits
from kvhost.records.journal import drop_limits


@click.command("remove", context_settings=PASS_ALL, epilog=MORE)
@inventory_option
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@passed_on
def remove_command(inventory: str, yes: bool, pyinfra_args: tuple[str, ...]) -> None:
    """Take kvhost away from hosts.

    Shows what goes and what stays, then asks; --dry only shows. The cache and the models stay, but
    for --data remove_cache=true and remove_models=true. A claimed drive: first kvhost release.
    Exit: 0 removed, or nothing of kvhost is there; 1 refused, failed, or not agreed to; 2 wrong
    usage; 130 broken off.
    """
    args = tuple(word for word in pyinfra_args if word != "--dry")
    if yes and args == pyinfra_args:
        sys.exit(cli.pyinfra(inventory, "remove.py", ("-y", *args)))
    code, found = ask(cli.pyinfra, inventory, "remove.py", ("--dry", *args), {})
    names = [one["host"] for one in found if one["goes"]]
    if any(one["goes"] is None for one in found) or not found:
        code = code or 1
    late = [one["host"] for one in found if one.get("unnoted")]  # gone, and their verdicts stand
    if code == INTERRUPTED or args != pyinfra_args or not names + late:
        sys.exit(code)
    if names and not agreed(f"Take kvhost away from {printable(', '.join(names))}?"):
        sys.exit(1)
    # those that were shown, and no other
    more = ("-y", *drop_limits(args), *limits([*names, *late]))
    sys.exit(cli.pyinfra(inventory, "remove.py", more) or code)
