"""ready.py against small HTTP servers in the place of vLLM and LMCache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from kvhost.onhost import ready

SCRIPT = str(Path(ready.__file__))
#: what LMCache 0.5.6 answers, cut down to what is read
STATUS = {
    "modules": {
        "lmcache_driven": {"registered_gpu_ids": []},
        "engine_driven": {"registered_non_cuda_instance_ids": [4711]},
    }
}


class Double(ThreadingHTTPServer):
    """A double of one of the two servers: path -> (status, body), and what it was asked."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, Any]] = {}
        self.asked: list[tuple[str, str | None, Any]] = []
        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Double

    def answer(self, body: Any) -> None:
        self.server.asked.append((self.path, self.headers.get("Authorization"), body))
        status, data = self.server.answers.get(self.path, (404, {}))
        raw = json.dumps(data).encode() if not isinstance(data, str) else data.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def do_GET(self) -> None:
        self.answer(None)

    def do_POST(self) -> None:
        self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Place:
    def __init__(self, root: Path) -> None:
        self.root, self.vllm, self.cache = root, Double(), Double()
        for name in ("run", "log", "state"):
            (root / name).mkdir()
        self.cache.answers = {"/healthcheck": (200, {}), "/status": (200, STATUS)}
        self.vllm.answers = {"/health": (200, {}), "/v1/completions": (200, {"choices": []})}
        self.runner(1)

    def runner(self, pid: int) -> None:
        record = {"pid": pid, "start_ticks": 5}
        (self.root / "run" / "runner.json").write_text(json.dumps(record))

    def fail(self, name: str, when: float, exit_code: int = 1) -> None:
        data = {"why": f"{name} is ill", "exit": exit_code, "count": 1, "failed_unix": when}
        path = self.root / "run" / f"{name}.failed"
        path.with_suffix(".new").write_text(json.dumps(data))
        path.with_suffix(".new").replace(path)

    def argv(self, *more: str) -> list[str]:
        argv = [sys.executable, SCRIPT, "--base", str(self.root), "--model", "m"]
        return [*argv, "--api", self.vllm.url, "--cache", self.cache.url, *more]

    def run(
        self, *more: str, rc: int = 0, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            self.argv(*more), capture_output=True, text=True, timeout=30, check=False,
            env={**os.environ, **(env or {})},
        )  # fmt: skip
        assert done.returncode == rc, done.stderr
        return done

    def once(self, *words: str, rc: int = 0) -> Any:
        return json.loads(self.run("--once", *words, rc=rc).stdout)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    for server in (made.vllm, made.cache):
        server.shutdown()
        server.server_close()


def test_ready_after_a_token_with_the_key_and_past_any_proxy(place: Place, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("k-123\n")
    proxy = {"http_proxy": "http://127.0.0.1:9", "no_proxy": ""}
    said = place.run("--key-file", str(tmp_path / "key"), env=proxy).stderr
    assert "ready after" in said
    path, key, body = place.vllm.asked[-1]
    assert (path, key) == ("/v1/completions", "Bearer k-123")
    assert body == {"model": "m", "prompt": [1], "max_tokens": 1, "temperature": 0}
    assert "k-123" not in said


@pytest.mark.parametrize("key", ["a\nb", "schlüssel"])
def test_a_key_that_no_header_can_hold_is_refused_and_not_shown(
    place: Place, tmp_path: Path, key: str
) -> None:
    (tmp_path / "key").write_text(key)
    said = place.run("--key-file", str(tmp_path / "key"), rc=1).stderr
    assert "one line of printable ASCII" in said
    assert key not in said
    assert "Traceback" not in said


def test_own_requests_are_counted_for_this_runner_alone(place: Place) -> None:
    counted = place.root / "state" / "own-requests.json"
    place.run()
    place.run()
    assert json.loads(counted.read_text()) == {"pid": 1, "start_ticks": 5, "count": 2}
    place.runner(2)
    place.run()
    assert json.loads(counted.read_text())["count"] == 1
    place.once()
    assert json.loads(counted.read_text())["count"] == 1


@pytest.mark.parametrize(
    ("server", "path", "answer", "said"),
    [
        ("cache", "/healthcheck", (503, "engine not initialized"), "the cache server: engine not"),
        ("vllm", "/health", (500, ""), "vLLM: HTTP 500"),
        ("cache", "/status", (200, {"a": {"registered_gpu_ids": []}}), "registration"),
        ("cache", "/status", (200, "<html>"), "not JSON: <html>"),
    ],
)
def test_once_says_what_is_missing(
    place: Place, server: str, path: str, answer: tuple[int, Any], said: str
) -> None:
    assert place.once() == {"ready": True, "missing": None, "shared_away": None}
    getattr(place, server).answers[path] = answer
    missing = place.once(rc=1)
    assert missing["ready"] is False
    assert said in missing["missing"]


def test_each_rank_of_each_runner_must_be_registered(place: Place) -> None:
    assert place.once("--engines", "1")["ready"] is True
    missing = place.once("--engines", "2", rc=1)["missing"]
    assert missing == "vLLM's registration with the cache server, 1 of 2"


def test_a_status_that_does_not_speak_of_engines_is_no_reason_to_wait(place: Place) -> None:
    place.cache.answers["/status"] = (404, {})
    assert place.once()["ready"] is True
    place.cache.answers["/status"] = (200, {"l1": {"used": 1}})
    assert place.once()["ready"] is True


def test_a_shared_tier_that_is_away_is_said_and_waited_for_by_nobody(place: Place) -> None:
    state = {"answers": False, "why": "redis://10.0.0.5:6379: Connection refused"}
    adapters = [{"type": "fs"}, {"type": "kvhost_shared", "shared": state}]
    place.cache.answers["/status"] = (200, {**STATUS, "storage": {"l2_adapters": adapters}})
    told = place.once()
    assert told["ready"] is True
    assert told["shared_away"] == state["why"]
    done = place.run("--timeout", "5")
    assert f"without the shared tier: {state['why']}" in done.stderr
    state["answers"] = True
    assert place.once()["shared_away"] is None


def test_an_engine_may_be_registered_for_any_way_of_transfer() -> None:
    none: dict[str, Any] = {"registered_gpu_ids": []}
    some: dict[str, Any] = {"registered_non_cuda_instance_ids": [1]}
    assert ready.registered({"a": none, "b": some}) == 1
    assert ready.registered({"a": some, "b": some}) == 2
    assert ready.registered({"a": {"b": none}}) == 0
    assert ready.registered({"a": [1]}) is None


def test_a_time_out_names_what_is_missing_and_shows_the_logs(place: Place) -> None:
    place.vllm.answers["/v1/completions"] = (400, {"error": "no such model"})
    lines = [f"line {n}" for n in range(100)]
    (place.root / "log" / "runner.log").write_text("\n".join(lines))
    said = place.run("--timeout", "0.5", rc=1).stderr
    assert "missing: a first token: HTTP 400" in said
    assert "no such model" in said
    assert "  | line 99" in said
    assert "line 60\n" not in said
    assert "no log" in said  # of the cache server


def waiting(place: Place) -> subprocess.Popen[str]:
    place.vllm.answers["/health"] = (503, "starting")
    process = subprocess.Popen(place.argv("--timeout", "60"), stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 20
    while not place.vllm.asked:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return process


def test_the_second_failure_of_a_service_ends_the_wait_with_its_log(place: Place) -> None:
    place.fail("cache", 1.0)  # an old story
    (place.root / "log" / "runner.log").write_text("out of memory\n")
    with waiting(place) as process:
        assert process.stderr is not None
        place.fail("runner", 2.0)
        shown: list[str] = []
        while not shown or "out of memory" not in shown[-1]:
            shown.append(process.stderr.readline())
            assert shown[-1]
        assert "runner: runner is ill\n" in shown
        with pytest.raises(subprocess.TimeoutExpired):  # one failure alone is not the end
            process.wait(2.5)
        place.fail("runner", 3.0)
        assert process.wait(10) == 1
        said = process.stderr.read()
    assert "not ready: runner does not start" in said
    assert "cache is ill" not in said


def test_an_unusable_description_ends_the_wait_at_once(place: Place) -> None:
    with waiting(place) as process:
        place.fail("cache", 2.0, exit_code=78)
        assert process.wait(10) == 1
        assert process.stderr is not None
        assert "not ready: cache does not start" in process.stderr.read()


def test_a_log_that_is_a_link_is_not_followed(place: Place, tmp_path: Path) -> None:
    (tmp_path / "shadow").write_text("root:secret")
    (place.root / "log" / "cache.log").symlink_to(tmp_path / "shadow")
    place.cache.answers["/healthcheck"] = (503, "")
    assert "root:secret" not in place.run("--timeout", "0.1", rc=1).stderr


@pytest.mark.parametrize(
    "silent, code", [("vllm", ready.RUNNER_HANGS), ("cache", ready.CACHE_HANGS)]
)
def test_a_service_that_should_have_answered_long_ago_hangs(
    place: Place, silent: str, code: int
) -> None:
    ticks = int(Path("/proc/1/stat").read_text().rpartition(")")[2].split()[19])
    for name in ("runner", "cache"):
        record = {"pid": 1, "start_ticks": ticks}
        (place.root / "run" / f"{name}.json").write_text(json.dumps(record))
    server = getattr(place, silent)
    server.shutdown()
    server.server_close()
    done = place.run("--timeout", "2", rc=code)
    assert "does not answer: it hangs" in done.stderr


def test_one_that_answers_or_was_only_just_started_does_not_hang(place: Place) -> None:
    ticks = int(Path("/proc/1/stat").read_text().rpartition(")")[2].split()[19])
    (place.root / "run/runner.json").write_text(json.dumps({"pid": 1, "start_ticks": ticks}))
    place.vllm.answers["/health"] = (503, "loading")
    assert "it hangs" not in place.run("--timeout", "2", rc=1).stderr
    place.runner(os.getpid())  # the record is of another process
    place.vllm.shutdown()
    place.vllm.server_close()
    assert "not ready after" in place.run("--timeout", "2", rc=1).stderr
