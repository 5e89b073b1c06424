"""Drives that hold something, or are in use: none is ever written to, whatever kvhost was told.

The core tier has the states of CORE, the full one all of them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.drive_judge import ORDERS, PAGE, Row, batches, judge, line
from tests.drive_states import CORE, STATES, State, nothing

pytestmark = [
    pytest.mark.drives,
    pytest.mark.skipif(os.geteuid() != 0, reason="loop devices and mounts need root"),
]
#: what each forged order may be answered with
REFUSALS = {
    "seen": {"drive_not_blank", "drive_in_use", "not_ours"},
    "wrong-token": {"drive_not_blank", "drive_in_use", "not_ours"},
    "blank": {"drive_changed", "drive_not_blank", "not_ours"},
    "ours": {"not_ours"},
}
#: for the mutation check: one state at a time, and no run of deploy.py
ORDERS_ONLY = bool(os.environ.get("KVHOST_TEST_ORDERS_ONLY"))
REST = tuple(state for state in STATES if state.name not in CORE)
CASES = [
    pytest.param(state, id=state.name, marks=() if state.name in CORE else pytest.mark.full)
    for state in STATES
]


@pytest.fixture(scope="session")
def judged(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Callable[[State], Row]:
    """State -> what happened to it; those of one batch are judged together, once."""
    rows: dict[str, Row] = {}
    orders = ORDERS if pytestconfig.getoption("--full") else ("seen", "blank")

    def look(state: State) -> Row:
        if state.name not in rows:
            core = [one for one in STATES if one.name in CORE]
            group = core if state.name in CORE else REST
            batch = next(batch for batch in batches(group) if state in batch)
            if ORDERS_ONLY:
                batch = [state]
            folder = tmp_path_factory.mktemp("drives")
            found = judge(batch, folder, deploys=not ORDERS_ONLY, orders=orders)
            rows.update({row.state.name: row for row in found})
        return rows[state.name]

    return look


def test_there_are_more_than_sixty_states_and_each_has_a_name() -> None:
    names = [state.name for state in STATES]
    assert len(names) > 60 and len(set(names)) == len(names)
    assert set(names) >= CORE


@pytest.mark.parametrize("state", CASES)
def test_the_drive_is_refused_and_keeps_every_byte(
    state: State, judged: Callable[[State], Row]
) -> None:
    row = judged(state)
    assert row.harmed == []
    if state.finding == "data":
        assert row.kinds == [], "a header tells of it: say which"
    else:
        assert state.finding in row.kinds
    if state.in_plan and not ORDERS_ONLY:
        assert row.refusals is not None
        # the table of all drives that comes with it names the kinds of others too
        said = [text.split("all drives here")[0] for text in row.refusals.values()]
        assert any(re.search(rf"\b{state.finding}\b", text) for text in said), row.refusals
    for order, code in row.orders.items():
        assert code in REFUSALS[order], order
    assert {"seen", "blank"} <= set(row.orders)
    assert ORDERS_ONLY or line(row) in PAGE.read_text().splitlines(), (
        "python -m tests.drive_judge makes the page"
    )


def test_the_same_orders_for_a_blank_drive_are_carried_out(tmp_path: Path) -> None:
    """Otherwise the table would show nothing: an apply that refused everything would pass."""
    blank = State("blank", "nothing", "data", "truncate", nothing)
    (row,) = judge([blank], tmp_path, orders=("seen",))
    assert row.harmed == ["a forged order"]
    assert row.orders["seen"].startswith("NOT REFUSED (exit 0)")
