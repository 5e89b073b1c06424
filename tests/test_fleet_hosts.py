"""Eight hosts with systemd over SSH, with an engine's double: faults, and a rolling change."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from kvhost.records import receipts
from tests.fleet_site import BASE, Site
from tests.fleet_tools import KEY
from tests.lab.nspawn import Lab

pytestmark = [
    pytest.mark.fleet, pytest.mark.systemd, pytest.mark.full,
    pytest.mark.skipif(os.geteuid() != 0, reason="containers need root"),
]  # fmt: skip
NAMES = [f"h{n}" for n in range(1, 9)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with Lab() as lab:
        made = Site(lab, tmp_path_factory.mktemp("controller"), NAMES)
        made.boot(*NAMES[:-1])  # the last cannot be reached
        yield made


def test_of_eight_five_end_right_and_a_retry_ends_all(site: Site) -> None:
    h6, h7 = site.hosts["h6"], site.hosts["h7"]
    h6.root("sh", "-c", f"mkdir {BASE}/tier; echo data > {BASE}/tier/somebodys")
    h7.root("touch", f"{BASE}/fail-resolve")
    ran = site.fleet.run("up", timeout=600)
    five = NAMES[:5]
    expected = dict.fromkeys(five, "changed") | {
        "h6": "refused", "h7": "failed", "h8": "unreachable",
    }  # fmt: skip
    assert ran.results() == expected, ran.text[-6000:]
    assert ran.code == 1
    assert all(site.well(name) for name in five)
    assert not h6.root("sh", "-c", f"ls {BASE}/bin", ok=False)
    h6.root("rm", f"{BASE}/tier/somebodys")
    h7.root("rm", f"{BASE}/fail-resolve")
    site.boot("h8")
    names = ("--limit", "h6", "--limit", "h7", "--limit", "h8")
    assert f"kvhost up --inventory {site.fleet.inventory} {' '.join(names)}" in ran.text
    ran = site.fleet.run("up", *names, timeout=600)
    assert ran.results() == dict.fromkeys(("h6", "h7", "h8"), "changed"), ran.text[-6000:]
    assert ran.code == 0
    assert all(site.well(name) for name in NAMES)
    # eight fresh hosts, one lock: what was left on each is the same
    kept = [receipts.load(site.fleet.folder / "receipts", name).receipt for name in NAMES]
    for other in kept[1:]:
        assert receipts.differences(kept[0], other) == []
    ran = site.fleet.run("up", timeout=600)
    assert set(ran.results().values()) == {"unchanged"}, ran.text[-6000:]
    assert KEY not in ran.text


def test_a_rolling_change_stops_and_leaves_the_rest(site: Site) -> None:
    site.hosts["h2"].root("touch", f"{BASE}/fail-resolve")
    site.hosts["h2"].root("sh", "-c", f"rm -f {BASE}/state/resolved-*")
    change = ("--data", "pruner_interval_s=7")
    ran = site.fleet.run("up", "--canary", "h5", "--batch", "3", *change, timeout=600)
    assert ran.code == 1, ran.text[-6000:]
    done = {"h5": "changed", "h1": "changed", "h2": "failed", "h3": "changed"}
    assert ran.results() == dict.fromkeys(NAMES, "not started") | done, ran.text[-6000:]
    pruners = {name: site.hosts[name].read(f"{BASE}/etc/pruner.json") for name in NAMES}
    assert {name for name, text in pruners.items() if '"7' in text} == {"h5", "h1", "h3"}
    site.hosts["h2"].root("rm", f"{BASE}/fail-resolve")
    left = [word for name in NAMES if done.get(name) != "changed" for word in ("--limit", name)]
    assert f"--batch 3 {' '.join(change)} {' '.join(left)}" in ran.text
    ran = site.fleet.run("up", "--batch", "3", *change, *left, timeout=600)
    assert ran.code == 0, ran.text[-6000:]
    assert all(site.well(name) for name in NAMES)
    told = site.fleet.run("drift", *change, timeout=300)
    assert told.code == 0, told.text[-3000:]
    site.hosts["h6"].root("systemctl", "disable", "--quiet", "kvhost-pruner")
    site.hosts["h7"].root("systemctl", "stop", "kvhost-pruner")
    told = site.fleet.run("drift", *change, timeout=300)
    assert told.code == 2
    for text in ("h6: DRIFT, 1 difference\n", "h7: DRIFT, 1 difference\n", "h8: no drift"):
        assert text in told.text, told.text[-3000:]
    # what writes the figures for Prometheus counts too, where it is wanted
    ran = site.fleet.run("up", "--limit", "h8", *change, "--data", "monitoring=true", timeout=300)
    assert ran.code == 0, ran.text[-6000:]
    watched = ("--limit", "h8", *change, "--data", "monitoring=true")
    assert site.fleet.run("drift", *watched, timeout=300).code == 0
    site.hosts["h8"].root("systemctl", "stop", "kvhost-metrics")
    told = site.fleet.run("drift", *watched, timeout=300)
    assert told.code == 2
    assert "h8: DRIFT, 1 difference\n" in told.text, told.text[-3000:]
