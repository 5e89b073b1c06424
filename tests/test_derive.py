"""Context and KV memory that follow from model and host when not set, with their reason."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvhost.onhost import model_builtin
from kvhost.plan.derive import derived
from kvhost.plan.make import ModelNeed
from kvhost.settings import Settings
from tests.plan_cases import GIB, NVIDIA, changed, ok
from tests.test_driver import facts_of
from tests.test_runners import SECOND, TWO_GPUS

REPO = Path(__file__).parents[1]
LLAMA = ModelNeed(16 * GIB, 128 << 10, 131072, heads=32, kv_heads=8)  # 8 B parameters, bfloat16


def told(need: ModelNeed | None, *, cuda: bool = False, **given: Any) -> tuple[Settings, str]:
    report = changed({"gpu": ok(NVIDIA)}) if cuda else changed({})
    if cuda:
        driver = report.driver.model_validate(ok(facts_of(TWO_GPUS)))
        report = report.model_copy(update={"driver": driver})
    settings, notes = derived(Settings(**given), report, need, cuda=cuda)
    return settings, " ".join(notes)


def test_what_is_not_known_is_not_derived() -> None:
    assert told(None) == (Settings(), "")


def test_the_built_in_model_keeps_the_defaults() -> None:
    one = model_builtin.describe()
    need = ModelNeed(one["weights_memory_bytes"], one["kv_bytes_per_token"], one["context_tokens"])
    assert told(need) == (Settings(), "")


@pytest.mark.parametrize(
    ("need", "given", "figures", "words"),
    [
        # 1 GiB of KV is 8192 tokens; the test's prompt gets shorter with them
        (LLAMA, {}, (8192, 1, 7944), "max_model_len is 8192, as it is not set: engine_kv_gib = 1"),
        (LLAMA, {"engine_kv_gib": 3}, (24576, 3, 8200), "holds no more, 128 KiB a token"),
        (LLAMA, {"engine_kv_gib": 8}, (32768, 8, 8200), ""),
        (LLAMA, {"max_model_len": 16384}, (16384, 2, 8200), "engine_kv_gib is 2, as it is not set"),
        (LLAMA, {"max_model_len": 16384, "engine_kv_gib": 1}, (16384, 1, 8200), ""),
        (LLAMA, {"tensor_parallel_size": 2}, (16384, 1, 8200), "64 KiB a token"),
        (LLAMA, {"tensor_parallel_size": 16}, (32768, 1, 8200), ""),
        # a prompt that was asked for is not cut: the plan refuses with its figures
        (LLAMA, {"verify_prompt_tokens": 9000}, (32768, 1, 9000), ""),
        (ModelNeed(GIB, 1024, 4096), {}, (4096, 1, 3848), "the model's own context ends there"),
        (ModelNeed(GIB, 4 << 20, 4096), {}, (32768, 1, 8200), ""),  # 256 tokens are no use
        (
            LLAMA,
            {"engine_kv_gib": 4, "more_runners": [{**SECOND, "engine_kv_gib": 2}]},
            (16384, 4, 8200),
            "(the runner second)",
        ),
    ],
)
def test_on_a_cpu(
    need: ModelNeed, given: dict[str, Any], figures: tuple[int, int, int], words: str
) -> None:
    got, notes = told(need, **given)
    assert (got.max_model_len, got.engine_kv_gib, got.verify_prompt_tokens) == figures
    assert words in notes
    assert bool(notes) is bool(words)
    if words:  # and once more, which a second run does: the same
        assert derived(got, changed({}), need, cuda=False)[0] == got


@pytest.mark.parametrize(
    ("need", "given", "tokens", "words"),
    [
        # of 24 GiB: 92 % less 1.5 GiB and 16 GiB of weights are 4.6 GiB of KV
        (LLAMA, {}, 37504, ""),
        (ModelNeed(18 * GIB, 128 << 10, 131072), {}, 20992, "GPU's memory holds no more"),
        (ModelNeed(18 * GIB, 128 << 10, 131072), {"tensor_parallel_size": 2}, 32768, ""),
        (ModelNeed(18 * GIB, 128 << 10, 131072), {"gpu_memory_share": 0.85}, 7168, "GPU's memory"),
        (ModelNeed(40 * GIB, 128 << 10, 131072), {}, 32768, ""),  # not even the weights
    ],
)
def test_on_a_gpu(need: ModelNeed, given: dict[str, Any], tokens: int, words: str) -> None:
    got, notes = told(need, cuda=True, **given)
    assert got.max_model_len == min(tokens, 32768)
    assert words in notes and bool(notes) is bool(words)
    assert got.engine_kv_gib == 1


def test_what_was_derived_is_still_not_given() -> None:
    got, _ = told(LLAMA)
    assert {"max_model_len", "verify_prompt_tokens"}.isdisjoint(got.model_fields_set)


#: a model of 8 B parameters on a path, in a Python of its own: no test imports deploys
READERS = """
import json
from deploys.common.context import Visit
from deploys.common.drift import lock_of
from deploys.common.drives import asked_of
from kvhost.settings import Settings
from tests.plan_cases import changed, model_dir, ok
config = {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32,
          "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072}
report = changed({"model": model_dir(config=ok(config))})
given = Settings(model_source="/m")
settings, _, _ = lock_of(given, report)
asked = asked_of(Visit("a", "run", given, report, False))
print(json.dumps([settings.max_model_len, settings.verify_prompt_tokens, asked["context"]]))
"""


def test_who_compares_or_counts_by_the_settings_takes_those_of_a_run() -> None:
    """`kvhost drift` wanted the default of max_model_len, where `up` had written what fits."""
    done = subprocess.run(
        [sys.executable, "-c", READERS], cwd=REPO, text=True, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [8192, 7944, 8192]
