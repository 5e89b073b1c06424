"""evidence.py: its look-ups on this machine, and whole runs against a double that replays."""

from __future__ import annotations

import ast
import importlib
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


# -- parts ----------------------------------------------------------------------------------------


def test_clean_up_leaves_a_file_that_took_the_name_of_its_own(tmp_path: Path) -> None:
    config = {**collector.OPTIONAL, "namespace_dir": str(tmp_path), "prompt_tokens": 512}
    config |= {"chunk_size": 256, "model": "m", "timeouts": dict(collector.TIMEOUTS)}
    one = collector.Collector(config)
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
    one.windows = [("cold", probe.scan(str(tmp_path))[0])]
    (tmp_path / "c").write_text("another's")
    (tmp_path / "c").replace(tmp_path / "b")
    result = one.clean_up()
    assert (result["removed"], [p.name for p in tmp_path.iterdir()]) == (1, ["b"])


def test_every_fault_of_a_config_is_named_at_once(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text(
        json.dumps({"vocab": [9, 3], "promt": 1, "timeouts": {"x": 1}, "chunk_size": 0})
    )
    with pytest.raises(ValueError) as caught:
        collector.load_config(str(path))
    for part in ("promt: unknown", "vocab:", "timeouts.x", "api_base", "services.cache.record"):
        assert part in str(caught.value)
    assert "chunk_size: at least 1" in str(caught.value)


def test_a_bad_config_is_exit_1_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text("{}")
    argv = [sys.executable, str(ONHOST / "evidence.py"), "--config", str(path), "--out", "/x"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1


def test_counters_of_the_real_servers_are_found() -> None:
    pages = RECORDING["pages"]
    vllm = probe.parse_metrics(pages["runner"]["2.1"], probe.VLLM)
    cache = probe.parse_metrics(pages["cache"]["2.1"], probe.CACHE)
    assert None not in vllm.values()
    assert (vllm["external_hits"], vllm["from_external"], vllm["requests_finished"]) == (
        2048,
        2048,
        1,
    )
    assert (cache["hit_l2_tokens"], cache["hit_l1_tokens"], cache["lookups"]) == (2048, 0, 1)
    fresh = probe.parse_metrics(pages["cache"]["2.0"], probe.CACHE)
    assert fresh["hit_l2_tokens"] is None and fresh["l2_adapters"] == 1


def test_a_metric_with_a_similar_name_or_another_label_is_not_counted() -> None:
    page = 'a_total{x="1"} 2\na_total{x="2"} 4e1\na_total_more{x="1"} 8\n# a_total 9\nb 1\n'
    assert probe.parse_metrics(page, {"f": ("a_total", {"x": "1"})}) == {"f": 2}
    assert probe.parse_metrics(page, {"f": ("a_total", {})}) == {"f": 42}
    assert probe.parse_metrics(page, {"f": ("c_total", {})}) == {"f": None}


def test_log_lines_lose_colour_key_and_token_ids() -> None:
    line = "\x1b[32mERROR\x1b[0m key sesame, prompt [1, 22,333, 4, 5] at 10.0, 2"
    assert probe.scrub(line, "sesame") == "ERROR key ***, prompt [(ids) ] at 10.0, 2"
    assert len(probe.scrub("x" * 999)) == 300


def test_who_holds_a_port_is_found_also_in_a_child(tmp_path: Path) -> None:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
        assert probe.listens(os.getpid(), port) is False  # bound only
        one.listen()
        assert probe.listens(os.getpid(), port) is True
        with socket.create_connection(("127.0.0.1", port)), one.accept()[0]:
            one.close()
            assert probe.listens(os.getpid(), port) is False  # has a connection there, no more
    with socket.create_server(("127.0.0.1", 0)) as one:
        port = one.getsockname()[1]
        child = subprocess.Popen(["sleep", "60"])
        try:
            assert probe.listens(child.pid, port) is False
        finally:
            child.kill()
            child.wait()
    code = "import socket; s = socket.create_server(('127.0.0.1', 0));"
    code += "print(s.getsockname()[1], flush=True); input()"
    shell = subprocess.Popen(
        ["sh", "-c", f'{sys.executable} -c "{code}"; true'],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert shell.stdout is not None
    assert probe.listens(shell.pid, int(shell.stdout.readline())) is True
    shell.communicate("\n")
    assert probe.listens(shell.pid, 1) is None  # no such process


def test_a_zombie_is_no_process() -> None:
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert probe.process(child.pid) is None
    child.wait()
    me = probe.process(os.getpid())
    assert me is not None and me["start_ticks"] > 0


def test_pages_leave_the_cache_and_reads_of_the_process_are_seen(tmp_path: Path) -> None:
    if probe.mount_of(str(tmp_path))["fstype"] == "tmpfs":
        pytest.skip("on tmpfs there is no page cache to drop")
    path = tmp_path / "kv.data"
    path.write_bytes(os.urandom(1 << 20))
    files, _ = probe.scan(str(tmp_path))
    found = probe.drop_pages(str(tmp_path), {**files, "gone.data": (1, 1, 1)})
    assert found == {"files": 1, "pages": 256, "resident_before": 256, "resident_after": 0}
    before = probe.process_reads(os.getpid())
    path.read_bytes()
    after = probe.process_reads(os.getpid())
    assert before is not None and after is not None
    assert after["rchar"] - before["rchar"] >= 1 << 20
    assert probe.resident_pages(str(path), 1 << 20) == 256


def test_a_truncated_file_is_dropped_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "kv.data").write_bytes(b"x" * 16384)
    files, _ = probe.scan(str(tmp_path))
    os.truncate(tmp_path / "kv.data", 4096)
    assert probe.drop_pages(str(tmp_path), files)["pages"] == 1


def test_pages_of_a_memory_file_stay_and_are_counted() -> None:
    folder = Path("/dev/shm")
    path = folder / f"kvhost-test-{os.getpid()}"
    try:
        path.write_bytes(b"x" * 8192)
        info = path.stat()
        files = {path.name: (info.st_ino, info.st_size, info.st_mtime_ns)}
        assert probe.drop_pages(str(folder), files)["resident_after"] == 2
        assert probe.mount_of(str(path)) == {"fstype": "tmpfs", "device": None}
    finally:
        path.unlink()


def test_temporary_and_empty_files_are_no_kv_and_links_are_not_followed(tmp_path: Path) -> None:
    inner = tmp_path / "ns" / "sub"
    inner.mkdir(parents=True)
    (inner / "a.data").write_text("kv")
    (inner / "b.data.tmp").write_text("kv")
    (inner / "c.data").touch()
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "d.data").write_text("kv")
    (inner / "link").symlink_to(tmp_path / "outside")
    files, temporary = probe.scan(str(tmp_path / "ns"))
    assert (list(files), temporary) == (["sub/a.data"], 2)


def test_the_scripts_are_python_3_9_and_import_only_the_standard_library() -> None:
    for name in ("evidence.py", "evidence_probe.py"):
        tree = ast.parse((ONHOST / name).read_text(), feature_version=(3, 9))
        names = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
        names |= {n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
        known = {*sys.stdlib_module_names, "evidence_probe", "kvhost"}
        assert {n.split(".")[0] for n in names} <= known
    assert importlib.import_module("kvhost.onhost.evidence").SCHEMA == "kvhost/evidence/1"
