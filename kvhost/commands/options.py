"""Options and words that several commands share."""

from __future__ import annotations

import sys
from typing import Any

import click

from kvhost.basics import up_command
from kvhost.commands.run import default_inventory
from kvhost.working_copy import CopyError, root

_INVENTORY = (
    "pyinfra inventory; inventory.py is the machine that you are on. Without it: the hosts of "
    "fleet.yaml, and in a clone of the repository, where there are none, inventory.py."
)
inventory_option = click.option("--inventory", default=default_inventory, help=_INVENTORY)
#: where it may turn out that no inventory is needed; the command asks default_inventory()
inventory_if_needed = click.option("--inventory", help=_INVENTORY)


def up_here() -> str:
    """What provisions from where the user is, for messages."""
    try:
        return up_command(root())
    except CopyError:
        return "kvhost up"


def terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def agreed(question: str) -> bool:
    """Whether the user says yes to a removal; told, if not. Raises click.ClickException where
    nobody can be asked."""
    if not terminal():
        raise click.ClickException("nothing was removed: no terminal to ask on; add -y")
    if click.confirm(question, default=False):
        return True
    click.echo("nothing was removed")
    return False


def _options_only(_: click.Context, __: click.Parameter, words: tuple[str, ...]) -> tuple[str, ...]:
    """pyinfra would take a word for an operation, and fail with a traceback."""
    if words and not words[0].startswith("-"):
        raise click.UsageError(f"{words[0]!r}: a host is chosen with --limit {words[0]}")
    return words


def no_dry(words: tuple[str, ...], instead: str = "") -> tuple[str, ...]:
    """The words. Raises click.UsageError where pyinfra would run nothing, and so answer nothing."""
    if "--dry" in words:
        raise click.UsageError(instead or "--dry: pyinfra would run nothing, and no host be asked")
    return words


def _really(context: click.Context, one: click.Parameter, words: tuple[str, ...]) -> Any:
    return no_dry(_options_only(context, one, words))


def _hosts_first(_: click.Context, __: click.Parameter, words: tuple[str, ...]) -> Any:
    return no_dry(words)


def unasked(words: tuple[str, ...]) -> tuple[str, ...]:
    """pyinfra's arguments without its own question; with -y, --dry would list no operation."""
    return words if "--dry" in words else ("-y", *words)


passed_on = click.argument("pyinfra_args", nargs=-1, type=click.UNPROCESSED, callback=_options_only)
#: of commands whose answers come from operations
passed_on_really = click.argument(
    "pyinfra_args", nargs=-1, type=click.UNPROCESSED, callback=_really
)
hosts_and_passed_on = click.argument(
    "pyinfra_args", nargs=-1, type=click.UNPROCESSED, callback=_hosts_first
)
MORE_ASKED = (
    "Further arguments go to pyinfra: --data KEY=VALUE (docs/settings.md), --limit HOST, -v."
)
MORE = MORE_ASKED.replace("-v.", "--dry, -v.")
VERDICTS = (
    "Exit: 0 persisted PASS; 1 FAIL, or a host was refused, failed, or was not reached; 2 "
    "INCONCLUSIVE, or wrong usage; 3 a runner that keeps no KV on disk (verify alone, up ends with "
    "0); 130 broken off. With --dry: 0, or 1 as above."
)
DONE = "Exit: 0 done; 1 refused, failed, or not reached; 2 wrong usage; 130 broken off."
#: of commands that reach no host
DONE_HERE = "Exit: 0 done; 1 it failed; 2 wrong usage."
PASS_ALL = {"ignore_unknown_options": True, "help_option_names": ["-h", "--help"]}
