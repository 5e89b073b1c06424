"""evidence.py: whole runs against a double that models where KV lies."""

from __future__ import annotations

import json
import os
import re
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

from kvhost.onhost import evidence as collector
from kvhost.onhost import evidence_probe as probe
from kvhost.verdict.evidence import Evidence, parse_events
from kvhost.verdict.judge import judge

pytestmark = pytest.mark.verdict
ONHOST = Path(collector.__file__).parent
DOUBLES = Path(__file__).parent / "doubles"
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
        ports = str(self.ports[role]), str(self.ports["cache"])
        return [sys.executable, script, verb, role, ports[0], str(self.state), ports[1]]

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
            "heartbeat_s": 0.1,
            "timeouts": {
                "request_s": 5,
                "ready_s": 10,
                "restart_s": 10,
                "write_s": 3,
                "stable_s": 0.1,
                "settle_s": 1,
                "registered_s": 1,
            },
        }

    def mode(self, **faults: object) -> None:
        new = self.state / "mode.json.new"
        new.write_text(json.dumps(faults))
        new.replace(self.state / "mode.json")

    def start(self) -> subprocess.Popen[str]:
        path = self.state / "config.json"
        path.write_text(json.dumps(self.config))
        argv = [sys.executable, str(ONHOST / "evidence.py"), "--config", str(path)]
        argv += ["--out", str(self.state / "out.json")]
        return subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)

    def run(self) -> tuple[int, Evidence, str]:
        code, (only,), told = self.collect()
        return code, only, told

    def collect(self) -> tuple[int, list[Evidence], str]:
        """Exit code, evidence of every event, and what was said."""
        process = self.start()
        _, told = process.communicate(timeout=120)
        out = self.state / "out.json"
        return process.returncode, parse_events(out.read_text()) if out.exists() else [], told

    def evidence(self) -> Evidence:
        (only,) = parse_events((self.state / "out.json").read_text())
        return only

    def pid(self, role: str) -> int:
        """0 while it has none: a restart takes its record away before it writes the next."""
        try:
            return int(json.loads((self.state / f"{role}.json").read_text())["pid"])
        except FileNotFoundError:
            return 0

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
    assert found.cleanup is not None and (found.cleanup.removed, found.cleanup.left) == (26, 0)
    assert found.written is not None and found.written.new_files == 8
    assert found.page_cache is not None and found.page_cache.pages == 16
    assert found.requests["restored"].output_tokens == found.requests["cold"].output_tokens
    assert found.versions == {"vllm": "0.32.0", "lmcache": "0.5.6-double"}
    shown = [line.split("]")[0] for line in told.splitlines()]
    assert shown == [f"[both {n}/16" for n in range(1, 17)]
    assert stat.S_IMODE((host.state / "out.json").stat().st_mode) == 0o600
    own = json.loads((host.state / "own-requests.json").read_text())
    assert (own["pid"], own["count"]) == (host.pid("runner"), 4)


def test_the_evidence_holds_no_prompt_and_no_key(host: Host) -> None:
    secret = "k3y-of-the-user"
    (host.state / "key").write_text(secret + "\n")
    host.config["api_key_file"] = str(host.state / "key")
    host.mode(key=secret, fault={"2.3": "500"})
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
        {'finished_reason="length"} 0.0': 'finished_reason="length"} 1.0'},
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
    host.mode(metrics={'finished_reason="length"} 0.0': 'x="y"} 1.0'})
    own = host.state / "own-requests.json"
    own.write_text(json.dumps({"pid": who["pid"], "start_ticks": 1, "count": 1}))
    assert host.run()[0] == 3  # those were another process's
    own.write_text(json.dumps({**who, "count": 1}))
    assert host.run()[0] == 0


def test_a_cache_server_that_another_runner_uses_is_not_taken_from_it(host: Host) -> None:
    who = json.loads((host.state / "runner.json").read_text())
    host.mode(metrics={'finished_reason="length"} 0.0': 'x="y"} 1.0'})
    (host.state / "own-requests.json").write_text(json.dumps({**who, "count": 1}))
    # the double's only runner stands for the other one too; that request was a user's there
    second = {
        "metrics_url": host.config["metrics_url"],
        "record": str(host.state / "runner.json"),
        "own_requests": str(host.state / "own-requests-b.json"),
    }
    host.config["others"] = [second]
    code, found, _ = host.run()
    assert code == 3 and found.refused is not None and found.refused.foreign == 1
    host.config["others"] = [{**second, "record": str(host.state / "none.json")}]  # it is stopped
    assert host.run()[0] == 0


def test_an_answer_that_hangs_is_given_up(host: Host) -> None:
    host.config["timeouts"]["request_s"] = 1
    host.mode(fault={"2.2": "hang"})
    code, found, _ = host.run()
    assert code == 0
    assert "TimeoutError" in (found.requests["restored"].error or "")
    assert judge(found).persisted != "PASS"


def test_an_answer_that_is_cut_short_is_no_answer(host: Host) -> None:
    host.mode(fault={"1.0": "cut"})
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


full = pytest.mark.full


@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, *(pytest.param(n, marks=full) for n in (signal.SIGINT, signal.SIGHUP))],
)
def test_a_signal_still_cleans_up_and_writes_the_evidence(host: Host, number: int) -> None:
    host.mode(fault={"2.2": "hang"})
    process = host.start()
    deadline = time.monotonic() + 30
    while host.pid("runner") and time.monotonic() < deadline:
        place = json.loads((host.state / "place.json").read_text())
        if place.get("life") == 2 and place.get("served") == 2:
            break
        time.sleep(0.05)
    time.sleep(2)  # now it waits for the rest of the answer
    assert len(host.files()) == 18
    process.send_signal(number)
    _, told = process.communicate(timeout=30)
    found = host.evidence()
    assert process.returncode == 0, told
    assert found.interrupted == signal.Signals(number).name
    assert host.files() == []
    assert judge(found).persisted == "INCONCLUSIVE"


def test_what_is_written_after_a_signal_is_removed_too(host: Host) -> None:
    host.mode(fault={"1.0": "late"})
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
    host.mode(extra_files=1)
    _, found, _ = host.run()
    assert found.cleanup is not None
    assert found.cleanup.removed == 0 and found.cleanup.left == len(host.files())
    assert "cold: 9 new files, 8 expected" in (found.cleanup.why or "")


def test_a_restart_that_does_nothing_is_seen(host: Host) -> None:
    host.config["services"]["cache"]["restart"] = ["true"]
    _, found, _ = host.run()
    verdict = judge(found)
    assert verdict.persisted == "INCONCLUSIVE" and verdict.causes[0].slug == "not-restarted"


# -- events -----------------------------------------------------------------------------------


def second_pair(host: Host) -> Json:
    """As deploys/verify tells it: started by the launcher, on ports that are found at run time."""
    engine = str(DOUBLES / "engine_double.py")
    specs = {}
    for role, port in (("cache", "{cache_http_port}"), ("runner", "{api_port}")):
        specs[role] = {
            "service": f"other-{role}",
            "argv": [sys.executable, engine, role, port, str(host.state), "{cache_http_port}"],
            "env": {"PATH": "/usr/bin:/bin"},
            "record": str(host.state / "other" / f"{role}.json"),
            "stop_timeout_s": 5,
        }
    (host.state / "other").mkdir()
    # where systemd hands the keys over, launch.py cannot read their files as the service's user
    key = host.state / "key-of-root"
    key.write_text("sk-of-the-second\n")
    specs["runner"]["secret_env"] = {"KEY": str(key)}
    start = ': > "$1"; shift; exec "$@"'
    api = "http://127.0.0.1:{api_port}"
    return {
        "start": ["sh", "-c", start, "sh", str(key), sys.executable, str(ONHOST / "launch.py")],
        "services": specs,
        "api_base": api,
        "metrics_url": api + "/metrics",
        "cache_http": "http://127.0.0.1:{cache_http_port}",
    }


@pytest.mark.parametrize("event", ["runner", "cache", "both", "kill", "other"])
def test_a_healthy_host_passes_every_event(host: Host, event: str) -> None:
    host.config["events"] = [event]
    host.mode(write_delay=0.05 if event == "kill" else 0)
    if event == "other":
        host.config["other"] = second_pair(host)
    before = {role: host.pid(role) for role in host.ports}
    code, found, told = host.run()
    verdict = judge(found)
    unmet = [(c.id, c.figure, c.threshold) for c in verdict.conditions if c.met is not True]
    assert (code, verdict.persisted) == (0, "PASS"), (unmet, told)
    changed = {role for role in host.ports if host.pid(role) != before[role]}
    wanted = {"runner": {"runner"}, "cache": {"cache"}, "other": set()}
    assert changed == wanted.get(event, {"cache", "runner"})
    assert host.files() == [] and list(host.state.glob("ns-*")) == []
    assert list(host.state.glob("other-*")) == []  # specs and logs of the second pair


def test_a_host_that_reboots_is_tested_across_it(host: Host) -> None:
    """The services are lost and started by others, and the first process is another: what a
    reboot does, as far as a process can see it."""
    host.config["events"] = ["runner", "reboot"]
    code, _, told = host.collect()
    journal = host.state / "verify-journal.json"
    assert (code, (host.state / "out.json").exists()) == (4, False), told
    assert stat.S_IMODE(journal.stat().st_mode) == 0o600
    text = journal.read_text()
    longest = max(re.findall(r"[\d\s,]+", text), key=lambda run: run.count(","))
    assert longest.count(",") < 16  # 16 tokens of answer, no prompt
    host.stop()
    for role in host.ports:
        subprocess.run(host.command("start", role), check=True)
    whole = json.loads(text)
    whole["test"]["pid1_ticks"] -= 1  # as if it had been another first process
    journal.write_text(json.dumps(whole))
    code, events, told = host.collect()
    assert code == 0 and not journal.exists(), told
    verdicts = [judge(one) for one in events]
    unmet = [(c.id, c.figure, c.threshold) for c in verdicts[1].conditions if c.met is not True]
    assert [v.event for v in verdicts] == ["runner", "reboot"]
    assert [v.persisted for v in verdicts] == ["PASS", "PASS"], unmet
    assert host.files() == []


def test_a_reboot_that_did_not_happen_is_forgotten_and_leaves_nothing(host: Host) -> None:
    host.config["events"] = ["reboot"]
    assert host.collect()[0] == 4
    assert len(host.files()) == 16
    host.config["events"] = ["both"]
    code, (found,), told = host.collect()
    assert (code, judge(found).persisted) == (0, "PASS")
    assert "is forgotten" in told and host.files() == []


def test_files_that_were_moved_are_put_back_after_a_kill(host: Host) -> None:
    host.mode(fault={"2.0": "hang"})
    process = host.start()
    deadline = time.monotonic() + 40
    while not list(host.state.glob("ns-*/*.data")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.kill()
    process.communicate()
    (place,) = host.state.glob("ns-*")
    moved = {path.name for path in place.glob("*.data")}
    assert len(moved) == 4
    aside = [sys.executable, str(ONHOST / "evidence_aside.py"), "heal", "--tier", str(host.state)]
    done = subprocess.run(aside, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["put_back"] == 4
    assert not place.exists() and moved <= set(host.files())
    again = subprocess.run(aside, capture_output=True, text=True, check=True)
    assert json.loads(again.stdout)["files"] == 0


def test_files_of_a_test_that_lives_are_left_where_they_are(host: Host) -> None:
    host.mode(fault={"2.0": "hang"})
    process = host.start()
    deadline = time.monotonic() + 40
    while len(list(host.state.glob("ns-*/*.data"))) < 4 and time.monotonic() < deadline:
        time.sleep(0.02)
    aside = [sys.executable, str(ONHOST / "evidence_aside.py"), "heal", "--tier", str(host.state)]
    done = subprocess.run(aside, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["put_back"] == 0
    assert len(list(host.state.glob("ns-*/*.data"))) == 4
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert host.files() == [] and list(host.state.glob("ns-*")) == []


# -- what is broken is judged so --------------------------------------------------------------


@pytest.mark.parametrize(
    ("event", "mode", "persisted", "cause"),
    [
        ("both", {"forgets": True}, "FAIL", "index-in-memory"),
        pytest.param("both", {"l2": ""}, "FAIL", "l2-absent", marks=full),
        pytest.param("both", {"no_connector": True}, "FAIL", "connector-missing", marks=full),
        pytest.param("both", {"load_fails": True}, "FAIL", "load-failed", marks=full),
        ("both", {"reads_other_namespaces": True}, "FAIL", "hits-without-files"),
        pytest.param("both", {"proxy_alters": True}, "FAIL", "wrong-kv-served", marks=full),
        ("both", {"logprob_gap": 0.5}, "FAIL", "wrong-kv-served"),
        pytest.param(
            "both", {"no_details": True}, "INCONCLUSIVE", "cached-tokens-missing", marks=full
        ),
        ("cache", {"not_registered": True}, "FAIL", "not-registered-again"),
        ("cache", {"metrics": {"num_gpu_blocks": "x"}}, "INCONCLUSIVE", "engine-not-emptied"),
        ("kill", {"at_once": True}, "INCONCLUSIVE", "kill-too-late"),
        ("other", {}, "INCONCLUSIVE", "second-pair-missing"),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else value,
)
def test_a_broken_host_is_judged_so(
    host: Host, event: str, mode: dict[str, object], persisted: str, cause: str
) -> None:
    host.config["events"] = [event]
    host.mode(**mode)
    _, found, told = host.run()
    verdict = judge(found)
    unmet = [(c.id, c.figure, c.threshold) for c in verdict.conditions if c.met is not True]
    named = [one.slug for one in verdict.causes]
    assert (verdict.persisted, named[:1]) == (persisted, [cause]), (named, unmet, told)
    assert host.files() == [] and list(host.state.glob("ns-*")) == []
