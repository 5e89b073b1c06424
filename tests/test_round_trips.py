"""How often a run of the real deploy goes to a host; the engine is a double."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvhost.records import last_asked
from tests.fleet_tools import Fleet, Ran, fleet_at

pytestmark = pytest.mark.fleet
TOP = Path(os.environ.get("KVHOST_FLEET_BASE", "/var/lib/kvhost-fleet")) / "trips"


@dataclass
class Site:
    """A host that two runs have been to, and what they were."""

    fleet: Fleet
    base: Path
    first: Ran
    second: Ran

    def up(self, *words: str) -> Ran:
        return self.fleet.run("up", "--debug", *words)

    def keep(self, asked: dict[str, Any]) -> None:
        """As if the last run had asked this."""
        looks = tuple(map(tuple, asked["looks"]))
        what = last_asked.LastAsked(tuple(asked["report"]), looks, asked["lock"])
        last_asked.keep(self.fleet.folder / "runs", "a", what)

    @property
    def kept(self) -> Path:
        [path] = (self.fleet.folder / "runs/asked").glob("*.json")
        return path


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with fleet_at(TOP, tmp_path_factory.mktemp("trips")) as fleet:
        base = fleet.add_here("a", TOP)
        yield Site(fleet, base, *(fleet.run("up", "--debug") for _ in range(2)))


def commands(ran: Ran) -> int:
    assert ran.code == 0, ran.text[-4000:]
    return len(re.findall(r"Running command on|--> Running ", ran.text))


def asked_ahead(ran: Ran) -> bool:
    return ", ahead: " in ran.text


def test_no_change_is_one_command_and_writes_nothing(site: Site) -> None:
    assert not asked_ahead(site.first)
    # what the first run asked was before there was a namespace: the report counts, the looks do not
    assert commands(site.second) == 2, re.findall(r".*Running command.*", site.second.text)
    written = {path: path.stat().st_mtime_ns for path in (site.base / "state").iterdir()}
    third = site.up()
    assert commands(third) == 1, re.findall(r".*Running command.*", third.text)
    assert site.second.results() == third.results() == {"a": "unchanged"}
    assert {path: path.stat().st_mtime_ns for path in (site.base / "state").iterdir()} == written


def test_a_change_takes_less_than_a_third_of_the_first_run(site: Site) -> None:
    changed = site.up("--data", "pruner_interval_s=31")
    assert asked_ahead(changed)
    assert 2 < commands(changed) < commands(site.first) / 3
    assert changed.results() == {"a": "changed"}
    site.up()


def test_what_is_asked_ahead_decides_nothing(site: Site) -> None:
    site.up()
    whole = json.loads(site.kept.read_text())
    # an edit behind the back is among the answers
    script = site.base / "bin/ready.py"
    right = script.read_text()
    script.write_text(right + "# edited\n")
    mended = site.up()
    assert asked_ahead(mended)
    assert (mended.results(), script.read_text()) == ({"a": "changed"}, right)
    # and is found too where the looks that came ahead are not about it
    script.write_text(right + "# edited\n")
    few = [look for look in whole["looks"] if look[-1] != str(script)]
    assert len(few) == len(whole["looks"]) - 1
    site.keep({**whole, "looks": few})
    assert (site.up().results(), script.read_text()) == ({"a": "changed"}, right)
    # of other looks or another report, nothing is used, and what was asked in the end is kept
    for trips, other in (
        (2, {"looks": whole["looks"][1:]}),
        (2, {"lock": f"{site.base}/state/other.lock"}),
        (3, {"report": whole["report"][:-2]}),
    ):
        site.keep({**whole, **other})
        ran = site.up()
        assert (commands(ran), ran.results()) == (trips, {"a": "unchanged"})
        assert json.loads(site.kept.read_text()) == whole
    # what cannot be read is not asked
    site.kept.write_text("{}")
    assert not asked_ahead(site.up())


def test_a_run_of_another_between_the_looks_is_seen(site: Site) -> None:
    """Its mark is written by one of the looks: as if it came while the others go on."""
    site.up()
    whole = json.loads(site.kept.read_text())
    mark = ["argv", "sh", "-c", f"echo another > {site.base}/state/run.lock.guard"]
    site.keep({**whole, "looks": [*whole["looks"], mark]})
    ran = site.up()
    assert asked_ahead(ran)
    # the report may have come before it, then the run ends there; or after it, and it looks anew
    assert ran.code != 0 or commands(ran) == 2


def test_a_file_that_no_run_wrote_is_no_command(site: Site, tmp_path: Path) -> None:
    site.up()
    whole = json.loads(site.kept.read_text())
    mark = tmp_path / "ran"
    site.kept.write_text(
        json.dumps({**whole, "looks": [*whole["looks"], ["argv", "touch", str(mark)]]})
    )
    assert not asked_ahead(site.up())
    assert not mark.exists()
