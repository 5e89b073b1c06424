"""Two runners of the real engine on one host: what one computed is served to the other.

Full tier. One installation serves all tests of this file, so their order is that of a host's life.
"""

from __future__ import annotations

import json
import random
import re
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from kvhost.onhost.ready import registered
from tests.e2e_tools import API_KEY, Done, Site, free_ports

pytestmark = [pytest.mark.e2e, pytest.mark.engine, pytest.mark.runners, pytest.mark.full]

TOKENS = 1100  # four whole chunks of 256, and a rest that is never cached
CACHED = 1024
L1, L2 = "lmcache_mp_lookup_hit_l1_tokens_total", "lmcache_mp_lookup_hit_l2_tokens_total"
HITS = "vllm:external_prefix_cache_hits_total"


class Two:
    """The installation with both runners."""

    def __init__(self, site: Site) -> None:
        self.site = site
        [self.second] = free_ports(1)
        entry = {"name": "second", "api_port": self.second, "served_model_name": "two"}
        self.data = {"more_runners": json.dumps([entry]), "verify": "never"}
        self.ports = {"kvhost-builtin": site.ports[0], "two": self.second}

    def up(self) -> Done:
        return self.site.up(None, **self.data)

    def ask(self, model: str, prompt: list[int]) -> tuple[int, str]:
        """(cached tokens of the prompt, answer)."""
        body = {"model": model, "prompt": prompt, "max_tokens": 8, "temperature": 0}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.ports[model]}/v1/completions",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json", "Authorization": f"Bearer {API_KEY}"},
        )
        with urllib.request.urlopen(request, timeout=180) as reply:
            told = json.load(reply)
        details = told["usage"]["prompt_tokens_details"] or {}
        return details.get("cached_tokens") or 0, told["choices"][0]["text"]

    def counters(self) -> dict[str, float]:
        """Of the cache server, and hits of the second runner; one that has not begun is 0."""
        texts = [read(f"http://127.0.0.1:{self.site.ports[2]}/metrics")]
        texts.append(read(f"http://127.0.0.1:{self.second}/metrics"))
        return {name: sum(total(text, name) for text in texts) for name in (L1, L2, HITS)}

    def files(self) -> int:
        return len(list((self.site.base / "tier").glob("ns-*/*.data")))

    def stored(self, before: int) -> None:
        """Until the chunks of one prompt more lie in the tier."""
        until(lambda: self.files() >= before + CACHED // 256)

    def registered(self) -> int | None:
        """Engines that the cache server knows; None while it does not answer."""
        try:
            return registered(json.loads(read(f"http://127.0.0.1:{self.site.ports[2]}/status")))
        except urllib.error.URLError:
            return None

    def status(self) -> dict[str, Any]:
        text = self.site.services("--json", "status").text
        rows: dict[str, Any] = json.loads(text.splitlines()[-1])["services"]
        return rows


def read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as reply:
        return str(reply.read().decode())


def total(text: str, name: str) -> float:
    """Sum of a counter over its labels."""
    found = re.findall(rf"(?m)^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", text)
    return sum(map(float, found))


def until(ready: Any, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline, "not within the time"
        time.sleep(0.2)


def prompt(seed: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(20, 240) for _ in range(TOKENS)]


@pytest.fixture(scope="module")
def two(site: Site) -> Two:
    made = Two(site)
    done = made.up()
    assert done.code == 0, done.text[-6000:]
    return made


def test_both_run_and_a_second_deploy_changes_nothing(two: Two) -> None:
    rows = two.status()
    assert list(rows) == ["cache", "runner", "runner-second", "pruner"]
    assert all(row["state"] == "RUNNING" and row["current"] for row in rows.values()), rows
    done = two.up()
    assert (done.code, done.changed()) == (0, []), done.text[-3000:]


def test_what_one_computed_the_cache_server_serves_to_the_other(two: Two) -> None:
    before, files = two.counters(), two.files()
    cold, answer = two.ask("kvhost-builtin", prompt(1))
    two.stored(files)
    shared, same = two.ask("two", prompt(1))
    after = two.counters()
    assert (cold, shared) == (0, CACHED)
    assert same == answer
    assert after[HITS] - before[HITS] == CACHED
    assert after[L1] - before[L1] == CACHED  # from the memory of the cache server
    assert two.ask("two", prompt(2))[0] == 0  # which nobody has computed


def test_and_from_l2_after_l1_was_emptied(two: Two) -> None:
    files = two.files()
    cold, answer = two.ask("two", prompt(3))
    two.stored(files)
    runners = {name: two.site.record(name)["pid"] for name in ("runner", "runner-second")}
    assert two.site.services("restart", "cache").code == 0
    # it answers after two heartbeats; both notice, and register again by themselves
    until(lambda: two.registered() == 2)
    before = two.counters()
    shared, same = two.ask("kvhost-builtin", prompt(3))
    after = two.counters()
    assert (cold, shared) == (0, CACHED)
    assert same == answer
    assert after[L2] - before[L2] == CACHED
    assert after[L1] == before[L1]
    assert {name: two.site.record(name)["pid"] for name in runners} == runners


def test_one_that_is_taken_out_of_the_settings_goes_and_the_other_serves_on(two: Two) -> None:
    base, first = two.site.base, two.site.record("runner")["pid"]
    gone = two.site.record("runner-second")["pid"]
    done = two.site.up(verify="never")
    assert done.code == 0, done.text[-4000:]
    assert list(two.status()) == ["cache", "runner", "pruner"]
    assert two.site.record("runner")["pid"] == first
    assert [path.name for path in (base / "etc").iterdir() if "second" in path.name] == []
    until(lambda: not alive(gone))
    assert two.ask("kvhost-builtin", prompt(4))[0] == 0
    assert two.site.up(verify="never").changed() == []


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
