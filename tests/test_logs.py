"""`kvhost logs`: the last error first, no secret ever, and what is asked for."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvhost import cli
from kvhost.commands import asking, care
from tests.e2e_tools import API_KEY, Site

ONHOST = Path(__file__).parent.parent / "kvhost" / "onhost"
KEY = "pl4nted-key-in-a-file"
# lines as vLLM 0.32.0, LMCache 0.5.6 and launch.py write them
RUNNER = """launch: runner runs as process 12
(APIServer pid=1) INFO 11-29 10:00:00 [api.py:1] starting
(APIServer pid=1) ERROR 11-29 10:00:01 [a.py:9] the first error
(APIServer pid=1) INFO 11-29 10:00:02 [api.py:1] and on
(APIServer pid=1) WARNING 11-29 10:00:03 [api.py:1] a warning
(EngineCore pid=2) ERROR 11-29 10:00:04 [core.py:5] the last error
(EngineCore pid=2) ERROR 11-29 10:00:04 [core.py:5] Traceback (most recent call last):
(EngineCore pid=2) ERROR 11-29 10:00:04 [core.py:5] RuntimeError: broken
(APIServer pid=1) INFO 11-29 10:00:05 [api.py:1] the end
"""
CACHE = (
    "\x1b[32;20m[2026-11-29 10:00:00,955] LMCache INFO:\x1b[0m hello \x1b[3m(a.py:1:b)\x1b[0m\n"
    f"[2026-11-29 10:00:01,955] LMCache INFO: secrets {KEY} and sk-abcdefghijkl, token=abc123\n"
    "Traceback (most recent call last):\n"
    '  File "x.py", line 1\n'
    "ValueError: no\n"
    "INFO:     127.0.0.1 - GET /healthcheck\n"
)


class Base:
    def __init__(self, root: Path) -> None:
        self.root = root
        for name in ("bin", "log", "run", "secrets"):
            (root / name).mkdir()
        for script in ONHOST.glob("[a-z]*.py"):
            (root / "bin" / script.name).write_text(script.read_text())
        (root / "secrets/api-key").write_text(KEY + "\n")
        (root / "log/runner.log").write_text(RUNNER)
        (root / "log/cache.log").write_text(CACHE)

    def run(self, *words: str, rc: int = 0) -> str:
        argv = [sys.executable, str(self.root / "bin/logs.py"), "--base", str(self.root), *words]
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == rc, done.stderr
        assert "Traceback (most" not in done.stderr
        return done.stdout if rc == 0 else done.stderr

    def json(self, *words: str) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads(self.run("--json", *words))
        return loaded


@pytest.fixture
def base(tmp_path: Path) -> Base:
    return Base(tmp_path)


def test_the_last_error_is_first_and_whole(base: Base) -> None:
    last, first = (block["lines"] for block in base.json()["runner"]["errors"])
    assert [line.rpartition("] ")[2] for line in last] == [
        "the last error", "Traceback (most recent call last):", "RuntimeError: broken",
    ]  # fmt: skip
    assert [line.rpartition("] ")[2] for line in first] == ["the first error"]
    text = base.run()
    assert text.startswith("== runner: error at")
    order = ["the last error", "ValueError: no", "the first error", "the end"]
    assert sorted(order, key=text.index) == order  # of all services, by time


def test_a_traceback_without_levels_is_an_error_with_its_lines(base: Base) -> None:
    (block,) = (block["lines"] for block in base.json()["cache"]["errors"])
    assert block[0].startswith("Traceback")
    assert block[-1] == "ValueError: no"


def test_no_secret_is_shown_by_value_or_by_look(base: Base) -> None:
    text = base.run() + base.run("--json")
    for secret in (KEY, "abcdefghijkl", "abc123"):
        assert secret not in text
    assert "hello" in text
    assert "\x1b" not in text


def test_levels_and_numbers_of_lines(base: Base) -> None:
    lines = base.json("--level", "WARNING")["runner"]["lines"]
    assert len(lines) == 5
    assert not [line for line in lines if " INFO " in line]
    assert len(base.json("--lines", "2")["runner"]["lines"]) == 2
    assert base.json("--lines", "0")["runner"]["lines"] == []


def test_since_a_time(base: Base) -> None:
    year = datetime.datetime.now().year
    if datetime.datetime(year, 11, 29, 10) > datetime.datetime.now():
        year -= 1  # vLLM leaves the year out: the last 29 November
    found = base.json("--since", f"{year}-11-29 10:00:04")["runner"]
    last = [block["lines"][0].rpartition("] ")[2] for block in found["errors"]]
    assert last == ["the last error"]
    assert len(found["lines"]) == 4


def test_what_came_before_the_log_was_turned_over_is_read(base: Base) -> None:
    (base.root / "log/runner.log.1").write_text(RUNNER)
    (base.root / "log/runner.log").write_text("(A pid=1) INFO 11-29 11:00:00 [a.py:1] new\n")
    found = base.json("--lines", "3")["runner"]
    assert found["lines"][-1].endswith("new")
    assert found["errors"][0]["lines"][-1].endswith("RuntimeError: broken")


def test_why_a_service_failed_is_told(base: Base) -> None:
    (base.root / "run/runner.failed").write_text(json.dumps({"why": f"exit 1 with {KEY}"}))
    text = base.run()
    assert text.startswith("== runner: failed: exit 1 with ***")


def test_when_a_service_failed_and_whether_it_runs_again_is_told(base: Base) -> None:
    at = datetime.datetime(2026, 11, 29, 10, 0, 6)
    failed = {"why": "it ended by itself with 3", "failed_unix": at.timestamp()}
    (base.root / "run/cache.failed").write_text(json.dumps(failed))
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    record = base.root / "run/cache.json"
    for start, runs, words in (
        (ticks, True, "it runs again now"),
        (1, False, "it does not run now"),
    ):
        record.write_text(json.dumps({"pid": os.getpid(), "start_ticks": start}))
        row = base.json()["cache"]
        assert (row["failed_time"], row["runs"]) == ("2026-11-29 10:00:06", runs)
        told = f"it ended by itself with 3 (at 2026-11-29 10:00:06; {words})"
        assert told in base.run()
        assert care.failed_words(row) == told
    record.unlink()
    assert base.json()["cache"]["runs"] is None


def test_a_service_that_never_started_has_no_last_lines(
    base: Base, capsys: pytest.CaptureFixture[str]
) -> None:
    (base.root / "log/cache.log").unlink()
    found = base.json()
    assert (found["cache"]["begun"], found["runner"]["begun"]) == (False, True)
    care.show_logs("h", found)
    for text in (base.run(), capsys.readouterr().out):
        assert "cache: not started yet, nothing is in log/cache.log" in text
        assert "0 lines" not in [line for line in text.splitlines() if "cache" in line][-1]


def test_a_link_in_the_place_of_a_log_is_an_error(base: Base) -> None:
    (base.root / "log/runner.log").unlink()
    (base.root / "log/runner.log").symlink_to("/etc/passwd")
    assert "logs:" in base.run(rc=1)


def test_a_time_that_makes_no_sense_says_what_to_write(base: Base) -> None:
    assert "write 30m, 2h" in base.run("--since", "yesterday", rc=1)


# The command


def test_hosts_and_choices_are_passed_on_and_all_hosts_are_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Any] = []

    def pyinfra(inventory: str, deploy: str, args: tuple[str, ...]) -> int:
        seen.append((deploy, args, asking.question()))
        errors = [{"time": None, "lines": ["boom\x1b"]}]
        row = {"source": "log", "failed": None, "errors": errors, "lines": ["calm"]}
        for host in ("a", "b"):
            asking.answer(host, {"services": {"runner": row}})
        return 0

    monkeypatch.setattr(cli, "pyinfra", pyinfra)
    words = ["logs", "--service", "runner", "--since", "1h", "a", "b", "--data", "x=y"]
    done = CliRunner().invoke(cli.main, words)
    assert done.exit_code == 0
    ((deploy, args, asked),) = seen
    assert deploy == "deploys/logs.py"
    assert args == ("-y", "--limit", "a", "--limit", "b", "--data", "x=y")
    assert asked == {"services": ["runner"], "since": "1h", "lines": 20, "level": "INFO"}
    assert done.output.index("a runner: error") < done.output.index("a runner: the last 1")
    assert "b runner" in done.output
    assert "\x1b" not in done.output


# With the real engine


def post(site: Site, path: str, body: bytes, key: str = API_KEY) -> int:
    request = urllib.request.Request(
        f"http://127.0.0.1:{site.ports[0]}{path}",
        data=body,
        headers={"Content-Type": "application/json", "Authorization": f"Bearer {key}"},
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.e2e
@pytest.mark.engine
@pytest.mark.full
def test_no_prompt_and_no_key_is_in_any_log_whatever_is_asked(site: Site) -> None:
    if not (site.base / "current").exists():  # run by itself
        assert site.up(verify="never").code == 0
    planted = "PLANTED prompt 5f1c that must be in no log"
    good = {"model": "kvhost-builtin", "prompt": planted, "max_tokens": 2}
    chat = {"model": "kvhost-builtin", "messages": [{"role": "user", "content": planted}]}
    wrong: list[tuple[str, Any]] = [
        ("/v1/completions", {**good, "max_tokens": "many"}),
        ("/v1/completions", {**good, "model": planted}),
        ("/v1/completions", {**good, "temperature": -5}),
        ("/v1/completions", {**good, "prompt": planted * 4000}),
        ("/v1/completions", {**good, "prompt": {"text": planted}}),
        ("/v1/completions", {**good, "cache_salt": planted + "@/"}),
        ("/v1/chat/completions", {**chat, "max_tokens": -1}),
        ("/v1/chat/completions", {**chat, "max_tokens": 2}),
        ("/tokenize", {"model": "kvhost-builtin", "prompt": planted}),
    ]
    assert post(site, "/v1/completions", json.dumps(good).encode()) == 200
    for path, body in wrong:
        post(site, path, json.dumps(body).encode())
        post(site, path, json.dumps(body).encode(), key="pl4nted-wrong-key")
    post(site, "/v1/completions", f'{{"prompt": "{planted}"'.encode())  # torn
    for port in site.ports[:1] + site.ports[2:]:  # metrics of both, from the host itself
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as reply:
            page = reply.read().decode()
        assert "vllm:" in page or "lmcache" in page
        assert "PLANTED" not in page
    done = site.run(".venv/bin/kvhost", "logs", "--lines", "1000", *site.arguments())
    assert done.code == 0, done.text[-2000:]
    assert "runner: the last" in done.text
    raw = b"".join(p.read_bytes() for p in (site.base / "log").iterdir() if p.is_file())
    for secret in ("PLANTED", "pl4nted-wrong-key", API_KEY):
        assert secret not in done.text
        assert secret.encode() not in raw, secret
