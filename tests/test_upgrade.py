"""An upgrade with the real engine: proven, cleared away after, gone back from when it fails.

The second lock differs by a comment: another digest, so another environment, built and proven in
full, from uv's cache. What fails is real: files that are gone after the restart, a service that
does not come. The parts by themselves are in test_generations.py and test_plan_upgrade.py.
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e_tools import Done, Site

pytestmark = [pytest.mark.e2e, pytest.mark.engine, pytest.mark.full]
OTHER = "4.0"  # another value of a setting than in the other tests


class Thief(threading.Thread):
    """Takes the cache's files away as soon as the restart test restarts the cache server."""

    def __init__(self, site: Site) -> None:
        super().__init__(daemon=True)
        self.site, self.began, self.taken = site, time.time(), 0

    def run(self) -> None:
        told = self.site.base / "state/verify.json"
        while told.stat().st_mtime < self.began:
            time.sleep(0.2)
        before = self.site.record("cache")["pid"]
        while self.site.record("cache")["pid"] == before:
            time.sleep(0.05)
        for path in (self.site.base / "tier").glob("ns-*/*.data"):
            path.unlink()
            self.taken += 1


def change_lock(site: Site, comment: str) -> None:
    for lock in (site.repo / "locks").glob("cpu-*-py3*.txt"):
        lines = [line for line in lock.read_text().splitlines() if not line.startswith("# try")]
        lock.write_text("\n".join([f"# try {comment}", *lines]) + "\n")


def environment(site: Site) -> Path:
    return (site.base / "current").readlink()


def generations(site: Site) -> dict[str, Any]:
    done = site.run(
        "python3", str(site.base / "bin/generations.py"), "status", "--base", str(site.base)
    )
    loaded: dict[str, Any] = json.loads(done.text.splitlines()[-1])
    return loaded


@pytest.fixture(scope="module")
def first(site: Site) -> Done:
    return site.up(disrupt="true")


@pytest.fixture
def provisioned(site: Site, first: Done) -> Site:
    assert first.code == 0, first.text[-6000:]
    return site


def test_a_verdict_that_is_not_a_pass_after_a_switch_goes_back(provisioned: Site) -> None:
    old, receipt = environment(provisioned), provisioned.receipt()
    config = (provisioned.base / "etc/cache.json").read_text()
    assert generations(provisioned)["good"]["env"] == str(old)
    change_lock(provisioned, "one")
    thief = Thief(provisioned)
    thief.start()
    done = provisioned.up(disrupt="true", pruner_interval_s=OTHER)
    assert done.code == 1, done.text[-4000:]
    assert thief.taken >= 32
    assert "persisted PASS" not in done.text
    assert "WENT BACK" in done.text
    assert environment(provisioned) == old
    assert provisioned.receipt() == receipt
    assert (provisioned.base / "etc/cache.json").read_text() == config  # with the namespace
    failed = generations(provisioned)["failed"]
    assert failed["state"] == "rolled back"
    assert Path(failed["env"]).is_dir()  # kept aside
    assert failed["env"] in done.text
    states = json.loads(provisioned.services("--json", "status").text.splitlines()[-1])["services"]
    assert all(s["state"] == "RUNNING" and s["alive"] and s["current"] for s in states.values())


def test_a_way_back_that_was_broken_off_is_completed_and_nothing_else_done(
    provisioned: Site,
) -> None:
    old, path = environment(provisioned), provisioned.base / "state/failed.json"
    failed = json.loads(path.read_text())
    path.write_text(json.dumps({**failed, "state": "rolling back"}))
    (provisioned.base / "current").unlink()
    (provisioned.base / "current").symlink_to(failed["env"])  # as if it had not come to that
    done = provisioned.up(pruner_interval_s=OTHER)
    assert done.code == 1
    assert "WENT BACK" in done.text
    assert environment(provisioned) == old
    assert json.loads(path.read_text()) == failed


def test_the_next_run_says_what_failed_and_does_not_try_it_again(provisioned: Site) -> None:
    old, failed = environment(provisioned), generations(provisioned)["failed"]
    done = provisioned.up(pruner_interval_s=OTHER)
    assert done.code == 1
    text = " ".join(done.text.split())
    assert "failed here with these settings" in text
    assert failed["time"] in text
    assert "retry_failed" in text
    assert environment(provisioned) == old


def test_with_other_settings_it_is_tried_and_the_old_one_stays_one_turn_longer(
    provisioned: Site,
) -> None:
    old, new = environment(provisioned), generations(provisioned)["failed"]["env"]
    done = provisioned.up(disrupt="true")
    assert done.code == 0, done.text[-4000:]
    assert str(environment(provisioned)) == new
    told = generations(provisioned)
    assert (told["good"]["env"], told["previous"]["env"]) == (new, str(old))
    assert told["failed"] is None
    assert old.is_dir()
    assert provisioned.up().changed() == []


def test_services_that_do_not_come_up_after_a_switch_go_back(provisioned: Site) -> None:
    old = environment(provisioned)
    change_lock(provisioned, "two")
    extra = '["--chat-template", "/nonexistent/template.jinja"]'
    done = provisioned.up(verify="never", runner_extra_args=extra)
    assert done.code == 1
    assert "WENT BACK" in done.text
    assert environment(provisioned) == old
    assert "nonexistent" not in (provisioned.base / "etc/runner.json").read_text()


def test_other_settings_are_another_try_and_what_nothing_needs_goes(provisioned: Site) -> None:
    before = generations(provisioned)
    plan = provisioned.run(".venv/bin/kvhost", "plan", *provisioned.arguments())
    words = " ".join(plan.text.split())
    assert "An upgrade" in words
    assert "used no more" in words
    done = provisioned.up(disrupt="true")  # without the argument that failed
    assert done.code == 0, done.text[-4000:]
    told = generations(provisioned)
    assert told["previous"]["env"] == before["good"]["env"]
    left = {str(path) for path in (provisioned.base / "envs").iterdir()}
    assert left == {told["good"]["env"], told["previous"]["env"]}
    assert before["previous"]["env"] not in left
    assert provisioned.up().changed() == []
