"""Settings that were not given and follow from the model and the host: context and KV memory. Pure.

Only facts that stay (the model, a GPU's memory) are used, never what is free just now: the next run
must come to the same figures. Of a model of the hub nothing is known before its download, and
nothing is derived.
"""

from __future__ import annotations

import math

from kvhost.plan.gpus import tokens_in_gpus
from kvhost.plan.native import prompt_in_tiering
from kvhost.plan.types import GIB, ModelNeed, size
from kvhost.report import HostReport
from kvhost.schema.combinations import ANSWER_TOKENS
from kvhost.services.runners import runners_of
from kvhost.settings import Settings

#: tokens that a derived context is a multiple of, where memory ends it
STEP = 128
#: the least that the schema takes
LEAST = 512


def derived(
    settings: Settings, report: HostReport, need: ModelNeed | None, *, cuda: bool
) -> tuple[Settings, tuple[str, ...]]:
    """The settings with what follows filled in, and a sentence for each figure that is another
    than the default. What was given stays, and is judged by the plan."""
    if need is None:
        return settings, ()
    given, notes = settings.model_fields_set, []
    if "max_model_len" not in given:
        settings, note = _context(settings, report, need, cuda=cuda)
        notes += note
    elif "engine_kv_gib" not in given and not cuda and settings.runner == "vllm":
        settings, note = _kv_memory(settings, need)
        notes += note
    if settings.native and "l1_gib" not in given:
        settings, note = _tiering(settings, need)
        notes += note
    if "verify_prompt_tokens" not in given:
        settings, note = _prompt(settings)
        notes += note
    return settings, tuple(notes)


def _context(
    settings: Settings, report: HostReport, need: ModelNeed, *, cuda: bool
) -> tuple[Settings, list[str]]:
    ends = [(need.max_context, "the model's own context ends there")]
    # llama-server's memory for KV follows from the context, and is judged by the plan
    for runner in runners_of(settings) if settings.runner == "vllm" else ():
        own = runner.settings
        per_token = need.kv_of_rank(own.tensor_parallel_size, runner.pipeline)
        if cuda:
            room = tokens_in_gpus(runner, report, need)
            why = "the GPU's memory holds no more beside the weights"
        else:
            room = int(own.engine_kv_gib * GIB // per_token)
            why = f"engine_kv_gib = {own.engine_kv_gib} holds no more, {size(per_token)} a token"
        if room is not None:
            ends.append((room // STEP * STEP, why + f" ({runner.title})" * bool(len(ends) > 1)))
    tokens, why = min(ends)
    asked = settings.verify_prompt_tokens if "verify_prompt_tokens" in _given(settings) else 0
    if tokens >= settings.max_model_len or tokens < max(LEAST, asked + ANSWER_TOKENS):
        return settings, []  # the default holds; or nothing useful fits, which the plan refuses
    return _with(settings, max_model_len=tokens), [
        f"max_model_len is {tokens}, as it is not set: {why}."
    ]


def _kv_memory(settings: Settings, need: ModelNeed) -> tuple[Settings, list[str]]:
    runner = runners_of(settings)[0]
    per_token = need.kv_of_rank(settings.tensor_parallel_size, runner.pipeline)
    gib = math.ceil(settings.max_model_len * per_token / GIB)
    if gib <= settings.engine_kv_gib:
        return settings, []
    return _with(settings, engine_kv_gib=gib), [
        f"engine_kv_gib is {gib}, as it is not set: one request of max_model_len "
        f"{settings.max_model_len} tokens takes {size(settings.max_model_len * per_token)}."
    ]


def _tiering(settings: Settings, need: ModelNeed) -> tuple[Settings, list[str]]:
    gib = math.ceil(prompt_in_tiering(settings, need) / GIB)
    if gib <= settings.l1_gib:
        return settings, []
    return _with(settings, l1_gib=gib), [
        f"l1_gib is {gib}, as it is not set: vLLM's own tiering needs memory for one whole prompt "
        f"of max_model_len {settings.max_model_len} tokens."
    ]


def _prompt(settings: Settings) -> tuple[Settings, list[str]]:
    """Whole chunks and a few tokens more, so that all but those can come from the cache."""
    longest = settings.max_model_len - ANSWER_TOKENS
    tokens = (longest - 8) // settings.chunk_size * settings.chunk_size + 8
    if settings.verify_prompt_tokens <= longest or tokens < 2 * settings.chunk_size:
        return settings, []
    return _with(settings, verify_prompt_tokens=tokens), [
        f"verify_prompt_tokens is {tokens}, as it is not set: a longer one does not fit into "
        f"max_model_len {settings.max_model_len}."
    ]


def _given(settings: Settings) -> set[str]:
    return settings.model_fields_set


def _with(settings: Settings, **figures: int) -> Settings:
    """A copy that still tells what was given: model_copy would call the figures given too."""
    copy = settings.model_copy(update=figures)
    copy.__pydantic_fields_set__.difference_update(figures)
    return copy
