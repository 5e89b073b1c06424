"""vLLM's own tiering through the real deploy: a verdict, no change, the limit, and there and back.

In the order of a host's life, as test_e2e.py; one installation serves them all.
"""

from __future__ import annotations

import json
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.e2e_tools import API_KEY, Done, Site

pytestmark = [pytest.mark.e2e, pytest.mark.engine, pytest.mark.full]
NATIVE: dict[str, Any] = {"cache_kind": "native"}


@pytest.fixture(scope="module")
def first(site: Site) -> Done:
    return site.up(**NATIVE)


@pytest.fixture
def provisioned(site: Site, first: Done) -> Site:
    assert first.code == 0, first.text[-6000:]
    return site


def statuses(site: Site) -> dict[str, Any]:
    text = site.services("--json", "status").text.splitlines()[-1]
    loaded: dict[str, Any] = json.loads(text)["services"]
    return loaded


def namespaces(site: Site) -> dict[str, int]:
    """Name -> chunks in it."""
    found = sorted((site.base / "tier").glob("ns-*"))
    return {
        path.name: sum(p.suffix in (".bin", ".data") for p in path.rglob("*")) for path in found
    }


def ask(site: Site, number: int, tokens: int = 2056) -> int:
    """Tokens of a prompt, the same for the same number, that came from a cache."""
    prompt = [20 + (7 * n + 31 * number) % 200 for n in range(tokens)]
    body = {"model": "kvhost-builtin", "prompt": prompt, "max_tokens": 1, "temperature": 0}
    request = urllib.request.Request(
        f"http://127.0.0.1:{site.ports[0]}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {API_KEY}"},
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        details = json.load(reply)["usage"]["prompt_tokens_details"] or {}
    return details.get("cached_tokens") or 0


def test_from_nothing_to_a_verdict(site: Site, first: Done) -> None:
    assert first.code == 0, first.text[-6000:]
    assert "event runner: persisted PASS" in first.text
    [report] = site.reports()
    [result] = report["results"]
    assert result["verdict"]["persisted"] == "PASS" and result["evidence"]["config"]["native"]
    by_id = {c["id"]: c for c in result["verdict"]["conditions"]}
    assert all(c["met"] for c in by_id.values()), by_id
    assert by_id["l2_hits"]["figure"] == 8192 and by_id["moved_misses"]["met"]
    assert result["evidence"]["requests"]["restored"]["usage_cached_tokens"] == 8192


def test_nothing_is_there_of_a_cache_server(provisioned: Site, first: Done) -> None:
    assert set(statuses(provisioned)) == {"runner", "pruner"}
    assert not list(provisioned.base.glob("*/cache.*")), "no description, record or log of one"
    processes = subprocess.run(["ps", "axww", "-o", "args"], capture_output=True, check=True).stdout
    assert f"{provisioned.base}/current/bin/lmcache".encode() not in processes
    plan, _, _ = first.text.partition("--> Starting operation")
    assert "kvhost_offload.py" in plan.replace("\n", " ")
    for words in ("restarts the cache server", "starts the cache server", "cache server's ports"):
        assert words not in plan


def test_again_nothing_changes(provisioned: Site) -> None:
    done = provisioned.up(**NATIVE)
    assert done.code == 0, done.text[-4000:]
    assert done.changed() == [] and "nothing has changed since" in done.text


def test_files_are_the_services_alone(provisioned: Site) -> None:
    assert ask(provisioned, 1) == 0
    deadline = time.monotonic() + 30
    while not (found := list((provisioned.base / "tier").rglob("*.bin"))):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert {path.owner() for path in found} == {"kvhost"}
    assert {path.stat().st_mode & 0o7777 for path in found} == {0o600}
    folders = {parent for path in found for parent in path.parents[:4]}
    assert {path.stat().st_mode & 0o7777 for path in folders} == {0o700}


def test_the_limit_is_kept_across_restarts(provisioned: Site) -> None:
    """0.1 GiB is 25 chunks; three starts with 10 prompts of 8 chunks each."""
    data = {**NATIVE, "cache_limit_gib": "0.1", "verify": "never", "pruner_interval_s": "1.0"}
    assert provisioned.up(**data).code == 0
    for start in range(3):
        for number in range(10):
            ask(provisioned, 100 * start + number)
        time.sleep(3)
        used = sum(p.stat().st_size for p in (provisioned.base / "tier").rglob("*.bin"))
        assert 0 < used <= 0.1 * 2**30, start
        assert provisioned.services("restart", "runner").code == 0
        ready(provisioned)
    assert ask(provisioned, 209) == 2048, "the newest is still there"
    status = json.loads((provisioned.base / "log/pruner-status.json").read_text())
    assert status["state"] == "ok" and not status["left_alone"]


def ready(site: Site, seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{site.ports[0]}/health", timeout=5).close()
            return
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.5)


def test_to_the_cache_server_and_back(provisioned: Site) -> None:
    before = namespaces(provisioned)
    [own] = [name for name, chunks in before.items() if chunks]
    there = provisioned.up()
    assert there.code == 0, there.text[-5000:]
    assert "event both: persisted PASS" in there.text
    assert set(statuses(provisioned)) == {"cache", "runner", "pruner"}
    after = namespaces(provisioned)
    assert after[own] == before[own], "the files of the other kind stay"
    assert len(after) == len(before) + 1

    ask(provisioned, 500)
    cache = provisioned.record("cache")["pid"]
    back = provisioned.up(**NATIVE, verify="never")
    assert back.code == 0, back.text[-5000:]
    assert set(statuses(provisioned)) == {"runner", "pruner"}
    assert (
        not Path(f"/proc/{cache}").exists() and not (provisioned.base / "etc/cache.json").exists()
    )
    assert not [p for p in Path("/dev/shm").iterdir() if provisioned.base.name in p.name]
    assert ask(provisioned, 500) == 0, "nothing of LMCache's files"
    assert ask(provisioned, 209) == 2048, "what vLLM wrote before is found again"
    assert namespaces(provisioned).keys() == after.keys()
    assert provisioned.up(**NATIVE, verify="never").changed() == []
