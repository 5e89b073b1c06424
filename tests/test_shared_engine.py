"""Two cache servers and two runners with the real engine, and one store: what one computed is
served on the other; another namespace misses; store away, or another password: both answer."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvhost.services import shared
from kvhost.services.service import Service
from kvhost.services.vllm import cache_service, runner_service
from kvhost.verdict.shared import judge_shared
from tests.e2e_tools import BASE
from tests.engine_pair import Pair, restart, start, stop
from tests.s3_tools import SwiftServer, s3
from tests.store_tools import PASSWORD, RedisServer, load, redis

pytestmark = [
    pytest.mark.fleet, pytest.mark.engine, pytest.mark.full,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
]  # fmt: skip
SCRIPT = Path(__file__).parents[1] / "kvhost/onhost/shared_check.py"
PROMPT = "the same words again and again " * 150


@dataclass
class Half(Pair):
    """One of the two, as a host of its own. ``name``: of its namespace."""

    name: str = "ns-" + "e1" * 12
    number: int = field(default=0)

    @property
    def namespace(self) -> Path:
        return Path(self.paths.tier_dir) / self.name

    def secret(self, password: str) -> None:
        path = Path(shared.password_path(self.paths))
        path.parent.mkdir(exist_ok=True)
        path.write_text(password + "\n")
        path.chmod(0o600)

    def check(self, step: str, seed: str, chunks: list[str]) -> dict[str, Any]:
        store = {"place": shared.place(self.settings, self.paths), "namespace": self.name,
                 "password_file": shared.password_path(self.paths)}  # fmt: skip
        told = {**self.config(), "step": step, "seed": seed, "chunks": chunks, "store": store}
        path = self.base / "state/check.json"
        path.write_text(json.dumps(told))
        argv = [sys.executable, str(SCRIPT), "--config", str(path)]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return answer

    def store(self) -> dict[str, Any]:
        url = f"http://127.0.0.1:{self.ports[2]}/status"
        with urllib.request.urlopen(url, timeout=10) as reply:
            found = load_check().shared_state(json.loads(reply.read()))
        assert found is not None
        return dict(found)

    def answers(self, words: str, tokens: int = 4) -> tuple[str, float]:
        """The text, and the seconds that it took."""
        body = {"model": "kvhost-builtin", "prompt": words, "max_tokens": tokens, "temperature": 0}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.ports[0]}/v1/completions", json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )  # fmt: skip
        began = time.monotonic()
        with urllib.request.urlopen(request, timeout=120) as reply:
            text = json.loads(reply.read())["choices"][0]["text"]
        return str(text), time.monotonic() - began

    def until_ready(self) -> None:
        deadline = time.monotonic() + 240
        while True:
            try:
                self.answers("ready?", 1)
                return
            except OSError:
                assert time.monotonic() < deadline, self.log("runner")[-3000:]
                time.sleep(0.5)


def load_check() -> Any:
    return load("shared_check")


def described(half: Half) -> list[Service]:
    ours = half.settings
    return [cache_service(ours, ours.paths, str(half.namespace)),
            runner_service(ours, ours.paths, with_key=False)]  # fmt: skip


@dataclass
class Two:
    a: Half
    b: Half
    server: RedisServer | SwiftServer

    def judged(self) -> tuple[str, dict[str, bool | None], dict[str, Any]]:
        seed = secrets.token_hex(32)
        first = self.a.check("write", seed, [])
        second = self.b.check("read", seed, first["chunks"])
        word, conditions = judge_shared(first, second, min_hit=0.95)
        return word, {one.id: one.met for one in conditions}, second


STORES: dict[str, Any] = {
    "redis": partial(redis, lines=["maxmemory 1gb", "maxmemory-policy allkeys-lru"]),
    "s3": s3,
}


@pytest.fixture(scope="module", params=STORES)
def two(engine: Path, request: pytest.FixtureRequest) -> Iterator[Two]:
    top = BASE.with_name(BASE.name + "-two")
    shutil.rmtree(top, ignore_errors=True)
    top.mkdir(parents=True)
    (top / "password").write_text(PASSWORD)
    with STORES[request.param](top / "store") as server:
        data = {**server.settings(), "shared_tier_password_file": str(top / "password")}
        made = Two(Half(top / "a", engine, data=data), Half(top / "b", engine, data=data), server)
        try:
            for half in (made.a, made.b):
                half.base.mkdir()
                half.make()
                half.secret(PASSWORD)
                half.start()
            for half in (made.a, made.b):
                half.until_ready()
            yield made
        finally:
            for half in (made.a, made.b):
                half.stop()
            shutil.rmtree(top, ignore_errors=True)


def test_what_a_computed_is_served_on_b(two: Two) -> None:
    word, met, second = two.judged()
    assert word == "PASS", (met, second)
    assert second["removed_from_store"] > 0
    assert two.server.names() == []  # nothing of the test is left
    assert list(two.a.namespace.glob("*.data")) == []


def test_another_namespace_misses_and_is_said(two: Two) -> None:
    stop(two.b.base, "cache")
    two.b.name = "ns-" + "f2" * 12
    two.b.make()
    start(two.b.base, "cache")
    until_registered(two.b)
    word, met, second = two.judged()
    assert (word, met["same_namespace"], met["hit"]) == ("INCONCLUSIVE", False, False), second
    assert second["requests"]["again"]["usage_cached_tokens"] == 0
    stop(two.b.base, "cache")
    two.b.name = two.a.name
    two.b.make()
    start(two.b.base, "cache")
    until_registered(two.b)


#: what LMCache's server says of a runner, with a GPU and without
REGISTERED = "Registered KV cache|Registered non-GPU context"


def until_registered(half: Half) -> None:
    """The runner goes on, and registers with the new cache server within some heartbeats."""
    deadline = time.monotonic() + 90
    while not re.search(REGISTERED, half.log("cache").rpartition("zmq cache server is running")[2]):
        assert time.monotonic() < deadline, half.log("cache")[-3000:]
        time.sleep(0.5)
    time.sleep(2 * half.settings.heartbeat_s)


def test_with_the_store_away_both_answer_as_before(two: Two) -> None:
    before = [half.answers(PROMPT)[0] for half in (two.a, two.b)]
    two.server.stop(signal.SIGKILL)
    for half, text in zip((two.a, two.b), before, strict=True):
        assert half.answers(PROMPT)[0] == text
        got, _ = half.answers("something else " * 200)
        assert got
    assert not two.a.store()["answers"]
    # started anew with the store away: it comes up, and answers from its own tier
    restart(two.a.base, "cache")
    until_registered(two.a)
    assert two.a.answers(PROMPT)[0] == before[0]
    assert two.a.log("cache").count("shared tier is not used") < 6
    two.server.start()
    deadline = time.monotonic() + 20
    while not (two.a.store()["answers"] and two.b.store()["answers"]):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert two.judged()[0] == "PASS"


def test_a_store_that_hangs_costs_seconds_once(two: Two) -> None:
    two.server.hold()
    try:
        took = [two.a.answers(f"hanging {n} " * 300)[1] for n in range(3)]
    finally:
        two.server.go_on()
    print("seconds with a store that hangs:", [round(one, 2) for one in took])
    assert max(took) < 15
    assert not two.a.store()["answers"] or took[0] > 0.9


def test_another_password_is_one_line_and_no_secret_is_seen(two: Two) -> None:
    two.a.secret("wrong-planted-77aa90cc11ee")
    before = two.a.log("cache").count("it refuses the ")
    restart(two.a.base, "cache")
    until_registered(two.a)
    assert two.a.answers(PROMPT)[0]
    deadline = time.monotonic() + 60  # on a busy machine the new server is long in coming
    while two.a.log("cache").count("it refuses the ") == before:
        assert time.monotonic() < deadline, two.a.log("cache")[-3000:]
        time.sleep(0.5)
    assert two.a.log("cache").count("it refuses the ") == before + 1
    assert not two.a.store()["answers"]
    lines = Path("/proc").glob("[0-9]*/cmdline")
    seen = b"".join(read(path) for path in lines)
    logs = "".join(half.log(name) for half in (two.a, two.b) for name in ("cache", "runner"))
    for word in (PASSWORD, "wrong-planted-77aa90cc11ee"):
        assert word.encode() not in seen
        assert word not in logs
    for service in described(two.a):
        assert PASSWORD not in service.launch_spec(two.a.paths)


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
