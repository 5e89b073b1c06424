"""A host that was removed or changed after its last verdict: none stands, wherever it is shown."""

from __future__ import annotations

import hashlib
import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from kvhost import cli
from kvhost.basics import host_folder
from kvhost.commands import run as cli_run
from kvhost.records import receipts
from kvhost.reports import since as module
from kvhost.reports.html import write_pages
from kvhost.reports.junit import junit
from kvhost.reports.kept import TIME_FORMAT
from kvhost.reports.views import fleet, load_hosts
from tests.report_cases import FAILING, NOON, PASSING, REFUSED, keep

pytestmark = pytest.mark.verdict
REPO = Path(__file__).parents[1]
RECEIPT = {"engine": {"digest": "a"}, "files": {}}
OTHER = {"engine": {"digest": "b"}, "files": {}}


def digest(receipt: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(receipt, sort_keys=True).encode()).hexdigest()


def time(day: int) -> str:
    return (NOON + timedelta(days=day)).strftime(TIME_FORMAT)


class Site:
    """A controller: what it keeps, and the day on which it is."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(folder)
        self.reports, self.receipts = folder / "reports", folder / "receipts"
        self.day = 0
        for name in ("reports", "receipts"):
            monkeypatch.setenv(f"KVHOST_{name.upper()}", str(folder / name))
        monkeypatch.setenv("COLUMNS", "200")
        monkeypatch.setattr(cli_run, "root", lambda: folder)
        monkeypatch.setattr(module, "_now", lambda: time(self.day))

    def tested(self, day: int, case: str = PASSING, host: str = "web-1") -> None:
        keep(self.reports, case, host, day, digest(RECEIPT))

    def left(self, day: int, receipt: Mapping[str, object], host: str = "web-1") -> None:
        """What a run keeps at its end (deploys/common/kept.py)."""
        self.day = day
        path = receipts.keep(self.receipts, host, receipt, None)
        told = json.loads(path.read_text())
        path.write_text(json.dumps({**told, "time": time(day)}))
        module.note_run(self.reports, host)

    def removed(self, day: int, host: str = "web-1") -> None:
        self.day = day
        module.note_removal(self.reports, host)

    def released(self, day: int, host: str = "web-1") -> None:
        self.day = day
        module.note_removal(self.reports, host, "released")

    def status(self) -> tuple[int, str]:
        done = CliRunner().invoke(cli.main, ["status"])
        return done.exit_code, done.output


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    return Site(tmp_path, monkeypatch)


REMOVED = f"web-1: removed at {time(2)} by kvhost remove: no verdict stands, the last is of before"


def test_a_removed_host_has_no_verdict(site: Site) -> None:
    site.tested(0)
    site.left(0, RECEIPT)
    assert site.status()[0] == 0
    site.removed(2)
    code, text = site.status()
    assert (code, REMOVED in text, "condition" in text) == (2, True, False), text
    assert f"{time(0)}  web-1  PASS" in text
    told = json.loads(CliRunner().invoke(cli.main, ["status", "--json"]).stdout)["web-1"]
    assert [told[key] for key in ("persisted", "removed", "changed")] == [None, time(2), None]
    assert told["before"]["persisted"] == "PASS"


def test_provisioned_again_it_has_none_until_it_is_tested(site: Site) -> None:
    site.tested(0)
    site.removed(2)
    site.left(3, RECEIPT)  # the same as before: the verdict is not of this one
    site.left(4, RECEIPT)
    code, text = site.status()
    assert code == 2
    assert f"removed at {time(2)}, provisioned again at {time(3)}, and not tested since" in text
    site.tested(5, REFUSED)  # left out: it gives nothing back that the removal took
    assert site.status()[0] == 2
    site.tested(6)
    assert site.status()[0] == 0
    assert "removed" not in site.status()[1]
    site.removed(7)
    assert f"removed at {time(7)} by kvhost remove" in site.status()[1]


def test_a_change_that_was_not_tested_takes_the_verdict_away(site: Site) -> None:
    site.tested(0)
    site.left(1, RECEIPT)  # the run changed nothing
    assert site.status()[0] == 0
    site.left(2, OTHER)  # verify = never
    code, text = site.status()
    assert (code, f"web-1: changed at {time(2)}, and not tested since" in text) == (2, True), text


def test_a_receipt_of_before_the_test_takes_nothing_away(site: Site) -> None:
    """A run that went back keeps no receipt: the FAIL is of what it tried, and stands."""
    site.left(0, OTHER)
    site.tested(1, FAILING)
    assert site.status()[0] == 1


def test_others_are_left_as_they_are(site: Site) -> None:
    for host in ("web-1", "web-2"):
        site.tested(0, host=host)
    site.removed(2, "web-2")
    code, text = site.status()
    assert code == 2 and "web-1: removed" not in text and "web-2: removed" in text
    (site.reports.parent / "fleet.yaml").write_text("hosts:\n  web-1: {address: a}\n")
    code, text = site.status()
    assert code == 0, "web-2 is in the fleet no more"
    assert "web-2: removed" in text.partition("Not counted")[2]


def test_the_report_says_it_in_every_form(site: Site, tmp_path: Path) -> None:
    site.tested(0)
    site.tested(1)
    site.removed(2)
    for words in ((), ("web-1",)):
        text = CliRunner().invoke(cli.main, ["report", *words]).output
        assert REMOVED in text and "condition" not in text
    views = load_hosts(site.reports)
    (row,) = fleet(views).hosts
    assert (row.persisted, row.time, row.removed, row.changed) == ("NONE", None, time(2), None)
    assert len(row.reports) == 2
    write_pages(tmp_path / "html", views)
    said = f"This host was removed at {time(2)} by kvhost remove"
    for page in ("index.html", "host-web-1.html"):
        text = (tmp_path / "html" / page).read_text()
        assert said in text and "Of before: 2026-03-02" in text
        assert re.search(r'badge NONE">no verdict<', text)
    suite = ElementTree.fromstring(junit(views))[0]
    assert (suite.get("tests"), suite.get("errors")) == ("1", "1")
    site.tested(3)
    assert [view.standing for view in load_hosts(site.reports)] == ["PASS"]


def test_one_that_was_never_tested_is_said_to_be_removed(site: Site) -> None:
    site.removed(2)
    (site.reports.parent / "fleet.yaml").write_text("hosts:\n  web-1: {address: a}\n")
    code, text = site.status()
    assert (code, text) == (2, f"web-1: removed at {time(2)} by kvhost remove, no verdict yet\n")
    site.left(3, RECEIPT)
    assert site.status() == (2, "web-1: no verdict yet\n")


def test_a_host_whose_drive_was_given_back_has_no_verdict(site: Site, tmp_path: Path) -> None:
    site.tested(0)
    site.released(2)
    code, text = site.status()
    said = (
        f"web-1: stopped at {time(2)}, when kvhost release gave its drive back: no verdict stands"
    )
    assert (code, said in text, "removed" in text) == (2, True, False), text
    told = json.loads(CliRunner().invoke(cli.main, ["status", "--json"]).stdout)["web-1"]
    assert (told["removed"], told["released"]) == (None, time(2))
    (row,) = fleet(load_hosts(site.reports)).hosts
    assert (row.persisted, row.removed, row.released) == ("NONE", None, time(2))
    assert module.last_removal(site.reports, "web-1") == (None, None)
    site.left(3, RECEIPT)
    again = f"gave its drive back, provisioned again at {time(3)}, and not tested since"
    assert again in site.status()[1]
    site.tested(4)
    assert site.status()[0] == 0


def test_a_clock_that_goes_back_changes_nothing(site: Site) -> None:
    site.tested(0)
    site.removed(9)  # by a clock that was ahead
    assert f"removed at {time(9)}" in site.status()[1]
    site.left(3, RECEIPT)
    assert "provisioned again" in site.status()[1]
    site.tested(5)
    assert site.status()[0] == 0
    site.removed(3)
    code, text = site.status()
    assert (code, f"removed at {time(3)} by kvhost remove" in text) == (2, True), text
    (site.reports / "web-1" / f"{time(5)}.json").unlink()
    assert site.status()[0] == 2  # an older one is of before, too


def test_a_note_that_knows_no_report_goes_by_the_clock(site: Site) -> None:
    site.tested(1)
    note = site.reports / "web-1" / module.NAME
    for day, code in ((0, 0), (2, 2)):  # as they were written before
        note.write_text(json.dumps({"host": "web-1", "removed": time(day), "again": None}))
        assert site.status()[0] == code


def test_one_that_was_removed_before_its_first_test(site: Site) -> None:
    site.removed(9)
    site.tested(0)
    assert site.status()[0] == 0
    torn = site.reports / "web-1" / f"{time(1)}.json"
    torn.write_text("torn")
    site.removed(9)
    torn.unlink()
    assert site.status()[0] == 2


def test_what_was_not_noted_is_known(site: Site) -> None:
    def found() -> tuple[bool, bool]:
        one, two = (module.unnoted(site.reports, "web-1", w) for w in ("removed", "released"))
        return one, two

    assert found() == (False, False)  # never tested: nothing stands
    site.tested(0)
    assert found() == (True, True)
    site.released(1)
    assert found() == (True, False)
    site.removed(2)
    assert found() == (False, False)
    site.left(3, RECEIPT)
    assert found() == (True, False)
    site.tested(4)
    assert found() == (True, True)
    site.removed(5)
    assert found() == (False, False)
    (site.reports / "web-1" / f"{time(6)}.json").write_text("torn")
    assert found() == (False, False)


#: what the deploys note, without a host: two commands of a release, and whether a note lacks
DEPLOYS = """
import sys
from types import SimpleNamespace
from deploys.common import since
from deploys.storage import operations

paths = SimpleNamespace(drive="/d", base_dir="/b", state="/s")
run = SimpleNamespace(host="web-1", user="u", paths=paths, script=lambda name: name)

def release(there):
    operations.ask_json = lambda argv: {"status": "ok", "data": there}
    made = list(operations.release_drive._inner.__wrapped__(run=run))
    for one in made[-1:]:  # the command before it is for the host
        one.function(None, SimpleNamespace(name="web-1"))
    return len(made)

print(release(sys.argv[1] == "drive"), since.removal_unnoted("web-1", sys.argv[2]))
"""


def deploys(site: Site, *words: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(REPO)}
    argv = [sys.executable, "-c", DEPLOYS, *words]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_release_is_noted_and_a_note_that_lacks_is_made_up_for(site: Site) -> None:
    site.tested(0)
    site.left(0, RECEIPT)
    assert deploys(site, "none", "/b") == "0 True"  # no drive was there
    site.left(0, {**RECEIPT, "drive": {"mount": "/d"}, "scripts": {"/b/bin/a.py": "d"}})
    (site.receipts / "web-1.json").write_text(
        (site.receipts / "web-1.json").read_text().replace(time(0), time(-1))
    )
    assert deploys(site, "none", "/elsewhere") == "1 False"  # the receipt is of another base_dir
    assert "when kvhost release gave its drive back" in site.status()[1]
    assert deploys(site, "none", "/b") == "0 True"
    (site.reports / "web-1" / module.NAME).unlink()
    assert site.status()[0] == 0
    assert deploys(site, "drive", "/b") == "2 True"
    assert "when kvhost release gave its drive back" in site.status()[1]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"removed": 5, "again": null}', "\udcff"])
def test_a_note_that_is_none_says_nothing(text: str, site: Site) -> None:
    site.tested(0)
    note = site.reports / host_folder("web-1") / module.NAME
    note.write_bytes(text.encode("utf-8", "surrogateescape"))
    assert site.status()[0] == 0
    site.left(1, RECEIPT)
    assert site.status()[0] == 0


def note_of(site: Site, **changes: object) -> Path:
    path = site.reports / "web-1" / module.NAME
    told = {"host": "web-1", "what": "removed", "removed": time(2), "again": None, "report": None}
    path.write_text(json.dumps({**told, **changes}))
    return path


ODD: list[dict[str, object]] = [
    {"host": "web-2"}, {"host": None}, {"removed": "2026-3-1T1200Z"}, {"removed": "\x1b[31m"},
    {"removed": None}, {"what": "\x1b[31m"}, {"what": ["removed"]}, {"more": "x" * (1 << 16)},
]  # fmt: skip


@pytest.mark.parametrize("changes", ODD, ids=range(len(ODD)))
def test_a_note_that_is_odd_or_of_another_host_is_none(
    changes: dict[str, object], site: Site
) -> None:
    site.tested(0)
    note_of(site)
    assert site.status()[0] == 2
    note_of(site, **changes)
    assert site.status()[0] == 0


@pytest.mark.parametrize("again", ["\u001b[31mRED", "2026", ["x"], time(3) + "\n", 5])
def test_what_is_no_time_is_never_shown(again: object, site: Site) -> None:
    site.tested(0)
    note_of(site, again=again, report=again)
    code, text = site.status()
    assert (code, REMOVED in text, "RED" in text, "\x1b" in text) == (2, True, False, False)


def test_a_receipt_without_a_time_changes_nothing(site: Site) -> None:
    site.tested(0)
    site.left(2, OTHER)
    path = site.receipts / "web-1.json"
    told = json.loads(path.read_text())
    for value in (None, "\x1b[31m", 5, ["x"]):
        path.write_text(json.dumps({**told, "time": value}))
        assert site.status()[0] == 0
    del told["time"]
    path.write_text(json.dumps(told))
    code, text = site.status()
    assert (code, "None" in text) == (0, False)


def test_a_note_of_gibibytes_is_not_read(site: Site) -> None:
    site.tested(0)
    with note_of(site).open("r+b") as file:
        file.truncate(3 << 30)  # a hole
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert module.last_note(site.reports, "web-1") is None
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB


@pytest.mark.parametrize("name", [module.NAME, f"{module.NAME}.new"])
def test_a_link_or_a_pipe_in_the_place_of_the_note(name: str, site: Site, tmp_path: Path) -> None:
    site.tested(0)
    victim, place = tmp_path / "victim", site.reports / "web-1" / name
    victim.write_text("mine")
    place.symlink_to(victim)
    site.removed(1)
    assert victim.read_text() == "mine"
    assert not (site.reports / "web-1" / module.NAME).is_symlink()
    place.unlink()
    os.mkfifo(place)
    if name == module.NAME:
        assert site.status()[0] == 0  # not waited for
    site.removed(2)
    assert REMOVED in site.status()[1]


def test_the_note_is_its_owners_alone(site: Site) -> None:
    site.removed(0, "@local")
    note = site.reports / host_folder("@local") / module.NAME
    assert (note.stat().st_mode & 0o777, note.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert [path.name for path in note.parent.iterdir()] == [module.NAME]
