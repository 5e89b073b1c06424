"""What a host with the real engine does when something breaks; docs/services.md is the table.

One host; every test leaves it well. Prompts are drawn from a seed: one that was not used before is
new to the cache.
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvhost.services.vllm import shm_name
from kvhost.settings import Settings
from tests.lab.nspawn import until
from tests.systemd_site import BASE, MOUNT, TIER, Site, systemd_site

pytestmark = [pytest.mark.systemd, pytest.mark.engine, pytest.mark.full]
#: seconds that no request may take, whatever happens to the cache server
LONGEST_S = 30
#: seconds after SIGTERM within which every request has ended (TimeoutStopSec of the runner)
STOP_S = 75


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    if os.geteuid() != 0:
        pytest.fail("these tests need root: namespaces, mounts, containers (docs/testing.md)")
    with systemd_site(tmp_path_factory.mktemp("faults")) as made:
        done = made.pyinfra(verify="never")
        assert done.code == 0, done.text[-6000:]
        yield made


@pytest.fixture(autouse=True)
def well(site: Site) -> Iterator[None]:
    yield
    if not site.good():
        site.services("ensure")
    site.wait_good()


def pids(site: Site) -> dict[str, int]:
    return {name: row["pid"] for name, row in site.rows().items()}


def in_background(site: Site, seed: int, **options: float) -> subprocess.Popen[str]:
    return subprocess.Popen(site.ask_argv(seed, **options), stdout=subprocess.PIPE, text=True)


def answer(asked: subprocess.Popen[str], seconds: float) -> dict[str, Any]:
    out, _ = asked.communicate(timeout=seconds)
    return dict(json.loads(out))


def new_files(site: Site, seed: int) -> tuple[dict[str, Any], list[str]]:
    """The answer to a prompt that the cache has not seen, and the files that it left."""
    before = set(site.chunks())
    got = site.ask(seed)
    assert (got["status"], got["cached"]) == (200, 0), got
    site.settled()
    return got, sorted(set(site.chunks()) - before)


def test_the_host_is_rebooted(site: Site) -> None:
    site.served_from_l2_after_a_reboot(seed=150)


def test_the_runner_is_killed(site: Site) -> None:
    first, _ = new_files(site, 100)
    before = pids(site)
    site.kill("runner")
    until(lambda: site.good() and pids(site)["runner"] != before["runner"], 180, "the runner")
    assert pids(site)["cache"] == before["cache"]
    again = site.ask(100)
    assert (again["status"], again["text"]) == (200, first["text"])
    assert again["cached"] >= 2048


def test_the_cache_server_is_killed_and_requests_go_on(site: Site) -> None:
    first, _ = new_files(site, 101)
    before = pids(site)
    site.kill("cache")
    alone = site.ask(102)
    assert alone["status"] == 200
    assert alone["seconds"] < LONGEST_S
    until(lambda: site.good() and pids(site)["cache"] != before["cache"], 90, "the cache server")
    assert pids(site)["runner"] == before["runner"]
    until(lambda: is_registered(site), 60, "vLLM registers again")
    _, files = new_files(site, 103)
    assert len(files) >= 8
    assert site.ask(101)["text"] == first["text"]


def test_the_cache_server_is_killed_during_a_prefill(site: Site) -> None:
    before, files = pids(site), len(site.chunks())
    asked = in_background(site, 140, tokens=8100)
    until(lambda: len(site.chunks()) > files, 60, "the first tokens are stored")
    site.kill("cache")
    got = answer(asked, 90)
    print(f"killed during a prefill: {got['seconds']} s")
    assert got["status"] == 200, got
    until(lambda: site.good() and pids(site)["cache"] != before["cache"], 90, "the cache server")
    assert pids(site)["runner"] == before["runner"]
    until(lambda: is_registered(site), 60, "vLLM registers again")


def is_registered(site: Site) -> bool:
    said = site.host.root("curl", "-s", "http://127.0.0.1:8085/status", ok=False)
    return '"registered_' in said and any(
        value for key, value in walk(json.loads(said)) if key.startswith("registered_")
    )


def walk(data: Any) -> Iterator[tuple[str, Any]]:
    for key, value in data.items() if isinstance(data, dict) else []:
        yield key, value
        yield from walk(value)


def test_the_cache_server_is_restarted_alone_and_nobody_waits(site: Site) -> None:
    stop, found = threading.Event(), []

    def user(number: int) -> None:
        seed = 1000 * number
        while not stop.is_set():
            seed += 1
            found.append(site.ask(seed, tokens=300, timeout=LONGEST_S + 5))

    users = [threading.Thread(target=user, args=(n,)) for n in (2, 3)]
    for one in users:
        one.start()
    time.sleep(3)
    site.services("restart", "cache")
    time.sleep(5)
    stop.set()
    for one in users:
        one.join()
    assert len(found) >= 6
    assert {got["status"] for got in found} == {200}, found
    print("longest:", max(got["seconds"] for got in found), "of", len(found))
    assert max(got["seconds"] for got in found) < LONGEST_S
    until(lambda: is_registered(site), 60, "vLLM registers again")
    _, files = new_files(site, 104)
    assert len(files) >= 8


def test_damaged_files_give_the_right_answer(site: Site) -> None:
    damage = {
        105: "truncate -s 1000 {}",
        106: "truncate -s 0 {}",
        107: "head -c 100000 /dev/urandom >> {}",
    }
    right = {}
    for seed, command in damage.items():
        right[seed], files = new_files(site, seed)
        path = f"{site.namespace()}/{files[len(files) // 2]}"
        site.host.root("sh", "-c", command.format(f"'{path}'"))
    # their memory of it is taken from both, and the sweep at the start from the server
    for name in ("runner", "cache"):
        site.kill(name)
    time.sleep(1)
    site.wait_good()
    for seed in damage:
        got = site.ask(seed)
        assert (got["status"], got["text"]) == (200, right[seed]["text"]), (seed, got)


def test_both_are_killed_during_a_write(site: Site) -> None:
    before = len(site.chunks())
    asked = in_background(site, 108, tokens=8100)
    until(lambda: len(site.chunks()) > before, 60, "a write begins")
    for name in ("runner", "cache"):
        site.kill(name)
    assert answer(asked, 150)["status"] in (0, 200, 500)
    time.sleep(1)
    site.wait_good()
    partly = site.ask(108, tokens=8100)
    assert partly["status"] == 200
    # the same without any cache
    site.services("stop")
    site.host.root("sh", "-c", f"find {site.namespace()} -type f ! -name '.*' -delete")
    site.services("ensure")
    fresh = site.ask(108, tokens=8100)
    assert (fresh["cached"], fresh["text"]) == (0, partly["text"])


def test_the_tier_is_read_only(site: Site) -> None:
    first, _ = new_files(site, 109)
    site.host.root("mount", "-o", "remount,ro", TIER)
    try:
        got = site.ask(110)
        assert got["status"] == 200
        assert got["seconds"] < LONGEST_S
        assert site.ask(109)["text"] == first["text"]
    finally:
        site.host.root("mount", "-o", "remount,rw", TIER)
    _, files = new_files(site, 111)
    assert len(files) >= 8


def test_the_tier_is_full_to_the_last_byte(site: Site) -> None:
    filler = f"{TIER}/filler"
    site.host.root("sh", "-c", f"cat /dev/zero > {filler} 2>/dev/null; sync", ok=False, timeout=300)
    try:
        got = site.ask(112)
        assert got["status"] == 200
        assert got["seconds"] < LONGEST_S
    finally:
        site.host.root("rm", "-f", filler)
    # the pruner makes room by itself, so that what is stored next is whole
    _, files = new_files(site, 113)
    sizes = site.host.root("sh", "-c", f"cd {site.namespace()} && stat -c %s -- {' '.join(files)}")
    assert len(files) >= 8
    assert len(set(sizes.split())) == 1


def test_sigterm_under_load(site: Site) -> None:
    asked = [in_background(site, 120 + n, tokens=2100, max=64, timeout=150) for n in range(6)]
    time.sleep(2)
    began = time.monotonic()
    site.services("stop", "runner")
    got = [answer(one, STOP_S) for one in asked]
    took = time.monotonic() - began
    print(f"SIGTERM under load: {took:.1f} s,", [(g["status"], g["why"]) for g in got])
    assert took < STOP_S
    for one in got:
        assert one["status"] == 200 or one["why"], one
    assert site.rows()["runner"]["state"] == "STOPPED"


def test_what_a_crash_left_in_shm_is_gone_after_the_start(site: Site) -> None:
    site.services("stop")
    names = (f"lmcache_l1_pool_{shm_name(Settings().paths)}", "lmcache_kv_1_2", "psm_deadbeef")
    for name in names:
        site.host.root("setpriv", "--reuid=kvhost", "--regid=kvhost", "--clear-groups",
                       "sh", "-c", f"head -c 1000000 /dev/zero > /dev/shm/{name}")  # fmt: skip
    site.services("start")
    site.wait_good()
    left = site.host.root("ls", "-l", "/dev/shm")
    assert "lmcache_kv_1_2" not in left
    assert "psm_deadbeef" not in left
    assert site.ask(130)["status"] == 200


def test_the_tier_is_not_mounted_at_boot(site: Site) -> None:
    host = site.host
    mount = f"/etc/systemd/system/{MOUNT}"
    host.root("sed", "-i", "s#/dev/tier#/dev/gone#", mount)
    host.reboot()
    until(lambda: host.root("systemctl", "is-failed", MOUNT, ok=False).strip()
          == "failed", 120, "the mount fails")  # fmt: skip
    time.sleep(3)
    rows = site.rows()
    assert not rows["cache"]["alive"]
    assert not rows["runner"]["alive"]
    assert host.root("ls", "-A", TIER) == ""  # nothing went to the disk below
    assert "Dependency failed" in host.root("journalctl", "-b", "--no-pager")
    assert site.ask(131, timeout=5)["status"] == 0
    said = site.services("ensure")
    assert site.rows()["cache"]["state"] != "RUNNING", said
    host.root("sed", "-i", "s#/dev/gone#/dev/tier#", mount)
    host.root("systemctl", "daemon-reload")
    host.root("systemctl", "start", MOUNT)
    site.services("ensure")
    site.wait_good()
    assert site.ask(109)["status"] == 200
    assert host.root("ls", f"{BASE}/run").count("failed") == 0
