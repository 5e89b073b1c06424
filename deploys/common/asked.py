"""What pyinfra was asked for, checked before it does anything: one line, and exit code 2.

pyinfra itself warns where a --limit names nobody, and succeeds with nothing done.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from fnmatch import fnmatch
from typing import Any, NoReturn

import click

from kvhost.basics import printable
from kvhost.schema.problems import nearest, short

_MOST = 8  # names that a line has room for


def given() -> Mapping[str, Any]:
    """pyinfra's own options, by name; {} where it is not started as a command."""
    context = click.get_current_context(silent=True)
    return context.params if context else {}


def check_data(options: Mapping[str, Any]) -> None:
    """Every --data is KEY=VALUE, and a number's digits are 0 to 9. Else ends the process with 2."""
    for word in options.get("data") or ():
        key, equals, value = word.partition("=")
        if not (key.strip() and equals):
            # what stands there may be a secret that was pasted
            what = short(word) if word.replace("_", "").isalnum() and len(word) < 30 else "one word"
            _stop(f"--data {what} has no value: write --data KEY=VALUE (docs/settings.md)")
        if not value.isascii() and _is_a_number(value):
            _stop(
                f"--data {printable(key)}: the digits of a number are 0 to 9; write "
                f"{printable(key)}={int(value)}, or in quotes, '\"…\"', what is meant as text"
            )


def _is_a_number(value: str) -> bool:
    """As pyinfra takes it, by int(), which knows the digits of every script."""
    try:
        int(value)
    except ValueError:
        return False
    return True


def check_ways(options: Mapping[str, Any]) -> None:
    """No --no-wait. Else ends the process with 2.

    pyinfra 3.10 then counts no host as failed: a host whose operation fails, or that is refused,
    would be told as done, with exit code 0.
    """
    if options.get("no_wait"):
        _stop(
            "--no-wait: with it pyinfra does not tell which hosts failed. Leave it out; "
            "--parallel N is what limits the hosts at work. Nothing was done"
        )


def check_hosts(inventory: Any, options: Mapping[str, Any], chosen: Any) -> None:
    """--limit and --exclude name hosts or groups, and leave one. Else ends the process with 2.

    ``chosen``: the hosts that they leave, None for all.
    """
    names = [host.name for host in inventory]
    groups = [name for name in inventory.groups if inventory.groups[name]]
    if not names:
        _stop("the inventory has no host: nothing was done (docs/fleets.md)")
    for option in ("limit", "exclude"):
        for word in options.get(option) or ():
            of_it = [host.name for host in inventory.groups[word]] if word in groups else [word]
            if word in names and of_it != [word]:
                _stop(
                    f"--{option} {printable(word)}: a host and a group are called so, and pyinfra "
                    "would take the group (the name of the inventory's file is one too). Give the "
                    "host another name. Nothing was done"
                )
            if word in groups or any(fnmatch(name, word) for name in names):
                continue
            # of a group of all hosts nobody is to be told by a slip of the pen
            parts = [name for name in groups if len(inventory.groups[name]) < len(names)]
            meant = _meant(word, names, parts)
            _stop(f"--{option} {printable(word)}: no such host or group; {meant}")
    if chosen is not None and not chosen:
        _stop("--limit and --exclude together leave no host. Nothing was done")


def _meant(word: str, names: list[str], groups: Iterable[str]) -> str:
    meant = nearest(word, [*names, *groups])
    if meant is not None:
        return f"did you mean {printable(meant)}? Nothing was done"
    more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return f"there are {printable(', '.join(names[:_MOST]))}{more}. Nothing was done"


def _stop(line: str) -> NoReturn:
    click.echo(line, err=True)
    sys.exit(2)
