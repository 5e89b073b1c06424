"""Operations of the stage shared."""

from __future__ import annotations

import shlex

from pyinfra.api import operation

from deploys.common.context import Visit
from deploys.common.looks import Ask, ask, ask_json
from deploys.common.operations import Commands, converges, shown
from deploys.common.store import Store, store_argv


def package_ask(store: Store) -> Ask:
    return ("argv", "dpkg-query", "-W", "-f", "${db:Status-Status}", store.kind.name)


def runs_ask(store: Store) -> Ask:
    return ("argv", *store_argv(*store.state_words("state")))


def no_output(argv: tuple[str, ...]) -> str:
    return f"{shlex.join(argv)} > /dev/null"


@operation()
@converges
def package(store: Store) -> Commands:
    """The server's package. The server that it would start by itself, without a password, is not.

    + store: the store as it should be
    """
    answer = ask(package_ask(store))
    if answer is not None and answer["exit"] == 0 and answer["out"].strip() == "installed":
        return
    note = f"{store.at.paths.state}/packages"
    words = ("install", "--kind", store.kind.name, "--note", note)
    yield shown(no_output(store_argv(*words)))


@operation()
@converges
def runs(store: Store) -> Commands:
    """The server runs with the files that lie there, after a boot too, and asks for its password.

    + store: the store as it should be
    """
    state = ask_json(runs_ask(store)[1:])
    data = state["data"] if state["status"] == "ok" else {}
    if all(data.get(key) for key in ("active", "enabled", "fresh")) and data["asks"] is None:
        return
    unit = store.kind.unit
    wait = no_output(store_argv(*store.state_words("wait")))
    steps = ("systemctl daemon-reload", f"systemctl enable -q {unit}", f"systemctl restart {unit}")
    yield shown(" && ".join((*steps, wait)))


@operation()
def taken_away(at: Visit) -> Commands:
    """The server is stopped, what kvhost wrote of it and what it holds are removed.

    + at: the host
    """
    yield shown(no_output(store_argv("remove", "--base", at.paths.base_dir)))


@operation()
def no_store() -> Commands:
    """No change: this host has no store, and is given none."""
    yield from ()
