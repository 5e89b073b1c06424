"""Which KV type is in force in an Ollama: lines of its log in, three answers out."""

from __future__ import annotations

from typing import Any

import pytest

from kvhost.ollama.verdict import judge_kv, token_bytes
from kvhost.onhost import ollama_log
from tests.ollama_tools import LOGS, QWEN_7B, QWEN_30B, facts_of, ok, read

pytestmark = pytest.mark.runners
#: log, shape of the model, wanted -> found, in force, a word of the reason
CASES = {
    "flags, nothing asked": ("runner-flags-f16", QWEN_7B, "f16", "f16", "yes", "is in force"),
    "flags, another was wanted": ("runner-flags-f16", {}, "q8_0", "f16", "no", "no reason"),
    "flags and llama.cpp": ("runner-flags-q8_0", QWEN_7B, "q8_0", "q8_0", "yes", "is in force"),
    "silently f16": ("asked-q4_0-got-f16", {}, "q4_0", "f16", "no", "flash attention is off"),
    "a request": ("request-q8_0", QWEN_30B, "q8_0", "q8_0", "yes", "is in force"),
    "off the allowlist": ("request-f16", QWEN_30B, "q8_0", "f16", "no", "architecture"),
    "off the allowlist, f16": ("request-f16", QWEN_30B, "f16", "f16", "yes", "is in force"),
    "llama-server": ("llama-server-q8_0", {}, "q8_0", "q8_0", "yes", "is in force"),
    "llama-server, no word": ("llama-server-silent", {}, "f16", None, "unknown", "neither"),
    "the runner ends": ("needs-flash", {}, "q8_0", None, "no", "does not load"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_type_in_force(case: str) -> None:
    name, shape, wanted, found, in_force, word = CASES[case]
    verdict = judge_kv(facts_of(name, shape), wanted)
    assert (verdict.found, verdict.in_force) == (found, in_force), verdict
    assert word in verdict.why
    assert bool(verdict.change) == (in_force != "yes")


def test_every_recorded_log_is_a_case() -> None:
    assert {path.stem for path in LOGS.glob("*.log")} == {case[0] for case in CASES.values()}


def test_the_request_that_counts_is_the_one_that_is_done() -> None:
    """fit and alloc ask with other sizes before it."""
    (load,) = read("request-q8_0")["loads"]
    assert (load["cells"], load["parallel"], load["flash"]) == (32768, 8, "enabled")
    assert load["buffers"][0] < 1.6 * (1 << 30) < load["buffers"][1]


def test_how_the_server_was_set() -> None:
    found = read("request-q8_0")
    assert found["version"] == "0.17.4"
    assert found["config"] == {
        "OLLAMA_CONTEXT_LENGTH": "0",
        "OLLAMA_FLASH_ATTENTION": "true",
        "OLLAMA_HOST": "http://127.0.0.1:11434",
        "OLLAMA_KEEP_ALIVE": "5m0s",
        "OLLAMA_KV_CACHE_TYPE": "q8_0",
        "OLLAMA_MODELS": "/usr/share/ollama/.ollama/models",
        "OLLAMA_NUM_PARALLEL": "8",
    }


def test_a_start_of_the_server_ends_what_came_before() -> None:
    lines = [
        line
        for name in ("request-q8_0", "request-f16")
        for line in (LOGS / f"{name}.log").read_text().splitlines()
    ]
    found = ollama_log.loads_of(lines)
    assert [load["told"] for load in found["loads"]] == [{"k": "", "v": ""}]


def test_a_warning_about_no_type_is_none() -> None:
    """ollama#9730: it is printed where nothing was asked for."""
    assert read("runner-flags-f16")["loads"][0]["why"] == []


@pytest.mark.parametrize("kind", ["f16", "q8_0", "q4_0"])
def test_bytes_of_a_token_are_those_of_the_sizing(kind: str) -> None:
    """28 layers, 4 heads, 128 of K and of V; a block of 32 has 64, 34 and 18 bytes."""
    facts = facts_of("runner-flags-q8_0", QWEN_7B)
    assert facts.model.data is not None
    block = {"f16": 64, "q8_0": 34, "q4_0": 18}[kind]
    assert token_bytes(facts.model.data, kind) == 28 * 4 * 256 // 32 * block


def test_the_log_and_the_formula_agree_to_the_byte() -> None:
    verdict = judge_kv(facts_of("runner-flags-q8_0", QWEN_7B), "q8_0")
    assert verdict.token_bytes == 30464
    # the line of that time has no cells: the rows of later ones do
    assert verdict.token_bytes_log is None
    later = judge_kv(facts_of("llama-server-q8_0", {}), "q8_0")
    assert later.token_bytes_log == 4352 * (1 << 20) // 262144


@pytest.mark.parametrize("key", ["attention.sliding_window", "ssm.state_size"])
def test_a_shape_that_does_not_tell_gives_no_bytes(key: str) -> None:
    facts = facts_of("request-q8_0", {**QWEN_30B, key: 4096})
    verdict = judge_kv(facts, "q8_0")
    assert (verdict.in_force, verdict.token_bytes) == ("yes", None)


def test_buffers_of_another_size_contradict_the_request() -> None:
    """Half the layers, so that 1.6 GiB can only be f16."""
    verdict = judge_kv(facts_of("request-q8_0", {**QWEN_30B, "block_count": 24}), "q8_0")
    assert (verdict.found, verdict.in_force) == (None, "unknown")
    assert "of another type" in verdict.why


def gone(why: str = "nobody knows") -> dict[str, Any]:
    return {"status": "unreadable", "why": why, "data": None}


@pytest.mark.parametrize("part", ["api", "model", "loaded", "log"])
def test_what_cannot_be_read_is_never_in_force(part: str) -> None:
    verdict = judge_kv(facts_of("request-q8_0", QWEN_30B, **{part: gone()}), "q8_0")
    assert verdict.in_force == "unknown"
    assert "nobody knows" in verdict.why


def test_a_model_that_could_not_be_loaded_is_said() -> None:
    facts = facts_of("request-q8_0", QWEN_30B, asked=gone("500 not enough memory"))
    assert "not enough memory" in judge_kv(facts, "q8_0").why


def test_a_log_without_this_model_tells_nothing() -> None:
    log = {**read("request-q8_0"), "load": None, "loads": 1}
    verdict = judge_kv(facts_of("request-q8_0", QWEN_30B, log=ok(log)), "q8_0")
    assert verdict.in_force == "unknown"
    assert "no load of this model" in verdict.why


def test_k_and_v_of_two_types_are_not_the_wanted_one() -> None:
    line = (
        "llama_kv_cache: size = 10.00 MiB (  256 cells,   2 layers,  1/1 seqs), K ({}): 5.00 MiB, "
        "V ({}): 5.00 MiB"
    )
    text = (LOGS / "llama-server-silent.log").read_text().splitlines()
    log = ollama_log.loads_of([*text, line.format("q8_0", "f16")])
    log = {**log, "load": log["loads"][-1], "loads": 1}
    verdict = judge_kv(facts_of("llama-server-silent", {}, log=ok(log)), "q8_0")
    assert (verdict.found, verdict.in_force) == ("f16 and q8_0", "no")


@pytest.mark.parametrize(
    ("text", "bounds"),
    [("1.5 GiB", (1.45, 1.55)), ("512.0 MiB", (0.49, 0.51)), ("nothing", None)],
)
def test_a_rounded_size_has_bounds(text: str, bounds: tuple[float, float] | None) -> None:
    found = ollama_log.bytes_of(text)
    if bounds is None:
        assert found is None
        return
    assert found is not None
    assert int(bounds[0] * (1 << 30)) <= found[0] < found[1] <= bounds[1] * (1 << 30) + 1


def of_lines(lines: list[str]) -> dict[str, Any]:
    log = ollama_log.loads_of(lines)
    return ok({**log, "load": log["loads"][-1], "loads": len(log["loads"])})


def test_what_is_allocated_counts_before_what_was_told() -> None:
    lines = (LOGS / "llama-server-q8_0.log").read_text().replace("(q8_0)", "(f16)").splitlines()
    verdict = judge_kv(facts_of("llama-server-q8_0", {}, log=of_lines(lines)), "q8_0")
    assert (verdict.found, verdict.in_force) == ("f16", "no")


def test_a_try_is_not_the_load() -> None:
    lines = (LOGS / "request-q8_0.log").read_text().splitlines()
    tries = [line for line in lines if "Operation:commit" not in line]
    verdict = judge_kv(facts_of("request-q8_0", QWEN_30B, log=of_lines(tries)), "q8_0")
    assert (verdict.found, verdict.in_force) == (None, "unknown")
