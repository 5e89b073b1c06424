"""llama-server, deployed: PASS after a restart and a kill, no damaged slot is ever read.

Every test runs with the real program where there is one, else with a double; --full: with both.
"""

from __future__ import annotations

import json
import os
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvhost.onhost import engine_program
from tests.e2e_tools import API_KEY, Site, free_ports
from tests.llama_tools import DOUBLE, HERE, TOKENS, WHY_NONE, LlamaSite, binary, keep, kept

pytestmark = [pytest.mark.e2e, pytest.mark.runners]


full, there = pytest.mark.full, binary() is not None
PROGRAMS = [
    pytest.param("double", marks=[full] if there else []),
    pytest.param("real", marks=[] if there else [full]),
]


@pytest.fixture(scope="module", params=PROGRAMS)
def llama(request: pytest.FixtureRequest) -> Iterator[LlamaSite]:
    """An installation, not yet made: with a double of the program, and with a real one."""
    path = DOUBLE if request.param == "double" else binary()
    if path is None:
        pytest.skip(WHY_NONE)
    site: Site = request.getfixturevalue("site")
    # where the service's user can reach it
    own = HERE.with_name(HERE.name + "-own")
    own.mkdir(parents=True, exist_ok=True)
    program = own / "llama-server"
    program.write_bytes(path.read_bytes())
    program.chmod(0o755)
    source = f"{program}#sha256={engine_program.sha256(str(program))}"
    here = LlamaSite(site.repo, site.home, free_ports(1), data={"llama_binary": f'"{source}"'})
    here.remove()
    yield here
    here.remove()
    program.unlink()
    own.rmdir()


def prompt(seed: int) -> list[int]:
    """Bytes that the built-in model can be asked with."""
    draw = random.Random(seed)
    return [draw.randrange(32, 127) for _ in range(400)]


def restored(llama: LlamaSite) -> None:
    """Until the keeper has restored what it had, into the process that runs now."""
    deadline, who = time.monotonic() + 120, llama.record("runner")
    server = f"{who['boot_id']}:{who['pid']}:{who['start_ticks']}"
    while time.monotonic() < deadline:
        path = llama.namespace / ".slots-state.json"
        state = json.loads(path.read_text()) if path.exists() else {}
        if state.get("server") == server and state["restored"]:
            return
        time.sleep(0.1)
    raise AssertionError("nothing was restored in time")


def test_a_deploy_passes_after_a_restart_and_after_a_kill(llama: LlamaSite) -> None:
    done = llama.up(verify_events='["both","kill"]')
    assert done.code == 0, done.text[-4000:]
    report = llama.reports()[-1]
    assert report["persisted"] == "PASS"
    assert [one["verdict"]["event"] for one in report["results"]] == ["both", "kill"]
    for one in report["results"]:
        requests = one["evidence"]["requests"]
        assert requests["restored"]["cache_n"] == TOKENS - 1
        assert requests["restored"]["prompt_n"] == 1
        assert requests["control"]["cache_n"] == 0
    # nothing of vLLM's is there
    for path in (llama.base / "etc").glob("*[!t]"):
        assert "vllm" not in path.read_text().lower(), path
    assert sorted(p.stem for p in (llama.base / "etc").glob("*.json")) == [
        *("pruner", "runner", "service-env", "slots"),
    ]


def test_the_second_deploy_changes_nothing_and_the_key_is_nowhere(llama: LlamaSite) -> None:
    done = llama.up()
    assert done.code == 0 and done.changed() == []
    # and the plan has said so
    assert re.search(r"^@local: no change", done.text, re.M), done.text[:3000]
    for path in (llama.base / "log").iterdir():
        assert API_KEY not in path.read_text(errors="replace")
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        assert API_KEY.encode() not in path.read_bytes()
    assert (llama.namespace.stat().st_mode & 0o777) == 0o700


def test_damaged_files_never_reach_the_server_which_stays_alive(llama: LlamaSite) -> None:
    answers = {slot: llama.ask(prompt(slot), slot)[0] for slot in (0, 1)}
    assert llama.services("stop", "slots", "runner").code == 0
    flipped, short = llama.saved(0), llama.saved(1)
    data = bytearray(flipped.read_bytes())
    data[len(data) // 2] ^= 0xFF
    flipped.write_bytes(bytes(data))
    os.truncate(short, short.stat().st_size // 2)
    assert llama.services("start").code == 0
    restored(llama)
    pid = llama.record("runner")["pid"]
    for slot, answer in answers.items():
        tokens, cached = llama.ask(prompt(slot), slot)
        assert cached == 0 and tokens == answer
    assert llama.record("runner")["pid"] == pid
    assert not flipped.exists() and not short.exists()
    log = (llama.base / "log/slots.log").read_text()
    assert "slot-0 is not restored and was removed: its file is damaged" in log
    assert "slot-1 is not restored and was removed: its file has" in log


def test_by_hand_a_name_outlives_what_comes_into_its_slot(llama: LlamaSite) -> None:
    answer, _ = llama.ask(prompt(7), 0)
    assert llama.slots("save", "system", "--slot", "0").code == 0
    llama.ask(prompt(8), 0)
    back = llama.slots("restore", "system", "--slot", "1")
    assert back.code == 0 and '"slot": 1' in back.text
    tokens, cached = llama.ask(prompt(7), 1)
    assert (tokens, cached) == (answer, len(prompt(7)) - 1)
    done = llama.run(".venv/bin/kvhost", "logs", *llama.arguments(), "--service", "slots")
    assert done.code == 0 and "slot-0 is not restored" in done.text
    shown = llama.run(".venv/bin/kvhost", "purge", *llama.arguments())
    assert shown.code == 0 and " builtin " in shown.text
    assert llama.slots("forget", "system").code == 0
    gone = llama.slots("forget", "system")
    assert gone.code == 1 and "nothing is saved as system" in gone.text


def test_what_lies_in_the_way_gives_way_at_a_stop_and_at_the_start(llama: LlamaSite) -> None:
    answer, _ = llama.ask(prompt(11), 0)
    for name in (".slots.lock", ".slots-state.json", ".slot-0.json", ".slot-0.json.new"):
        path = llama.namespace / name
        path.unlink(missing_ok=True)
        path.mkdir()
    assert llama.services("restart", "runner", "slots").code == 0
    restored(llama)
    tokens, cached = llama.ask(prompt(11), 0)
    assert (tokens, cached) == (answer, len(prompt(11)) - 1)


def test_another_type_of_kv_begins_a_new_cache_that_reads_nothing_of_the_old(
    llama: LlamaSite,
) -> None:
    llama.ask(prompt(9), 0)
    old = llama.namespace
    done = llama.up(llama_cache_type_k="q8_0", verify="never")
    assert done.code == 0, done.text[-3000:]
    assert "new namespace (cache_type_k f16 → q8_0)" in " ".join(done.text.split())
    assert llama.namespace != old and list(old.glob("slot-0.*.kv"))
    # put there by hand, with its note: of another engine it is not read
    for path in (*old.glob("slot-0.*.kv"), old / ".slot-0.json"):
        target = llama.namespace / path.name
        target.write_bytes(path.read_bytes())
        os.chown(target, path.stat().st_uid, path.stat().st_gid)
    llama.services("restart", "runner", "slots")
    restored(llama)
    assert llama.ask(prompt(9), 0)[1] == 0
    assert "another engine: cache_type_k differ" in (llama.base / "log/slots.log").read_text()


def test_it_is_removed_without_a_rest(llama: LlamaSite) -> None:
    done = llama.run(
        *(".venv/bin/kvhost", "remove", "-y"),
        *llama.arguments(remove_cache="true", remove_models="true"),
    )
    assert done.code == 0, done.text[-3000:]
    assert not HERE.exists()


@pytest.mark.full
def test_it_is_built_from_its_source_and_passes(site: Site) -> None:
    here = LlamaSite(site.repo, site.home, free_ports(1))
    here.remove()
    try:
        done = here.up()
        assert done.code == 0, done.text[-4000:]
        assert here.reports()[-1]["persisted"] == "PASS"
        keep((here.base / "current/bin/llama-server").resolve())
    finally:
        here.remove()
    assert kept().exists()
