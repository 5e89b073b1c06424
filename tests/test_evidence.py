"""evidence.py: whole runs against a double that replays what the real servers answered."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvhost.evidence_model import Evidence, parse_evidence
from kvhost.onhost import evidence as collector
from kvhost.onhost import evidence_probe as probe
from kvhost.verdict import judge

pytestmark = pytest.mark.verdict
ONHOST = Path(collector.__file__).parent
DOUBLES = Path(__file__).parent / "doubles"
RECORDING = json.loads((Path(__file__).parent / "fixtures/replay/recording.json").read_text())
Json = dict[str, Any]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class Host:
    """Both doubles as processes of their own, restarted as real services would be."""

    def __init__(self, state: Path) -> None:
        self.state, self.ports = state, {"cache": free_port(), "runner": free_port()}
        (state / "kv").mkdir()
        (state / "place.json").write_text("{}")
        for role in self.ports:
            subprocess.run(self.command("start", role), check=True)
        self.config = self.defaults()

    def command(self, verb: str, role: str) -> list[str]:
        script = str(DOUBLES / "service.py")
        return [sys.executable, script, verb, role, str(self.ports[role]), str(self.state)]

    def defaults(self) -> Json:
        api, cache = (f"http://127.0.0.1:{self.ports[r]}" for r in ("runner", "cache"))
        return {
            "api_base": api,
            "metrics_url": api + "/metrics",
            "cache_http": cache,
            "model": "tiny",
            "namespace_dir": str(self.state / "kv"),
            "own_requests": str(self.state / "own-requests.json"),
            "services": {
                role: {
                    "record": str(self.state / f"{role}.json"),
                    "restart": self.command("restart", role),
                    "log": str(self.state / f"{role}.log"),
                }
                for role in self.ports
            },
            "prompt_tokens": 2056,
            "chunk_size": 256,
            "vocab": [100, 4000],
            "timeouts": {
                "request_s": 5,
                "ready_s": 10,
                "restart_s": 10,
                "write_s": 3,
                "stable_s": 0.3,
                "settle_s": 1,
            },
        }

    def mode(self, **faults: object) -> None:
        (self.state / "mode.json").write_text(json.dumps(faults))

    def start(self) -> subprocess.Popen[str]:
        path = self.state / "config.json"
        path.write_text(json.dumps(self.config))
        argv = [sys.executable, str(ONHOST / "evidence.py"), "--config", str(path)]
        argv += ["--out", str(self.state / "out.json")]
        return subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)

    def run(self) -> tuple[int, Evidence, str]:
        process = self.start()
        _, told = process.communicate(timeout=60)
        return process.returncode, self.evidence(), told

    def evidence(self) -> Evidence:
        return parse_evidence((self.state / "out.json").read_text())

    def pid(self, role: str) -> int:
        return int(json.loads((self.state / f"{role}.json").read_text())["pid"])

    def files(self) -> list[str]:
        return sorted(path.name for path in (self.state / "kv").iterdir())

    def stop(self) -> None:
        for role in self.ports:
            os.kill(self.pid(role), signal.SIGKILL)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    one = Host(tmp_path)
    deadline = time.monotonic() + 10
    for port in one.ports.values():
        while time.monotonic() < deadline:
            with socket.socket() as probe_socket:
                if probe_socket.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
    yield one
    one.stop()


# -- whole runs ---------------------------------------------------------------------------------


def test_a_whole_run_gives_evidence_that_passes_and_leaves_nothing(host: Host) -> None:
    (host.state / "kv" / "foreign.data").write_bytes(b"x" * 100)
    before = {role: host.pid(role) for role in host.ports}
    code, found, told = host.run()
    verdict = judge(found)
    assert (code, verdict.persisted) == (0, "PASS"), told
    assert all(host.pid(role) != pid for role, pid in before.items())
    assert host.files() == ["foreign.data"]
    assert found.cleanup is not None and (found.cleanup.removed, found.cleanup.left) == (16, 0)
    assert found.written is not None and found.written.new_files == 8
    assert found.page_cache is not None and found.page_cache.pages == 16
    assert found.requests["restored"].output_tokens == found.requests["cold"].output_tokens
    assert found.versions == {"vllm": "0.32.0", "lmcache": "0.5.6-g3e11e108"}
    assert [line.split("]")[0] for line in told.splitlines()] == [f"[{n}/11" for n in range(1, 12)]
    assert stat.S_IMODE((host.state / "out.json").stat().st_mode) == 0o600
    own = json.loads((host.state / "own-requests.json").read_text())
    assert (own["pid"], own["count"]) == (host.pid("runner"), 2)


def test_the_evidence_holds_no_prompt_and_no_key(host: Host) -> None:
    secret = "k3y-of-the-user"
    (host.state / "key").write_text(secret + "\n")
    host.config["api_key_file"] = str(host.state / "key")
    host.mode(key=secret, fault={"control": "500"})
    code, found, told = host.run()
    text = (host.state / "out.json").read_text()
    assert code == 0 and found.requests["restored"].error is None
    assert found.requests["control"].http_status == 500
    assert secret not in text and secret not in told
    assert "11, 12, 13" not in text + told  # the server's error repeated the prompt
    assert max(len(r.output_tokens or []) for r in found.requests.values()) == 16


def test_a_wrong_key_ends_the_test_before_any_restart(host: Host) -> None:
    host.mode(key="another")
    pid = host.pid("runner")
    code, found, _ = host.run()
    assert (code, host.pid("runner")) == (0, pid)
    assert found.requests["cold"].http_status == 401
    assert judge(found).causes[0].slug == "request-failed"
    assert not (host.state / "own-requests.json").exists()  # vLLM did not count it either


@pytest.mark.parametrize(
    "edit",
    [
        {'finished_reason="length",model_name="tiny"} 0.0': 'finished_reason="length"} 1.0'},
        {"vllm:num_requests_running{": 'vllm:num_requests_running{x="1"} 1.0\n#'},
    ],
    ids=["it had another request", "a request is running"],
)
def test_a_server_in_use_is_not_touched(host: Host, edit: dict[str, str]) -> None:
    host.mode(metrics=edit)
    pid = host.pid("runner")
    code, found, told = host.run()
    assert code == 3 and "refused" in told
    assert found.refused is not None and (found.refused.foreign or found.refused.busy)
    assert (found.requests, host.pid("runner"), host.files()) == ({}, pid, [])
    assert [c.slug for c in judge(found).causes] == ["server-in-use"]
    host.config["disrupt"] = True
    code, found, _ = host.run()
    assert code == 0 and found.refused is None and host.pid("runner") != pid


def test_a_server_whose_use_cannot_be_known_is_not_touched(host: Host) -> None:
    host.mode(no_metrics=["runner"])
    code, found, _ = host.run()
    assert (code, found.requests) == (3, {})
    assert [c.slug for c in judge(found).causes] == ["metrics-unreadable"]


def test_kvhosts_own_requests_do_not_count_as_use(host: Host) -> None:
    who = json.loads((host.state / "runner.json").read_text())
    host.mode(metrics={'finished_reason="length",model_name="tiny"} 0.0': 'x="y"} 1.0'})
    own = host.state / "own-requests.json"
    own.write_text(json.dumps({"pid": who["pid"], "start_ticks": 1, "count": 1}))
    assert host.run()[0] == 3  # those were another process's
    own.write_text(json.dumps({**who, "count": 1}))
    assert host.run()[0] == 0


def test_an_answer_that_hangs_is_given_up(host: Host) -> None:
    host.config["timeouts"]["request_s"] = 1
    host.mode(fault={"restored": "hang"})
    code, found, _ = host.run()
    assert code == 0
    assert "TimeoutError" in (found.requests["restored"].error or "")
    assert judge(found).persisted != "PASS"


def test_an_answer_that_is_cut_short_is_no_answer(host: Host) -> None:
    host.mode(fault={"cold": "cut"})
    code, found, _ = host.run()
    assert (code, list(found.requests)) == (0, ["cold"])
    assert "too early" in (found.requests["cold"].error or "")


def test_a_restart_that_fails_is_told_with_its_output(host: Host) -> None:
    host.config["services"]["runner"]["restart"] = ["sh", "-c", "echo no such unit; exit 5"]
    code, found, _ = host.run()
    step = next(s for s in found.steps if s.name == "restart the runner")
    assert code == 0 and step.error is not None
    assert "exit 5" in step.error and "no such unit" in step.error
    assert judge(found).causes[0].slug == "service-not-ready"
    assert host.files() == []


def test_a_service_that_does_not_come_back_is_told_with_its_last_log_lines(host: Host) -> None:
    host.config["timeouts"]["ready_s"] = 2
    log = host.state / "runner.log"
    script = f"kill -9 {host.pid('runner')}; echo 'bind: address in use' >> {log}"
    host.config["services"]["runner"]["restart"] = ["sh", "-c", script]
    code, found, _ = host.run()
    step = next(s for s in found.steps if s.name == "restart the runner")
    assert code == 0 and step.error is not None
    assert "not ready" in step.error and "bind: address in use" in step.error
    assert step.seconds < 15
    subprocess.run(host.command("start", "runner"), check=True)  # for the fixture's stop


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_still_cleans_up_and_writes_the_evidence(host: Host, number: int) -> None:
    host.mode(fault={"restored": "hang"})
    process = host.start()
    deadline = time.monotonic() + 30
    while host.pid("runner") and time.monotonic() < deadline:
        place = json.loads((host.state / "place.json").read_text())
        if place.get("life") == 2 and place.get("served") == 0:
            break
        time.sleep(0.05)
    time.sleep(2)  # now it waits for the rest of the answer
    assert len(host.files()) == 8
    process.send_signal(number)
    _, told = process.communicate(timeout=30)
    found = host.evidence()
    assert process.returncode == 0, told
    assert found.interrupted == signal.Signals(number).name
    assert host.files() == []
    assert judge(found).persisted == "INCONCLUSIVE"


def test_what_is_written_after_a_signal_is_removed_too(host: Host) -> None:
    host.mode(fault={"cold": "late"})
    process = host.start()
    deadline = time.monotonic() + 20
    while not (host.state / "own-requests.json").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    _, told = process.communicate(timeout=30)
    cleanup = host.evidence().cleanup
    assert cleanup is not None and cleanup.removed == 8, told
    assert host.files() == []


def test_a_signal_does_not_leave_a_service_stopped(host: Host) -> None:
    restart, begun = host.command("restart", "cache"), host.state / "begun"
    slow = ["sh", "-c", f'touch {begun}; kill -9 {host.pid("cache")}; sleep 2; exec "$@"', "sh"]
    host.config["services"]["cache"]["restart"] = [*slow, *restart]
    pid = host.pid("cache")
    process = host.start()
    deadline = time.monotonic() + 30
    while not begun.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert host.evidence().interrupted == "SIGTERM"
    assert host.pid("cache") != pid and probe.process(host.pid("cache")) is not None
    assert host.files() == []


def test_the_test_goes_on_when_nobody_reads_its_progress(host: Host) -> None:
    process = host.start()
    assert process.stderr is not None
    process.stderr.close()
    assert process.wait(timeout=60) == 0
    assert judge(host.evidence()).persisted == "PASS"


def test_files_that_cannot_be_told_apart_are_left_and_told(host: Host) -> None:
    host.mode(files=9)
    _, found, _ = host.run()
    assert found.cleanup is not None
    assert (found.cleanup.removed, found.cleanup.left) == (0, 18)
    assert "cold: 9 new files, 8 expected" in (found.cleanup.why or "")
    assert len(host.files()) == 18


def test_a_restart_that_does_nothing_is_seen(host: Host) -> None:
    host.config["services"]["cache"]["restart"] = ["true"]
    _, found, _ = host.run()
    verdict = judge(found)
    assert verdict.persisted == "INCONCLUSIVE" and verdict.causes[0].slug == "not-restarted"
