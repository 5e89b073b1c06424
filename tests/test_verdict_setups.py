"""Broken set-ups: each gets the verdict that it must get, none is judged wrongly."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from kvhost.verdict.causes import NOT_COMPILED
from tests import engine_setups
from tests.verdict_setups import SETUPS, Setup, outcome, table

pytestmark = pytest.mark.verdict
ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: setup.what)
def test_setup(setup: Setup) -> None:
    found = setup.judged()
    unmet = [(c.id, c.figure) for c in found.conditions if c.met is not True]
    assert outcome(setup) == (setup.persisted, setup.cause), unmet


def test_there_are_many_and_each_is_there_once() -> None:
    assert len(SETUPS) >= 30
    assert len({(setup.what, setup.url) for setup in SETUPS}) == len(SETUPS)
    assert sum(setup.edited is None for setup in SETUPS) >= 14


def test_the_lines_that_tell_of_missing_operations_are_collected() -> None:
    importlib.import_module("kvhost.onhost.evidence")  # its parts are no package's on a host
    log_lines = sys.modules["evidence_collect"].LOG_LINES
    kept = {words for lines in log_lines.values() for words in lines}
    assert set(NOT_COMPILED) <= kept


def test_only_a_set_up_that_persists_passes() -> None:
    passed = {setup.what for setup in SETUPS if setup.judged().persisted == "PASS"}
    assert passed <= {setup.what for setup in SETUPS if setup.persisted == "PASS"}


def test_the_page_shows_this_table() -> None:
    page = (ROOT / "docs/verdict.md").read_text()
    assert table() in page, "python -m tests.verdict_setups prints the table for docs/verdict.md"


def test_the_page_shows_what_the_real_engine_is_put_through() -> None:
    rows = [
        f"| {one.what} | {one.persisted} | {f'`{one.cause}`' if one.cause else '-'} |"
        for one in engine_setups.SETUPS
    ]
    assert "\n".join(rows) in (ROOT / "docs/verdict.md").read_text()
