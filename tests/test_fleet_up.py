"""`kvhost up` over several hosts: one away, one refused, one that fails; the others end right."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e_tools import free_ports
from tests.fleet_tools import Fleet

pytestmark = [
    pytest.mark.fleet,
    pytest.mark.skipif(os.geteuid() != 0, reason="provisions this machine, which needs root"),
]
TOP = Path(os.environ.get("KVHOST_FLEET_BASE", "/var/lib/kvhost-fleet"))


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    shutil.rmtree(TOP, ignore_errors=True)
    made = Fleet(tmp_path)
    try:
        yield made
    finally:
        made.remove()
        shutil.rmtree(TOP, ignore_errors=True)


def test_the_others_end_right_and_a_retry_ends_all_that_can(fleet: Fleet) -> None:
    good, taken, half = (fleet.add_here(name, TOP) for name in ("good", "taken", "half"))
    (taken / "tier").mkdir()
    (taken / "tier/somebodys").write_text("data")
    (half / "fail-resolve").touch()
    away = {"ssh_hostname": "127.0.0.1", "ssh_port": free_ports(1)[0], "ssh_user": "nobody"}
    fleet.hosts["away"] = away
    ran = fleet.run("up")
    assert ran.code == 1, ran.text[-4000:]
    assert ran.results() == {
        "good": "changed", "taken": "refused", "half": "failed", "away": "unreachable",
    }, ran.text[-4000:]  # fmt: skip
    rows = ran.told.rows
    assert rows["taken"].why == "path_taken"
    assert rows["half"].step == "cache: what the engine makes of the configuration"
    assert fleet.well("good")
    assert not (taken / "bin").exists(), "nothing is done to a host that is refused"
    assert not (half / "current").exists()
    [again] = re.findall(r"^  (kvhost up .*)$", ran.text, re.M)
    words = shlex.split(again)
    assert words[4:] == ["--limit", "taken", "--limit", "half", "--limit", "away"]

    (taken / "tier/somebodys").unlink()
    (half / "fail-resolve").unlink()
    before = (good / "state/receipt.json").stat().st_mtime_ns
    ran = fleet.run("up", *words[4:])
    assert ran.results() == {"taken": "changed", "half": "changed", "away": "unreachable"}
    assert ran.code == 1
    assert all(fleet.well(name) for name in ("good", "taken", "half"))
    assert (good / "state/receipt.json").stat().st_mtime_ns == before
