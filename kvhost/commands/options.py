"""Options and words that several commands share."""

from __future__ import annotations

import click

from kvhost.commands.run import default_inventory

_INVENTORY = (
    "pyinfra inventory; inventory.py is the machine that you are on. Without it: the hosts of "
    "fleet.yaml, and in a clone of the repository, where there are none, inventory.py."
)
inventory_option = click.option("--inventory", default=default_inventory, help=_INVENTORY)
#: where it may turn out that no inventory is needed; the command asks default_inventory()
inventory_if_needed = click.option("--inventory", help=_INVENTORY)


def _options_only(_: click.Context, __: click.Parameter, words: tuple[str, ...]) -> tuple[str, ...]:
    """pyinfra would take a word for an operation, and fail with a traceback."""
    if words and not words[0].startswith("-"):
        raise click.UsageError(f"{words[0]!r}: a host is chosen with --limit {words[0]}")
    return words


passed_on = click.argument("pyinfra_args", nargs=-1, type=click.UNPROCESSED, callback=_options_only)
hosts_and_passed_on = click.argument("pyinfra_args", nargs=-1, type=click.UNPROCESSED)
MORE = (
    "Further arguments go to pyinfra: --data KEY=VALUE (docs/settings.md), --limit HOST, --dry, -v."
)
VERDICTS = (
    "Exit: 0 persisted PASS; 1 FAIL, or the run failed; 2 INCONCLUSIVE; 3 a runner that keeps no "
    "KV on disk (verify alone, up ends with 0); 130 broken off."
)
PASS_ALL = {"ignore_unknown_options": True, "help_option_names": ["-h", "--help"]}
