"""Healthy and broken set-ups of the real engine: each must get its verdict, with its cause named.

One cache server and one runner serve the whole file, as kvhost describes them. Most set-ups use the
event "cache", which restarts no engine; it has few blocks of KV, so that its memory is soon full.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvhost.onhost.ready import registered
from kvhost.services.second_pair import second_pair
from kvhost.services.vllm import vllm_config
from kvhost.verdict.evidence import Evidence, parse_events
from kvhost.verdict.judge import judge
from tests.e2e_tools import BASE
from tests.engine_pair import NAMESPACE, REPO, Json, Pair, restart
from tests.engine_setups import SETUPS, TMPFS, Beside, Broken, get

pytestmark = [pytest.mark.verdict, pytest.mark.engine]
full = pytest.mark.full
BLOCKS = 64  # of 128 tokens: the prompts of one test fit, and little more


@pytest.fixture(scope="module")
def pair(engine: Path) -> Iterator[Pair]:
    base = Path(f"{BASE}-verdict")
    subprocess.run(["rm", "-rf", str(base)], check=True)
    one = Pair(base, engine)
    one.make()
    config = vllm_config(one.settings, one.paths, with_key=False)
    one.configure({**config, "num-gpu-blocks-override": BLOCKS, "max-model-len": 4096})
    try:
        one.start()
        wait_for(one)
        yield one
    finally:
        one.stop()
        subprocess.run(["rm", "-rf", str(base)], check=True)


def wait_for(pair: Pair, seconds: float = 240) -> None:
    """Until both answer and the engine is registered."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            get(f"http://127.0.0.1:{pair.ports[0]}/health")
            status = get(f"http://127.0.0.1:{pair.ports[2]}/status")
            if registered(json.loads(status)):
                return
        except OSError as error:
            assert time.monotonic() < deadline, (error, pair.log("runner")[-3000:])
        time.sleep(0.5)


def collect(pair: Pair, **changed: Any) -> list[Evidence]:
    state = pair.base / "state"
    # the runner is the same all the time: the requests of a set-up before this are no reason
    config = pair.config(**{"events": ["cache"], "disrupt": True, **changed})
    (state / "config.json").write_text(json.dumps(config))
    argv = [sys.executable, str(REPO / "kvhost/onhost/evidence.py")]
    argv += ["--config", str(state / "config.json"), "--out", str(state / "out.json")]
    done = subprocess.run(argv, stderr=subprocess.PIPE, text=True, timeout=900, check=False)
    assert done.returncode in (0, 3), done.stderr
    text = (state / "out.json").read_text()
    keep = os.environ.get("KVHOST_TEST_KEEP")  # a directory: evidence for tests/fixtures
    if keep:
        Path(keep, f"{int(time.time())}-{config['events'][0]}.json").write_text(text)
    return parse_events(text)


@pytest.mark.parametrize(
    "setup",
    [
        pytest.param(one, id=one.what.replace(" ", "-"), marks=[full] if one.full else [])
        for one in SETUPS
    ],
)
def test_a_set_up_is_judged_as_it_is(pair: Pair, setup: Broken) -> None:
    service = pair.describe()["cache"]
    # without the sweep: what lies there is what the server finds
    argv = setup.argv(service.argv) if setup.argv else service.argv
    pair.write(cache={"before": (), "argv": argv})
    between = pair.base / "between.sh"
    try:
        if setup.argv:
            if setup.prepare:
                setup.prepare(pair)
            restart(pair.base, "cache")
            wait_for(pair)
        elif setup.prepare:
            setup.prepare(pair)
        between.write_text(f"set -e; cd tier/{NAMESPACE}\n{setup.between}\n")
        config = dict(setup.config)
        services = config.pop("services", {})
        if services:
            known = pair.config()["services"]
            config["services"] = {n: {**known[n], **services.get(n, {})} for n in known}
        with (setup.beside or Beside)(pair) as beside:
            (found,) = collect(pair, **config, **beside.config)
    finally:
        between.unlink(missing_ok=True)
        if setup.argv or "etc/" in setup.between:  # it is not the server of before
            pair.write(cache={"before": ()})
            restart(pair.base, "cache")
            wait_for(pair)
        for path in pair.namespace.glob("*.data"):
            path.unlink()
        subprocess.run(["rm", "-rf", str(Path(TMPFS).parent)], check=True)
    verdict = judge(found)
    unmet = [(c.id, c.figure, c.threshold) for c in verdict.conditions if c.met is not True]
    causes = [cause.slug for cause in verdict.causes]
    steps = [(s.name, s.error) for s in found.steps if s.error]
    assert verdict.persisted == setup.persisted, (causes, unmet, steps)
    assert (causes[0] if causes else None) == setup.cause, (causes, unmet, steps)


def other(pair: Pair) -> Json:
    api = "http://127.0.0.1:{api_port}"
    return {
        "start": [sys.executable, str(REPO / "kvhost/onhost/launch.py")],
        "services": second_pair(pair.settings, pair.paths, str(pair.namespace), with_key=False),
        "api_base": api,
        "metrics_url": f"{api}/metrics",
        "cache_http": "http://127.0.0.1:{cache_http_port}",
    }


@full
@pytest.mark.parametrize("event", ["runner", "both", "kill", "other"])
def test_a_healthy_pair_passes_every_event(pair: Pair, event: str) -> None:
    (found,) = collect(pair, events=[event], other=other(pair) if event == "other" else None)
    verdict = judge(found)
    unmet = [(c.id, c.figure, c.threshold) for c in verdict.conditions if c.met is not True]
    steps = [(s.name, s.error) for s in found.steps if s.error]
    assert verdict.persisted == "PASS", (verdict.summary, unmet, steps)
    assert not list(pair.namespace.glob("*.data"))


@full
@pytest.mark.parametrize("number", range(20))
def test_a_healthy_pair_passes_each_time(pair: Pair, number: int) -> None:
    (found,) = collect(pair, events=["both"])
    verdict = judge(found)
    unmet = [(c.id, c.figure, c.threshold) for c in verdict.conditions if c.met is not True]
    assert verdict.persisted == "PASS", (verdict.summary, unmet)
