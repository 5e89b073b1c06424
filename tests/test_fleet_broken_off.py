"""Runs that are broken off: by Ctrl-C, with the controller, with the network; two at once."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fleet_site import RESOLVE, Site
from tests.fleet_tools import Fleet, interrupt
from tests.lab.nspawn import Lab
from tests.lab.nspawn_image import sh

pytestmark = [
    pytest.mark.fleet, pytest.mark.systemd, pytest.mark.full,
    pytest.mark.skipif(os.geteuid() != 0, reason="containers need root"),
]  # fmt: skip
NAMES = ["h1", "h3", "h4"]
HELD = ("h3", "h4")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with Lab() as lab:
        made = Site(lab, tmp_path_factory.mktemp("controller"), NAMES)
        made.boot(*NAMES)
        ran = made.fleet.run("up", timeout=600)
        assert ran.code == 0, ran.text[-6000:]
        yield made


def converges(site: Site, *names: str) -> None:
    """The next run takes the locks over, ends what is left at work, and comes to its end."""
    site.let_go(*names)
    ran = site.fleet.run("up", timeout=600)
    assert ran.code == 0, ran.text[-6000:]
    assert set(ran.results().values()) <= {"changed", "unchanged"}
    assert all(site.well(name) for name in names)
    assert not any(site.lock(name) or site.at_work(name) for name in names)


def test_after_ctrl_c_it_says_where_it_stood_and_gives_the_locks_back(site: Site) -> None:
    site.hold(*HELD)
    process = site.fleet.start("up", start_new_session=True)
    site.held(*HELD)
    assert all(site.at_work(name) for name in HELD)
    began = time.monotonic()
    interrupt(process)
    ran = site.fleet.end(process)
    assert time.monotonic() - began < 60
    assert ran.code == 130, ran.text[-6000:]
    assert all(ran.told.rows[name].result == "broken off" for name in NAMES)
    assert all(ran.told.rows[name].step == RESOLVE for name in HELD)
    assert RESOLVE in ran.text[-6000:]
    for name in HELD:
        assert not site.lock(name)
        assert not site.at_work(name), "what ran on the host is ended"
    converges(site, *HELD)


def test_after_the_controller_was_lost_the_next_run_says_where_it_stood(site: Site) -> None:
    site.hold(*HELD)
    process = site.fleet.start("up", start_new_session=True)
    site.held(*HELD)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert all(site.lock(name) and site.at_work(name) for name in HELD)
    again = site.fleet.start("up", start_new_session=True)
    site.held(*HELD)
    assert all(len(site.at_work(name).split()) == 1 for name in HELD), "not two at once"
    site.let_go(*HELD)
    ran = site.fleet.end(again, 600)
    assert ran.code == 0, ran.text[-6000:]
    assert "did not end. It stood here:" in ran.text
    assert "broken off" in ran.text
    converges(site, *HELD)


def test_a_host_whose_link_is_lost_fails_alone(site: Site) -> None:
    site.hold("h3")
    link = ("ip", "-n", site.lab.name, "link", "set", f"v{site.hosts['h3'].number}")
    process = site.fleet.start("up", start_new_session=True)
    site.held("h3")
    sh(*link, "down")
    try:
        began = time.monotonic()
        ran = site.fleet.end(process, 300)
        assert time.monotonic() - began < 150
    finally:
        sh(*link, "up")
    assert ran.code == 1, ran.text[-6000:]
    expected = dict.fromkeys(NAMES, "unchanged") | {"h3": "failed"}
    assert ran.results() == expected, ran.text[-6000:]
    assert ran.told.rows["h3"].step == RESOLVE
    converges(site, "h3")


def test_two_controllers_at_once_are_kept_apart(site: Site, tmp_path: Path) -> None:
    site.hold("h4")
    first = site.fleet.start("up", "--limit", "h4", start_new_session=True)
    site.held("h4")
    other = Fleet(tmp_path, hosts=site.fleet.hosts, prefix=site.fleet.prefix)
    second = other.run("up", "--limit", "h4", "--limit", "h1")
    assert second.results() == {"h4": "refused", "h1": "unchanged"}, second.text[-6000:]
    assert second.told.rows["h4"].why == "run_in_progress"
    site.let_go("h4")
    ran = site.fleet.end(first)
    assert ran.code == 0, ran.text[-6000:]
