"""A server that kvhost did not install: the collector against a double, and the command."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvhost import cli
from kvhost.onhost import evidence_foreign_parts as parts
from kvhost.reports import kept as reports
from kvhost.verdict import verify_url
from kvhost.verdict.foreign import judge_foreign
from kvhost.verdict.foreign_evidence import ForeignEvidence, parse_foreign
from kvhost.verdict.verify_url import Asked, problems
from tests import foreign_cases

pytestmark = pytest.mark.verdict
ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "kvhost/onhost/evidence_foreign.py"
DOUBLE = ROOT / "tests/doubles/foreign_server.py"
#: Ends the double whose PID the state tells, and starts another; as a unit's restart would.
RESTART = f"""
import os, signal, subprocess, sys, time
from pathlib import Path
state = Path(sys.argv[1])
pid = int((state / "pid").read_text())
os.kill(pid, signal.SIGTERM)
while Path(f"/proc/{{pid}}/stat").exists() and "Z" not in Path(f"/proc/{{pid}}/stat").read_text():
    time.sleep(0.02)
words = [sys.executable, {str(DOUBLE)!r}, *sys.argv[2:3], str(state), *sys.argv[3:]]
done = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                        stderr=(state / "log").open("a"), start_new_session=True)
(state / "pid").write_text(str(done.pid))
"""


QUICK = {
    "stable_s": 0.2,
    "settle_s": 2,
    "write_s": 3,
    "ready_s": 10,
    "restart_s": 20,
    "same_s": 0.5,
    "poll_s": 0.05,
}


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class Server:
    """A running double with its state, and the command that restarts it."""

    def __init__(self, folder: Path, fixture: str) -> None:
        self.state, self.port = folder / "state", free_port()
        (self.state / "kv").mkdir(parents=True)
        self.fixture = folder / "recorded.json"
        self.fixture.write_text(json.dumps(foreign_cases.evidence_of(fixture)))
        script = folder / "restart.py"
        script.write_text(RESTART)
        self.restart = [sys.executable, str(script), str(self.state), str(self.port)]
        self.restart.append(str(self.fixture))
        words = [sys.executable, str(DOUBLE), str(self.port), str(self.state), str(self.fixture)]
        log = (self.state / "log").open("a")
        self.first = subprocess.Popen(words, stderr=log, start_new_session=True)
        (self.state / "pid").write_text(str(self.first.pid))
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            try:
                urllib.request.urlopen(self.url + "/health", timeout=2)
                break
            except OSError:
                time.sleep(0.05)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def mode(self, **faults: Any) -> None:
        (self.state / "mode.json").write_text(json.dumps(faults))

    def asked(self) -> list[dict[str, Any]]:
        path = self.state / "asked.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]

    def stop(self) -> None:
        pid = int((self.state / "pid").read_text())
        for one in {pid, self.first.pid}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)
        self.first.wait()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    one = Server(tmp_path, "mp")
    yield one
    one.stop()


def collect(server: Server, tmp_path: Path, **changes: Any) -> tuple[int, ForeignEvidence, str]:
    """Runs the script by itself; (exit code, evidence, stderr)."""
    config = {
        "api_base": server.url,
        "metrics_url": server.url + "/metrics",
        "storage_dir": str(server.state / "kv"),
        "restart": server.restart,
        "prompt_tokens": 2056,
        "chunk_size": 256,
        "timeouts": QUICK,
        **changes,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    out = tmp_path / "out.json"
    words = [sys.executable, str(SCRIPT), "--config", f"{tmp_path}/config.json", "--out", str(out)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    text = out.read_text() if out.exists() else ""
    assert text, done.stderr
    return done.returncode, parse_foreign(text), done.stderr


# -- the collector ----------------------------------------------------------------------------


@dataclass
class Run:
    server: Server
    code: int
    evidence: ForeignEvidence
    stderr: str


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A whole run on a server with a key, with a secret among the command's arguments."""
    folder = tmp_path_factory.mktemp("healthy")
    server = Server(folder, "mp")
    server.mode(key="hush-hush")
    (folder / "key").write_text("hush-hush\n")
    restart = [*server.restart, "--token", "hush-hush"]
    found = collect(server, folder, api_key_file=str(folder / "key"), restart=restart)
    yield Run(server, *found)
    server.stop()


def test_a_whole_run_gives_the_recorded_counters_back(healthy: Run) -> None:
    found, recorded = healthy.evidence, parse_foreign(healthy.server.fixture.read_text())
    assert healthy.code == 0 and [step.ok for step in found.steps] == [True] * 9
    for role, request in recorded.requests.items():
        mine = found.requests[role]
        assert mine.output_tokens == request.output_tokens
        for side in ("before", "after"):
            got, real = getattr(mine, side), getattr(request, side)
            whole = real.vllm.model_dump(exclude={"start_time"})
            assert got.vllm.model_dump(exclude={"start_time"}) == whole, (role, side)
    assert found.written and found.written.new_files == 8
    assert found.requests["restored"].before and found.requests["restored"].before.own_files == 8
    verdict = judge_foreign(found)
    assert verdict.persisted == "PASS", verdict.summary


def test_the_prompt_is_the_same_three_times_and_another_for_the_control(healthy: Run) -> None:
    cold, warm, restored, control = (one["prompt"] for one in healthy.server.asked())
    assert cold == warm == restored != control
    assert len(cold) == len(control) == 2056 and healthy.evidence.prompts == "words"
    assert not set(cold[:64]) - set(b"abcdefghijklmnopqrstuvwxyz ")


def test_neither_prompt_nor_key_nor_argument_nor_file_name_is_kept(healthy: Run) -> None:
    text = healthy.evidence.model_dump_json() + healthy.stderr
    cold = healthy.server.asked()[0]["prompt"]
    assert ",".join(map(str, cold[:8])) not in text and "cold-0.bin" not in text
    assert "hush" not in text
    assert healthy.evidence.restart and healthy.evidence.restart.program == sys.executable


def test_ids_where_the_vocabulary_is_known_and_text_where_nothing_is(
    server: Server, tmp_path: Path
) -> None:
    server.mode(without=["tokenize"])
    assert collect(server, tmp_path)[1].prompts == "text"
    assert isinstance(server.asked()[0]["prompt"], str)


def test_random_ids_lie_in_the_vocabulary() -> None:
    config = {"vocab": [20, 30], "prompt_tokens": 500}
    ids = parts.make_prompt(config, lambda text: None)
    assert isinstance(ids, list) and set(ids) == set(range(20, 30)) and len(ids) == 500


def test_no_shell_sees_the_command_and_one_that_restarts_nothing_is_seen(
    server: Server, tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    words = ["true", ";", "touch", str(mark), f"$(touch {mark})"]
    hurry = {**QUICK, "settle_s": 0.2}
    _, found, _ = collect(server, tmp_path, restart=words, timeouts=hurry)
    assert found.restart is not None and found.restart.exit_code == 0
    assert not mark.exists()
    verdict = judge_foreign(found)
    assert (verdict.persisted, verdict.causes[0].slug) == ("INCONCLUSIVE", "not-restarted")


def test_a_command_that_fails_ends_the_test(server: Server, tmp_path: Path) -> None:
    words = [sys.executable, "-c", "import sys; sys.exit('no such unit')"]
    code, found, stderr = collect(server, tmp_path, restart=words)
    verdict = judge_foreign(found)
    assert code == 0 and "exit 1: no such unit" in stderr and "restored" not in found.requests
    assert (verdict.persisted, verdict.causes[0].slug) == ("INCONCLUSIVE", "service-not-ready")


def test_a_server_that_has_answered_is_left_alone(server: Server, tmp_path: Path) -> None:
    ask = {"prompt": "x", "model": "m"}
    request = urllib.request.Request(server.url + "/v1/completions", json.dumps(ask).encode())
    urllib.request.urlopen(request, timeout=5).read()
    code, found, _ = collect(server, tmp_path)
    assert code == 3 and not found.requests and found.restart is None
    assert found.refused is not None and found.refused.finished == 1
    code, found, _ = collect(
        server, tmp_path, disrupt=True, restart=["false"], timeouts={**QUICK, "settle_s": 0.2}
    )
    assert code == 0 and "cold" in found.requests


def test_metrics_that_cannot_be_read_refuse_it_too(server: Server, tmp_path: Path) -> None:
    server.mode(without=["metrics"])
    code, found, _ = collect(server, tmp_path)
    verdict = judge_foreign(found)
    assert (code, verdict.causes[0].slug) == (3, "metrics-unreadable")


@pytest.mark.parametrize(
    ("without", "persisted", "cause"),
    [
        (["start_time"], "PASS", None),  # the process that listens proves it
        (["reads"], "INCONCLUSIVE", "reads-not-observed"),
    ],
)
def test_what_a_server_does_not_tell(
    server: Server, tmp_path: Path, without: list[str], persisted: str, cause: str | None
) -> None:
    server.mode(without=without)
    verdict = judge_foreign(collect(server, tmp_path)[1])
    slug = verdict.causes[0].slug if verdict.causes else None
    assert (verdict.persisted, slug) == (persisted, cause)


def test_files_that_the_warm_request_writes_anew_are_still_the_tests(
    server: Server, tmp_path: Path
) -> None:
    server.mode(**{"with": ["rewrites"]})
    found = collect(server, tmp_path)[1]
    assert found.page_cache is not None and found.page_cache.files == 8
    assert judge_foreign(found).persisted == "PASS"


def test_what_a_server_says_of_a_failed_request_is_kept_without_prompt_and_key(
    server: Server, tmp_path: Path
) -> None:
    server.mode(fails=["restored"], key="hush-hush")
    (tmp_path / "key").write_text("hush-hush\n")
    hurry = {**QUICK, "settle_s": 0.2}
    key = str(tmp_path / "key")
    _, found, stderr = collect(server, tmp_path, api_key_file=key, timeouts=hurry)
    error = found.requests["restored"].error or ""
    assert "failed" in error and "(ids)" in error
    assert "11, 12" not in error + stderr and "hush" not in found.model_dump_json() + stderr


def test_a_restart_command_that_prints_for_ever_is_ended(server: Server, tmp_path: Path) -> None:
    hurry = {**QUICK, "settle_s": 0.2}
    _, found, stderr = collect(server, tmp_path, restart=["yes"], timeouts=hurry)
    assert "it prints more than 64 MiB" in stderr
    assert found.restart is not None and found.restart.exit_code is None


def test_interrupted_in_the_restart_the_server_is_up_again(server: Server, tmp_path: Path) -> None:
    slow = [sys.executable, "-c", "import sys, time, subprocess; open(sys.argv[1], 'w'); "
            "time.sleep(1); subprocess.run(sys.argv[2:])"]  # fmt: skip
    mark, out = tmp_path / "begun", tmp_path / "out.json"
    config = {
        "api_base": server.url,
        "metrics_url": server.url + "/metrics",
        "restart": [*slow, str(mark), *server.restart],
        "prompt_tokens": 2056,
        "chunk_size": 256,
        "timeouts": QUICK,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = [sys.executable, str(SCRIPT), "--config", f"{tmp_path}/config.json", "--out", str(out)]
    running = subprocess.Popen(words, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 30
    while not mark.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    running.send_signal(signal.SIGTERM)
    assert running.wait(timeout=30) == 0
    found = parse_foreign(out.read_text())
    assert found.interrupted == "SIGTERM" and found.restart is not None
    assert found.restart.ready_s is not None
    urllib.request.urlopen(server.url + "/health", timeout=5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"restart": []}, "restart: a command"),
        ({"restart": "reboot"}, "restart: a list"),
        ({"api_base": "ftp://x"}, "api_base: http://HOST:PORT"),
        ({"storage_dir": "/nonexistent/x"}, "storage_dir: no such directory"),
        ({"prompt_tokens": 0}, "prompt_tokens: at least 1"),
        ({"vocab": [5, 2]}, "vocab: [first, end)"),
        ({"shell": True}, "shell: unknown"),
        ({"timeouts": {"x": 1}}, "timeouts.x: unknown"),
    ],
)
def test_a_config_that_is_wrong_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    good = {
        "api_base": "http://x:1",
        "metrics_url": "http://x:1/metrics",
        "restart": ["a"],
        "prompt_tokens": 1,
        "chunk_size": 1,
    }
    parts.load_config(json.dumps(good))
    with pytest.raises(ValueError) as caught:
        parts.load_config(json.dumps({**good, **changes}))
    assert words in str(caught.value)


def test_who_listens_is_found_here_only() -> None:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        one.listen()
        port = one.getsockname()[1]
        found = parts.who(f"http://localhost:{port}/v1")
        assert found is not None and found["pid"] == os.getpid()
        assert parts.who(f"http://192.0.2.1:{port}") is None
    assert parts.who(f"http://127.0.0.1:{port}") is None
    assert not parts.is_local("http://no-such-host.invalid:1")


# -- the command ------------------------------------------------------------------------------


def run(*words: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(cli.main, ["verify", *words])
    return done.exit_code, done.stdout, done.stderr


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Short waits, and a place for reports."""
    whole = verify_url.script_config
    monkeypatch.setattr(
        verify_url, "script_config", lambda *args: {**whole(*args), "timeouts": QUICK}
    )
    monkeypatch.setenv("KVHOST_REPORTS", str(tmp_path / "reports"))
    return tmp_path / "reports"


def options(server: Server) -> list[str]:
    return [
        *("--url", server.url, "--metrics-url", server.url + "/metrics"),
        *("--restart-command", shlex.join(server.restart)),
        *("--storage-dir", str(server.state / "kv"), "--prompt-tokens", "2056"),
    ]


def test_the_command_says_what_it_will_run_and_keeps_the_verdict(
    server: Server, quick: Path
) -> None:
    code, text, said = run(*options(server), "--name", "gpu-box")
    assert (code, "gpu-box: persisted PASS" in text) == (0, True), text + said
    assert f"run on this machine, without a shell: {shlex.join(server.restart)}" in said
    (path,) = reports.list_reports(quick)
    report = reports.load_report(path)
    assert (report.host, report.persisted, report.verdict.event) == ("gpu-box", "PASS", "command")
    done = CliRunner().invoke(cli.main, ["report", "--html", str(quick.parent / "html")])
    page = (quick.parent / "html" / "host-gpu-box.html").read_text()
    assert done.exit_code == 0 and "restart by a command" in page


def test_on_a_host_that_pyinfra_reaches(server: Server, tmp_path: Path) -> None:
    """In processes of their own: pyinfra patches the one that imports it."""
    words = [sys.executable, "-m", "kvhost.cli", "verify", "--where", "@local", "--name", "far"]
    words += ["--url", server.url, "--metrics-url", server.url + "/metrics"]
    words += ["--restart-command", shlex.join(server.restart)]
    env = {**os.environ, "KVHOST_REPORTS": str(tmp_path / "reports")}
    before = set(Path("/var/tmp").glob("kvhost-*"))
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    assert "run on the host @local, without a shell: " in done.stderr
    report = reports.latest_report(tmp_path / "reports", "far")
    assert report is not None and report.verdict.causes[0].slug == "storage-not-seen"
    assert set(Path("/var/tmp").glob("kvhost-*")) == before  # nothing stays there


def test_all_faults_of_the_options_are_told_at_once_and_nothing_is_asked(quick: Path) -> None:
    code, _, said = run("--url", "127.0.0.1:8000", "--storage-dir", "/nonexistent")
    assert code == 2 and "--metrics-url: needed" in said and "--restart-command: needed" in said
    code, _, said = run(
        *("--url", "127.0.0.1:8000", "--metrics-url", "http://u:p@x/", "--where", "a,b"),
        *("--restart-command", "echo '", "--storage-dir", "/nonexistent"),
        *("--api-key-file", "/nonexistent", "--vocab-size", "50", "--prompt-tokens", "300"),
        "--where=a,b",
    )
    assert code == 2
    for option in ("url", "metrics-url", "restart-command", "api-key-file", "where"):
        assert f"--{option}: " in said, option
    assert "--vocab-size: " in said and "--prompt-tokens: at least two chunks" in said
    assert not quick.exists()


def test_options_of_pyinfra_need_a_far_host(quick: Path) -> None:
    asked = ("--url", "http://x:1", "--metrics-url", "http://x:1/m", "--restart-command", "true")
    code, _, said = run(*asked, "--sudo")
    assert code == 2 and "--where HOST" in said
    code, _, said = run(*asked, "--event", "runner")
    assert code == 2 and "--event: not with --url" in said


def test_a_name_for_reports_comes_from_the_address() -> None:
    asked = Asked("http://10.0.0.5:8000/", "http://x/m", "true")
    assert asked.host == "10.0.0.5:8000" and problems(asked) == []
    far = Asked("http://127.0.0.1:8000", "http://x/m", "true", where="web-1")
    assert far.host == "web-1 127.0.0.1:8000"
    assert "run on the host web-1" in verify_url.announcement(far)


def test_the_restart_command_is_no_secrets_place_but_is_shown_plainly() -> None:
    asked = Asked("http://x:1", "http://x:1/m", "systemctl restart 'a b'\x1b[31m")
    assert "\x1b" not in verify_url.announcement(asked)
    assert asked.argv == ["systemctl", "restart", "a b\x1b[31m"] or len(asked.argv) == 3
