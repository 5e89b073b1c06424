"""`kvhost up` over several hosts: one away, one refused, one that fails; the others end right."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvhost.records.journal import Told
from tests.e2e_tools import free_ports
from tests.fleet_tools import Fleet, fleet_at, interrupt

pytestmark = [
    pytest.mark.fleet,
    pytest.mark.skipif(os.geteuid() != 0, reason="provisions this machine, which needs root"),
]
TOP = Path(os.environ.get("KVHOST_FLEET_BASE", "/var/lib/kvhost-fleet"))


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with fleet_at(TOP, tmp_path) as made:
        yield made


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
    assert "the double refuses" in str(rows["half"].why)
    assert "the double refuses" in ran.text.rpartition("┏")[2], "in the summary"
    assert rows["good"].why is None
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


RESOLVE = "cache: what the engine makes of the configuration"


@pytest.mark.full
def test_broken_off_it_says_where_it_stood_and_the_next_run_converges(fleet: Fleet) -> None:
    """Ctrl-C, then kill -9 with a program that goes on as at the far end of a connection."""
    base = fleet.add_here("a", TOP)
    (base / "slow-resolve").touch()

    def stands(told: Told) -> bool:
        return "a" in told.rows and told.rows["a"].step == RESOLVE

    process = fleet.start("up", start_new_session=True)
    fleet.until(stands)
    interrupt(process)
    ran = fleet.end(process, 60)
    assert (ran.code, ran.results()) == (130, {"a": "broken off"}), ran.text[-4000:]
    assert RESOLVE in ran.text
    assert not (base / "state/run.lock").exists()

    process = fleet.start("up", start_new_session=True)
    fleet.until(stands)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert (base / "state/run.lock").exists()
    python = next((base / "envs").iterdir()) / "bin/python"
    left = subprocess.Popen(["/bin/sh", str(python), str(base / "bin/resolve.py")])
    process = fleet.start("up", start_new_session=True)
    fleet.until(stands)
    assert left.wait(30) == -signal.SIGTERM
    (base / "slow-resolve").unlink()
    ran = fleet.end(process)
    assert (ran.code, ran.results()) == (0, {"a": "changed"}), ran.text[-4000:]
    assert "did not end. It stood here:" in ran.text
    assert fleet.well("a")


@pytest.mark.full
def test_broken_off_while_it_waits_for_the_next_batch(fleet: Fleet) -> None:
    """By SIGTERM to the command alone, as of a supervisor: 130, and the rest is to be done."""
    fleet.add_here("a", TOP)
    fleet.add_here("b", TOP)
    process = fleet.start("up", "--batch", "1", "--wait", "3600", start_new_session=True)
    fleet.until(lambda told: "a" in told.rows and told.rows["a"].good)
    process.terminate()
    ran = fleet.end(process, 60)
    assert (ran.code, ran.results()) == (130, {"a": "changed", "b": "not started"}), ran.text[
        -4000:
    ]
    assert re.search(r"^  kvhost up .*--batch 1 --wait 3600.* --limit b$", ran.text, re.M)
    assert fleet.well("a")
    assert ran.told.ended
