"""vLLM's own tiering on the real engine, as kvhost describes it: each set-up gets its verdict."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvhost.services.native import transfer_config
from kvhost.services.tier import NAMESPACE_FILE
from kvhost.settings import Settings
from kvhost.verdict.evidence import Evidence, parse_events
from kvhost.verdict.judge import judge
from kvhost.verdict.types import Verdict
from tests.e2e_tools import BASE
from tests.engine_pair import NAMESPACE, REPO, Json, Pair, restart, start, stop
from tests.engine_setups import get

pytestmark = [pytest.mark.verdict, pytest.mark.engine]
full = pytest.mark.full


@pytest.fixture(scope="module")
def engine_of_one(engine: Path) -> Iterator[Pair]:
    base = Path(f"{BASE}-own")
    subprocess.run(["rm", "-rf", str(base)], check=True)
    one = Pair(base, engine, data={"cache_kind": "native"})
    one.make()
    try:
        one.start()
        wait_for(one)
        yield one
    finally:
        one.stop()
        subprocess.run(["rm", "-rf", str(base)], check=True)


def wait_for(pair: Pair, seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            get(f"http://127.0.0.1:{pair.ports[0]}/health")
            return
        except OSError as error:
            log = pair.log("runner")
            if time.monotonic() > deadline or "ended by itself" in log:
                pytest.fail(f"{error}\n{log[-20000:]}")
        time.sleep(0.5)


def verdict_of(pair: Pair, event: str = "runner", between: str = "") -> tuple[Verdict, Evidence]:
    """The verdict of the test; ``between`` is done to the namespace while vLLM is down."""
    script, state = pair.base / "between.sh", pair.base / "state"
    config = pair.config(events=[event], disrupt=True)
    (state / "config.json").write_text(json.dumps(config))
    argv = [sys.executable, str(REPO / "kvhost/onhost/evidence.py")]
    argv += ["--config", str(state / "config.json"), "--out", str(state / "out.json")]
    try:
        if between:
            script.write_text(f"set -e; cd tier/{NAMESPACE}\n{between}\n")
        done = subprocess.run(argv, stderr=subprocess.PIPE, text=True, timeout=900, check=False)
    finally:
        script.unlink(missing_ok=True)
    assert done.returncode == 0, done.stderr
    text = (state / "out.json").read_text()
    if keep := os.environ.get("KVHOST_TEST_KEEP"):  # a directory: evidence for tests/fixtures
        Path(keep, f"{int(time.time())}-native-{event}.json").write_text(text)
    (found,) = parse_events(text)
    return judge(found), found


def unmet(verdict: Verdict) -> list[Any]:
    return [(c.id, c.figure, c.threshold) for c in verdict.conditions if c.met is not True]


def ask(pair: Pair, prompt: list[int]) -> tuple[int, list[int]]:
    """(tokens from a cache, greedy answer)."""
    body: Json = {"model": "kvhost-builtin", "prompt": prompt, "max_tokens": 8, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{pair.ports[0]}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        found = json.load(reply)
    details = found["usage"]["prompt_tokens_details"] or {}
    return details.get("cached_tokens") or 0, found["choices"][0]["token_ids"]


def chunks(pair: Pair) -> list[Path]:
    return sorted(pair.namespace.rglob("*.bin"), key=lambda path: path.stat().st_mtime_ns)


def test_what_was_cached_is_served_from_the_files_after_a_restart(engine_of_one: Pair) -> None:
    verdict, found = verdict_of(engine_of_one)
    assert verdict.persisted == "PASS", (verdict.summary, unmet(verdict))
    by_id = {condition.id: condition for condition in verdict.conditions}
    assert by_id["l2_hits"].figure == 2048 and by_id["moved_misses"].met
    assert "from L2, with the same answer" in verdict.summary
    assert set(found.services) == {"runner"} and found.config.native
    assert not chunks(engine_of_one), "the test's files are removed"
    about = [path.name for path in engine_of_one.namespace.rglob("*") if path.is_file()]
    assert sorted(about) == [".kvhost-namespace.json", "config.json"]


@full
def test_a_key_that_vllm_does_not_read_is_named(engine: Path, tmp_path: Path) -> None:
    told = dict(transfer_config(Settings(cache_kind="native"), "/srv/kv", cuda=False))
    extra = told["kv_connector_extra_config"]
    wrong = {**extra, "cpu_byts": 1, "secondary_tiers": [{"type": "fs", "root_dri": "/srv/kv"}]}
    code = f"""if True:
        import json, sys
        sys.path.insert(0, {str(REPO / "kvhost/onhost")!r})
        import config_check
        for extra in json.loads(sys.argv[1]):
            told = {{"kv_connector": "OffloadingConnector", "kv_connector_extra_config": extra}}
            print(json.dumps(config_check.connector_keys(told)))
    """
    argv = [str(engine / "bin/python"), "-c", code, json.dumps([extra, wrong])]
    env = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    fine, found = map(json.loads, done.stdout.splitlines()[-2:])
    assert fine == []
    assert [text.split("'")[1] for text in found] == ["cpu_byts", "root_dri"]
    assert "nearest that there is: cpu_bytes_to_use" in found[0]


@full
@pytest.mark.parametrize(("room", "chunks", "found"), [(32, 32, 32), (31, 32, None)])
def test_a_prompt_that_does_not_fit_into_the_memory_is_looked_up_for_ever(
    engine: Path, tmp_path: Path, room: int, chunks: int, found: int | None
) -> None:
    """Why the plan refuses too little of it (l1_too_small); mended upstream, this fails."""
    script = str(REPO / "tests/engine_tiering.py")
    argv = [str(engine / "bin/python"), script, str(tmp_path), str(room), str(chunks)]
    env = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == found


@full
def test_without_its_files_nothing_persists(engine_of_one: Pair) -> None:
    verdict, _ = verdict_of(engine_of_one, between="find . -name '*.bin' -delete")
    assert verdict.persisted == "FAIL", (verdict.summary, unmet(verdict))
    assert [cause.slug for cause in verdict.causes][:1] == ["evicted"]


@full
def test_killed_in_the_middle_of_a_write(engine_of_one: Pair) -> None:
    verdict, _ = verdict_of(engine_of_one, event="kill")
    assert verdict.persisted == "PASS", (verdict.summary, unmet(verdict))
    # what the killed one left goes if nobody maps it, and where that can be seen
    log = engine_of_one.log("runner")
    blind = "shm_sweep: nothing removed, a process cannot be looked at"
    assert blind in log or "shm_sweep: removed /dev/shm/vllm_offload_" in log


@full
def test_damaged_files(engine_of_one: Pair) -> None:
    """What is too short is found out and computed again; bytes of the right size are believed."""
    pair = engine_of_one
    prompts = [[20 + (7 * n + 13 * k) % 200 for n in range(2056)] for k in range(4)]
    first, files = [], []
    for prompt in prompts:
        before = set(chunks(pair))
        first.append(ask(pair, prompt))
        deadline = time.monotonic() + 30
        while len(set(chunks(pair)) - before) < 8 and time.monotonic() < deadline:
            time.sleep(0.2)
        files.append([path for path in chunks(pair) if path not in before])
    assert all(cached == 0 for cached, _ in first) and all(len(one) == 8 for one in files)
    size = files[0][3].stat().st_size
    # the sweep at the start would remove these two: what vLLM does itself is looked at
    pair.write(runner={"before": ()})
    os.truncate(files[0][3], size // 2)
    with files[1][3].open("ab") as longer:
        longer.write(b"x" * 4096)
    flipped = bytearray(files[2][3].read_bytes())
    flipped[3::4] = bytes(byte ^ 0x40 for byte in flipped[3::4])
    files[2][3].write_bytes(flipped)
    files[3][3].unlink()
    restart(pair.base, "runner")
    wait_for(pair)
    short, long, wrong, gone = (ask(pair, prompt) for prompt in prompts)
    assert short[0] < 2048 and short[1] == first[0][1]
    assert long == (2048, first[1][1]), "the first bytes of it"
    assert gone[0] < 2048 and gone[1] == first[3][1]
    # of the right size and with other bytes: served, and the answer is another
    assert wrong[0] == 2048 and wrong[1] != first[2][1]
    deadline = time.monotonic() + 30
    while (not files[0][3].exists() or not files[3][3].exists()) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert files[0][3].stat().st_size == files[3][3].stat().st_size == size, "written anew"
    # with the sweep the longer one does not come so far
    pair.write()
    restart(pair.base, "runner")
    wait_for(pair)
    assert not files[1][3].exists()
    assert (cached := ask(pair, prompts[1]))[0] < 2048 and cached[1] == first[1][1]
    for path in chunks(pair):
        path.unlink()


@full
def test_files_removed_below_a_server_that_reads_them(engine_of_one: Pair) -> None:
    """As a pruner does; between the lookup and the load too. The answers stay the same."""
    pair = engine_of_one
    prompts = [[20 + (11 * n + 17 * k + 5) % 200 for n in range(2056)] for k in range(12)]
    first, files = [], []
    for prompt in prompts:
        before = set(chunks(pair))
        first.append(ask(pair, prompt)[1])
        time.sleep(1)
        files.append([path for path in chunks(pair) if path not in before])
    restart(pair.base, "runner")
    wait_for(pair)

    def identity() -> tuple[int, int]:
        record = json.loads((pair.base / "run/runner.json").read_text())
        return record["pid"], record["start_ticks"]

    who, found = identity(), []
    for number, prompt in enumerate(prompts):
        words = " ".join(str(path) for path in reversed(files[number]))
        pause = f"sleep 0.0{number % 3}{number}; for f in {words}; do rm -f $f; sleep 0.001; done"
        with subprocess.Popen(["sh", "-c", pause]):
            found.append(ask(pair, prompt))
    assert [answer for _, answer in found] == first
    assert any(cached < 2048 for cached, _ in found), found
    assert identity() == who, "the same process answered all the time"
    for path in chunks(pair):
        path.unlink()


@full
def test_a_tier_without_room_costs_no_request(engine_of_one: Pair) -> None:
    pair = engine_of_one
    stop(pair.base, "runner")
    where = str(pair.namespace)
    mounted = ["mount", "-t", "tmpfs", "-o", "size=10m,mode=700", "tmpfs", where]
    subprocess.run(mounted, check=True)  # room for two chunks of 4 MiB, and no O_DIRECT
    try:
        (pair.namespace / NAMESPACE_FILE).write_text('{"chunk_bytes": null}\n')
        start(pair.base, "runner")
        wait_for(pair)
        prompts = [[20 + (13 * n + k) % 200 for n in range(2056)] for k in range(3)]
        first = [ask(pair, prompt) for prompt in prompts]
        assert [cached for cached, _ in first] == [0, 0, 0]
        time.sleep(2)
        assert 0 < len(chunks(pair)) <= 2
        assert not list(pair.namespace.rglob("*.tmp")), "what did not fit is taken away"
        again = [ask(pair, prompt)[1] for prompt in prompts]
        assert again == [answer for _, answer in first]
        assert "O_DIRECT is not supported" in pair.log("runner")
    finally:
        stop(pair.base, "runner")
        subprocess.run(["umount", where], check=True)
        start(pair.base, "runner")
        wait_for(pair)


@full
def test_another_dtype_reads_no_file_of_the_first(engine_of_one: Pair) -> None:
    """In the very same directory, which kvhost never gives it: vLLM's own digest is below."""
    pair = engine_of_one
    prompt = [20 + (3 * n + 1) % 200 for n in range(2056)]
    assert ask(pair, prompt)[0] == 0
    time.sleep(1)
    config = json.loads((pair.base / "etc/vllm.yaml").read_text())
    try:
        pair.configure({**config, "dtype": "bfloat16"})
        restart(pair.base, "runner")
        wait_for(pair)
        assert ask(pair, prompt)[0] == 0
        time.sleep(1)
        assert len({path.relative_to(pair.namespace).parts[0] for path in chunks(pair)}) == 2
    finally:
        pair.configure(config)
        restart(pair.base, "runner")
        wait_for(pair)
    assert ask(pair, prompt)[0] == 2048
