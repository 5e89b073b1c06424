"""How often a run of the real deploy goes to a host; the engine is a double."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fleet_tools import Fleet, Ran, fleet_at

pytestmark = pytest.mark.fleet
TOP = Path(os.environ.get("KVHOST_FLEET_BASE", "/var/lib/kvhost-fleet")) / "trips"


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with fleet_at(TOP, tmp_path) as made:
        yield made


def commands(ran: Ran) -> int:
    assert ran.code == 0, ran.text[-4000:]
    return len(re.findall(r"Running command on|--> Running ", ran.text))


def test_no_change_is_a_report_and_one_look_and_writes_nothing(fleet: Fleet) -> None:
    base = fleet.add_here("a", TOP)
    first = commands(fleet.run("up", "--debug"))
    written = {path: path.stat().st_mtime_ns for path in (base / "state").iterdir()}
    again = fleet.run("up", "--debug")
    assert commands(again) == 2, re.findall(r".*Running command.*", again.text)
    assert again.results() == {"a": "unchanged"}
    assert {path: path.stat().st_mtime_ns for path in (base / "state").iterdir()} == written
    # a setting changed: less than a third of what the first run took
    changed = fleet.run("up", "--debug", "--data", "pruner_interval_s=31")
    assert 2 < commands(changed) < first / 3
    assert changed.results() == {"a": "changed"}
