"""The whole way, with the real engine, on the machine that the tests run on.

In order: from a clean copy with an empty home directory to a verdict; again, and nothing changes;
what was broken behind kvhost's back is seen and mended; faults. One installation serves them all,
so the order of the tests in this file is the order of a host's life.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import time
import urllib.request

import pytest

from tests.e2e_tools import API_KEY, Done, Site

pytestmark = [pytest.mark.e2e, pytest.mark.engine]


@pytest.fixture(scope="module")
def first(site: Site) -> Done:
    """The README's command on a machine that has nothing of kvhost."""
    return site.up()


@pytest.fixture
def provisioned(site: Site, first: Done) -> Site:
    assert first.code == 0, first.text[-6000:]
    return site


def answer(site: Site, key: str = API_KEY, path: str = "/v1/completions") -> int:
    """HTTP status of a small request to the API; 0 when nothing answers."""
    body = json.dumps({"model": "kvhost-builtin", "prompt": [5, 6, 7], "max_tokens": 2}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{site.ports[0]}{path}",
        data=body,
        headers={"Content-Type": "application/json", "Authorization": f"Bearer {key}"},
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def test_from_nothing_to_a_verdict(site: Site, first: Done) -> None:
    assert first.code == 0, first.text[-6000:]
    assert "persisted PASS" in first.text
    [report] = site.reports()
    [result] = report["results"]
    verdict, requests = result["verdict"], result["evidence"]["requests"]
    assert verdict["persisted"] == "PASS"
    by_id = {c["id"]: c for c in verdict["conditions"]}
    assert all(c["met"] for c in by_id.values()), by_id
    restored, control = requests["restored"], requests["control"]
    assert restored["usage_cached_tokens"] >= 0.95 * 8192
    assert control["usage_cached_tokens"] == 0
    assert verdict["ttft_cold_s"] > 0
    assert verdict["ttft_restored_s"] > 0


def test_the_third_partys_build_is_said_aloud(provisioned: Site, first: Done) -> None:
    assert "third party" in first.text
    assert "third party" in provisioned.receipt()["engine"]["third_party"]


def test_again_nothing_changes_and_the_last_verdict_is_told(provisioned: Site) -> None:
    done = provisioned.up()
    assert done.code == 0, done.text[-4000:]
    counts = done.counts()
    assert len(counts) >= 18
    assert done.changed() == []
    assert "nothing has changed since" in done.text
    assert len(provisioned.reports()) == 1


def test_the_api_asks_for_the_key_and_answers(provisioned: Site) -> None:
    for path in ("/v1/completions", "/invocations", "/tokenize", "/load"):
        assert answer(provisioned, "wrong", path) == 401, path
    assert answer(provisioned) == 200
    with urllib.request.urlopen(f"http://127.0.0.1:{provisioned.ports[0]}/metrics") as reply:
        assert b"vllm:" in reply.read()


def test_the_key_is_nowhere_but_in_its_file(provisioned: Site, first: Done) -> None:
    processes = subprocess.run(["ps", "axww", "-o", "args"], capture_output=True, check=True).stdout
    assert API_KEY.encode() not in processes
    assert API_KEY not in first.text
    holders = [
        path
        for top in (provisioned.base, provisioned.repo / "reports")
        for folder in ("bin", "etc", "log", "run", "state", "secrets", ".")
        if (top / folder).is_dir()
        for path in ((top / folder).rglob("*") if folder != "." else (top).glob("*/*.json"))
        if path.is_file() and API_KEY.encode() in path.read_bytes()
    ]
    assert holders == [provisioned.base / "secrets/api-key"]
    assert stat.S_IMODE(holders[0].stat().st_mode) == 0o600
    assert holders[0].owner() == "kvhost"
    # root's, so that the service's user can put nothing in the key's place
    assert holders[0].parent.owner() == "root"
    assert stat.S_IMODE(holders[0].parent.stat().st_mode) == 0o711


def test_what_was_broken_behind_its_back_is_seen_and_mended(provisioned: Site) -> None:
    base = provisioned.base
    link = (base / "current").readlink()
    with (base / "etc/vllm.yaml").open("a") as config:
        config.write("max-num-seqs: 1\n")
    (base / "secrets/api-key").chmod(0o644)
    (base / "current").unlink()
    (base / "current").symlink_to("/nowhere")
    provisioned.services("stop", "pruner")
    os.kill(provisioned.record("cache")["pid"], signal.SIGKILL)  # comes back by itself
    done = provisioned.up(verify="never")
    assert done.code == 0, done.text[-4000:]
    assert {
        "cache: configuration of vLLM",
        "runner: API key",
        "engine: switch to it",
        "runner: services run and have answered",
    } <= set(done.changed())
    assert (base / "current").readlink() == link
    assert "max-num-seqs" not in (base / "etc/vllm.yaml").read_text()
    assert stat.S_IMODE((base / "secrets/api-key").stat().st_mode) == 0o600
    states = json.loads(provisioned.services("--json", "status").text.splitlines()[-1])["services"]
    assert all(s["state"] == "RUNNING" and s["alive"] and s["current"] for s in states.values())
    assert answer(provisioned) == 200
    assert provisioned.up(verify="never").changed() == []


@pytest.mark.full
def test_an_edited_environment_is_built_anew(provisioned: Site) -> None:
    env = (provisioned.base / "current").resolve()
    module = next(env.glob("lib/python3*/site-packages/lmcache/__init__.py"))
    text = module.read_text()
    module.write_text(text + "# edited\n")
    done = provisioned.up(verify="never")
    assert done.code == 0, done.text[-4000:]
    assert "engine: environment, proven by the ABI check" in done.changed()
    assert module.read_text() == text


def test_dry_says_what_would_change_and_changes_nothing(provisioned: Site) -> None:
    before = (provisioned.base / "etc/vllm.yaml").read_bytes()
    done = provisioned.run(
        ".venv/bin/kvhost", "up", "--dry", *provisioned.arguments(chunk_size="512")
    )
    assert done.code == 0, done.text[-4000:]
    assert "abandons" in done.text
    assert "chunk_size 256 → 512" in " ".join(done.text.split())  # the table wraps
    assert (provisioned.base / "etc/vllm.yaml").read_bytes() == before


def test_a_mistyped_key_is_refused_with_a_suggestion(provisioned: Site) -> None:
    done = provisioned.up(cache_limit_gb="20")
    assert done.code == 1
    assert "cache_limit_gib" in done.text
    assert "Traceback" not in done.text


def test_no_network_is_one_error_and_the_old_environment_still_serves(provisioned: Site) -> None:
    lock = next((provisioned.repo / "locks").glob("cpu-*-py3.11.txt"))
    current = (provisioned.base / "current").readlink()
    text = lock.read_text()
    cache = provisioned.base / "uv-cache"
    cache.rename(provisioned.base / "uv-cache.away")
    offline = {
        "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
        "PIP_EXTRA_INDEX_URL": "",
        "PIP_FIND_LINKS": "",
        "PIP_CONFIG_FILE": "/dev/null",
        "UV_HTTP_RETRIES": "0",
        "UV_HTTP_TIMEOUT": "3",
    }
    try:
        lock.write_text("# another lock\n" + text)
        done = provisioned.up(env=offline, verify="never")
    finally:
        lock.write_text(text)
        subprocess.run(["rm", "-rf", str(cache)], check=True)
        (provisioned.base / "uv-cache.away").rename(cache)
    assert done.code == 1
    assert "engine:" in done.text
    assert "pip" in done.text
    assert "Traceback" not in done.text
    assert (provisioned.base / "current").readlink() == current
    assert answer(provisioned) == 200
    assert provisioned.up(verify="never").code == 0


@pytest.mark.full
def test_a_service_that_does_not_come_up_shows_its_last_lines(provisioned: Site) -> None:
    # the engine's configuration takes it, the server's start does not
    extra = '["--chat-template", "/nonexistent/template.jinja"]'
    began = time.monotonic()
    done = provisioned.up(verify="never", runner_extra_args=extra)
    assert done.code == 1
    assert "/nonexistent/template.jinja" in done.text
    assert "last lines of" in done.text
    assert time.monotonic() - began < 500  # not the readiness time-out of 600 s
    restored = provisioned.up(verify="never")
    assert restored.code == 0, restored.text[-4000:]


def test_a_configuration_that_the_engine_refuses_never_reaches_the_service(
    provisioned: Site,
) -> None:
    before = provisioned.record("runner")["pid"]
    extra = '["--quantization", "nonsense"]'
    done = provisioned.up(verify="never", runner_extra_args=extra)
    assert done.code == 1
    assert "nonsense" in done.text
    assert "vLLM refuses" in done.text
    assert provisioned.record("runner")["pid"] == before
    assert answer(provisioned) == 200
    assert provisioned.up(verify="never").code == 0


def test_a_port_that_is_taken_is_refused_before_anything_is_touched(provisioned: Site) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = provisioned.up(api_port=str(port))
    assert done.code == 1
    assert f"port {port}" in done.text
    assert str(port) not in (provisioned.base / "etc/vllm.yaml").read_text()


def test_another_run_in_progress_is_refused_and_a_dead_one_is_not(provisioned: Site) -> None:
    lock = provisioned.base / "state/run.lock"
    assert not lock.exists()
    held = {
        "run_id": "feedc0de0001", "user": "somebody", "controller": "elsewhere",
        "controller_id": "elsewhere", "pid": 1, "pid_start_ticks": 1,
        "started_unix": time.time(), "refreshed_unix": time.time(),
    }  # fmt: skip
    lock.write_text(json.dumps(held))
    try:
        done = provisioned.up(verify="never")
        assert done.code == 1
        assert "somebody@elsewhere" in done.text
        given_up = provisioned.up(verify="never", break_lock="feedc0de0001")
        assert given_up.code == 0, given_up.text[-4000:]
        assert not lock.exists()
    finally:
        lock.unlink(missing_ok=True)


def test_a_server_in_use_is_not_disrupted(provisioned: Site) -> None:
    assert answer(provisioned) == 200  # somebody's request, not kvhost's own
    runner = provisioned.record("runner")["pid"]
    done = provisioned.run(".venv/bin/kvhost", "verify", *provisioned.arguments())
    assert done.code == 2, done.text[-3000:]
    assert "INCONCLUSIVE" in done.text
    assert provisioned.record("runner")["pid"] == runner


@pytest.mark.full
def test_a_server_in_use_is_disrupted_if_asked(provisioned: Site) -> None:
    assert answer(provisioned) == 200
    runner = provisioned.record("runner")["pid"]
    done = provisioned.run(".venv/bin/kvhost", "verify", "--disrupt", *provisioned.arguments())
    assert done.code == 0, done.text[-3000:]
    assert provisioned.record("runner")["pid"] != runner
    assert not list((provisioned.base / "tier").glob("ns-*/*.data"))  # its own KV is gone


def test_a_crash_leaves_no_shared_memory_to_the_next_start(provisioned: Site) -> None:
    for service in ("runner", "cache"):
        record = provisioned.record(service)
        os.kill(record["launcher_pid"], signal.SIGKILL)
    assert provisioned.up(verify="never").code == 0
    sweep = [
        "/usr/bin/python3",
        str(provisioned.base / "bin/shm_sweep.py"),
        "psm_*",
        "lmcache_kv_*",
    ]
    ids = ["--reuid=kvhost", "--regid=kvhost", "--init-groups"]
    done = subprocess.run(["setpriv", *ids, *sweep], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
    assert answer(provisioned) == 200
