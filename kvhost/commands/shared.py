"""`kvhost shared`: the store of the tier that hosts share, made, tested between two, taken away."""

from __future__ import annotations

import json
import secrets
import sys
from typing import Any

import click
from rich.console import Console

from kvhost import cli
from kvhost.basics import EXIT_CODES, printable
from kvhost.commands.care import ask
from kvhost.commands.options import (
    MORE,
    PASS_ALL,
    agreed,
    inventory_option,
    no_dry,
    passed_on,
    unasked,
)


@click.command("shared", context_settings=PASS_ALL, epilog=MORE)
@inventory_option
@click.option("--remove", is_flag=True, help="Take the store away, with all that it holds.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask (--remove).")
@click.option(
    "--check",
    nargs=2,
    metavar="A B",
    help="Is a prompt that host A computed served on host B? Restarts nothing.",
)
@click.option("--json", "as_json", is_flag=True, help="Of --check: one JSON object.")
@passed_on
def shared_command(
    inventory: str,
    remove: bool,
    yes: bool,
    check: tuple[str, str] | None,
    as_json: bool,
    pyinfra_args: tuple[str, ...],
) -> None:
    """Make the store that hosts share KV through.

    Redis or Valkey, on the hosts of the inventory that have a shared_store_address
    (docs/shared-tier.md); a bucket of S3 it does not make. Hosts use it by the setting shared_tier,
    with kvhost up. Exit: 0 done; 1 refused, failed, not reached, or not agreed to; 2 wrong usage;
    130 broken off. Of --check: 0 PASS; 1 FAIL, or it failed; 2 INCONCLUSIVE.
    """
    if check is not None:
        if remove:
            raise click.UsageError("--check and --remove exclude each other")
        sys.exit(check_two(inventory, no_dry(pyinfra_args), *check, as_json=as_json))
    if as_json:
        raise click.UsageError("--json: of --check alone")
    if not remove:
        sys.exit(cli.pyinfra(inventory, "shared.py", unasked(pyinfra_args)))
    asks = not yes and "--dry" not in pyinfra_args
    if asks and not agreed("Remove the store, and all KV that it holds?"):
        sys.exit(1)
    sys.exit(cli.pyinfra(inventory, "deploys/shared_remove.py", unasked(pyinfra_args)))


def check_two(
    inventory: str, args: tuple[str, ...], first: str, second: str, *, as_json: bool
) -> int:
    """The two steps, one host after the other, and the verdict. Exit code."""
    if first == second:
        raise click.UsageError("--check: two hosts are needed")
    question: dict[str, Any] = {"seed": secrets.token_hex(32), "chunks": []}
    found = []
    for host, step in ((first, "write"), (second, "read")):
        asked = {**question, "step": step}
        code, answers = ask(
            cli.pyinfra, inventory, "deploys/shared_check.py", ("--limit", host, *args), asked
        )
        if code or len(answers) != 1:
            return code or 1
        found += answers
        question["chunks"] = answers[0]["chunks"]
    from kvhost.verdict.shared import judge_shared
    from kvhost.verdict.types import Thresholds
    from kvhost.verdict.view import condition_table

    a, b = found
    word, conditions = judge_shared(a, b, min_hit=Thresholds().min_hit)
    if as_json:
        rows = [one.model_dump() for one in conditions]
        click.echo(json.dumps({"shared": word, "a": a["host"], "b": b["host"], "conditions": rows}))
    else:
        click.echo(f"{printable(a['host'])} -> {printable(b['host'])}: shared {word}")
        Console().print(condition_table(conditions))
    return EXIT_CODES[word]
