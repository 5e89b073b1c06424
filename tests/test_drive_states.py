"""Drives that hold something, or are in use: none is ever written to, whatever kvhost was told."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.drive_judge import Row, batches, judge
from tests.drive_states import PACKAGES, STATES, State, nothing
from tests.lab.recipe import install

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


@pytest.fixture(scope="session")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Callable[[State], Row]:
    """State -> what happened to it; those of one batch are judged together, once."""
    install(PACKAGES)
    rows: dict[str, Row] = {}

    def look(state: State) -> Row:
        if state.name not in rows:
            batch = next(batch for batch in batches(STATES) if state in batch)
            rows.update({r.state.name: r for r in judge(batch, tmp_path_factory.mktemp("drives"))})
        return rows[state.name]

    return look


def test_there_are_more_than_sixty_states_and_each_has_a_name() -> None:
    names = [state.name for state in STATES]
    assert len(names) > 60 and len(set(names)) == len(names)


@pytest.mark.parametrize("state", STATES, ids=lambda state: state.name)
def test_the_drive_is_refused_and_keeps_every_byte(
    state: State, judged: Callable[[State], Row]
) -> None:
    row = judged(state)
    assert row.harmed == []
    if state.finding == "data":
        assert row.kinds == [], "a header tells of it: say which"
    else:
        assert state.finding in row.kinds
    for order, code in row.orders.items():
        assert code in REFUSALS[order], order
    assert set(row.orders) == set(REFUSALS)


def test_the_same_orders_for_a_blank_drive_are_carried_out(tmp_path: Path) -> None:
    """Otherwise the table would show nothing: an apply that refused everything would pass."""
    blank = State("blank", "nothing", "data", "truncate", nothing)
    (row,) = judge([blank], tmp_path)
    assert row.harmed == ["a forged order"]
    assert row.orders["seen"].startswith("NOT REFUSED (exit 0)")
