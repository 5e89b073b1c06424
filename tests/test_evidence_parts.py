"""The parts of evidence.py on this machine: config, metrics, /proc, page cache, clean-up."""

from __future__ import annotations

import ast
import importlib
import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvhost.onhost import evidence as collector
from kvhost.onhost import (
    evidence_config,
    evidence_events,
    evidence_foreign,
    evidence_restart,
    ready,
)
from kvhost.onhost import evidence_probe as probe
from kvhost.onhost.evidence_other import credentials

pytestmark = pytest.mark.verdict
ONHOST = Path(collector.__file__).parent
RECORDING = json.loads((Path(__file__).parent / "fixtures/replay/recording.json").read_text())


def test_clean_up_leaves_a_file_that_took_the_name_of_its_own(tmp_path: Path) -> None:
    config = {**evidence_config.OPTIONAL, "namespace_dir": str(tmp_path), "prompt_tokens": 512}
    config |= dict.fromkeys(("api_base", "metrics_url", "cache_http", "own_requests"), "")
    config |= {
        "services": {},
        "chunk_size": 256,
        "model": "m",
        "timeouts": dict(evidence_config.TIMEOUTS),
    }
    one = evidence_events.Test(config, "both")
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
    one.windows = [("cold", probe.scan(str(tmp_path))[0])]
    (tmp_path / "c").write_text("another's")
    (tmp_path / "c").replace(tmp_path / "b")
    result = one.clean_up()
    assert (result["removed"], [p.name for p in tmp_path.iterdir()]) == (1, ["b"])


@pytest.mark.parametrize(
    "content",
    ["[]", "null", '"x"', "{", *(f'{{"count": {c}, WHO}}' for c in ("null", '"7"', "[]", "-1"))],
)
def test_a_count_of_own_requests_of_a_wrong_shape_is_none(content: str, tmp_path: Path) -> None:
    who = {"pid": 7, "start_ticks": 9}
    path = tmp_path / "state" / "own-requests.json"
    path.parent.mkdir()
    path.write_text(content.replace("WHO", json.dumps(who)[1:-1]))
    assert probe.own_requests(str(path), who) == 0
    (tmp_path / "run").mkdir()
    (tmp_path / "run/runner.json").write_text(json.dumps(who))
    ready.count_own_request(str(tmp_path), "runner")
    assert probe.own_requests(str(path), who) == 1
    ready.count_own_request(str(tmp_path), "runner")
    assert probe.own_requests(str(path), who) == 2
    assert probe.own_requests(str(path), {**who, "start_ticks": 10}) == 0


def test_a_log_is_read_from_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("one\ntwo\n")
    assert probe.read_log(str(path)) == (8, "")
    assert probe.read_log(str(path), 4) == (8, "two\n")
    assert probe.read_log(str(path), -4) == probe.read_log(str(path), 4)
    assert probe.read_log(str(path), -99) == probe.read_log(str(path), 99) == (8, "one\ntwo\n")


def test_a_log_that_is_no_regular_file_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret ERROR\n")
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "folder", "pipe", "missing"):
        code = "import sys; from kvhost.onhost import evidence_probe as p"
        code += "; print(p.read_log(sys.argv[1], 0), p.read_log('/dev/null', 0))"
        argv = [sys.executable, "-c", code, str(tmp_path / name)]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=20, check=True)
        assert done.stdout.split() == ["None", "None"], name


def test_every_fault_of_a_config_is_named_at_once(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text(
        json.dumps({"vocab": [9, 3], "promt": 1, "timeouts": {"x": 1}, "chunk_size": 0})
    )
    with pytest.raises(ValueError) as caught:
        evidence_config.load_config(str(path))
    for part in ("promt: unknown", "vocab:", "timeouts.x", "api_base", "services.cache.record"):
        assert part in str(caught.value)
    assert "chunk_size: at least 1" in str(caught.value)


def test_while_the_test_runs_the_shared_tier_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "pause.json"
    with collector.alone({"pause": str(path)}):
        assert json.loads(path.read_text())["pid"] == os.getpid()
    assert not path.exists()
    with pytest.raises(KeyError), collector.alone({"pause": str(path)}):
        raise KeyError
    assert not path.exists()
    with collector.alone({"pause": None}):
        assert list(tmp_path.iterdir()) == []


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
    assert probe.parse_metrics("a_total NaN\n", {"f": ("a_total", {})}) == {"f": None}


def test_log_lines_lose_colour_key_and_token_ids() -> None:
    line = "\x1b[32mERROR\x1b[0m key sesame, prompt [1, 22,333, 4, 5] at 10.0, 2"
    assert probe.scrub(line, "sesame") == "ERROR key ***, prompt [(ids) ] at 10.0, 2"
    assert len(probe.scrub("x" * 999)) == 300


KEY = "sesame-and-more"
#: prints so many characters after the key, and fails
SAYS = ["sh", "-c", f'echo no {KEY}$(printf "%0$1d" 0); exit 1', "sh"]


def restarts(more: int) -> None:
    """Of a runner that somebody else installed, with a command that fails."""
    ours: Any = SimpleNamespace(
        key=KEY, late=[], config={"restart": [*SAYS, str(more)]}, limits={"restart_s": 10},
        evidence={"requests": {"cold": {"after": {}}}},
    )  # fmt: skip
    evidence_foreign.Collector.restart(ours)


def commands(more: int) -> None:
    """Of a service of kvhost's."""
    evidence: Any = {"services": {"runner": {"restart": {}}}}
    service = {"runner": {"restart": [*SAYS, str(more)]}}
    ours: Any = SimpleNamespace(
        key=KEY, config={"services": service}, limits={"restart_s": 10}, evidence=evidence
    )
    evidence_restart.Services.command(ours, "runner")


@pytest.mark.parametrize("fails", [restarts, commands])
@pytest.mark.parametrize("more", range(285, 299, 3))
def test_a_key_is_masked_before_the_text_is_cut(fails: Callable[[int], None], more: int) -> None:
    with pytest.raises(ValueError, match=r"^exit 1: (no )?\**0+$"):
        fails(more)


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
    scripts = sorted(ONHOST.glob("evidence*.py"))
    assert len(scripts) > 5
    for script in scripts:
        tree = ast.parse(script.read_text(), feature_version=(3, 9))
        names = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
        names |= {n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
        known = {
            *sys.stdlib_module_names,
            *(one.stem for one in scripts),
            "kvhost",
            "bounded",
            "ready",
            "slots_files",
        }
        assert {n.split(".")[0] for n in names} <= known
    assert importlib.import_module("kvhost.onhost.evidence").SCHEMA == "kvhost/evidence/2"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: files of another user")
def test_root_moves_files_as_their_owner() -> None:
    """Also where root's own interpreter lies where that user may not go."""
    top = Path(tempfile.mkdtemp(prefix="kvhost-aside-", dir="/var/tmp"))
    try:
        top.chmod(0o755)
        onhost, tier = top / "bin", top / "tier"
        shutil.copytree(ONHOST, onhost)
        (tier / "ns-a").mkdir(parents=True)
        (tier / "ns-a/one.data").write_bytes(b"kv")
        for path in (tier, tier / "ns-a", tier / "ns-a/one.data"):
            os.chown(path, 65534, 65534)
        code = (
            "import sys, os; sys.path.insert(0, sys.argv[1]); import evidence_events as e\n"
            "one = e.Test.__new__(e.Test); one.key = None\n"
            "one.config = {'namespace_dir': sys.argv[2]}\n"
            "words, pid = ('--namespace', sys.argv[2]), ('--pid', str(os.getpid()))\n"
            "print(one.aside('move', *words, *pid, names=['one.data'])['files'])\n"
            "print(one.aside('put-back', *words)['put_back'])"
        )
        argv = [sys.executable, "-c", code, str(onhost), str(tier / "ns-a")]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        assert done.stdout.split() == ["1", "1"], done.stderr
        assert (tier / "ns-a/one.data").stat().st_uid == 65534
    finally:
        shutil.rmtree(top)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: files of another user")
def test_the_secrets_of_a_second_pair_are_its_users_alone(tmp_path: Path) -> None:
    key, folder = tmp_path / "key", tmp_path / "other-credentials"
    key.write_text("sk-1\n")
    services: dict[str, Any] = {"cache": {}, "runner": {"secret_env": {"VLLM_API_KEY": str(key)}}}
    told = credentials(services, str(folder), "nobody")
    assert told == {"CREDENTIALS_DIRECTORY": str(folder)}
    assert (folder / "key").read_text() == "sk-1\n"
    rows = [(path.owner(), stat.S_IMODE(path.stat().st_mode)) for path in (folder, folder / "key")]
    assert rows == [("nobody", 0o700), ("nobody", 0o400)]
    assert credentials({"cache": {}, "runner": {}}, str(tmp_path / "none"), "nobody") == {}
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("busy", "foreign", "words"),
    [
        (0, 2, "0 requests now, 2 finished are not kvhost's"),
        (1, -1, "1 of them of kvhost's own, which did not end yet"),
        (0, -3, "finished 3 fewer than kvhost sent"),
        (None, None, "cannot be read"),
    ],
)
def test_no_negative_count_of_requests_is_told(
    busy: int | None, foreign: int | None, words: str
) -> None:
    told = evidence_events.use_words({"busy": busy, "foreign": foreign, "own": 5})
    assert words in told and "-" not in told
