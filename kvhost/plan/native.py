"""What vLLM's own tiering asks of a host's memory. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator

from kvhost.plan.types import GIB, ModelNeed, PlanInputs, Refusal, size
from kvhost.report import HostReport
from kvhost.services.native import PAGE_BYTES
from kvhost.services.runners import pipeline, ranks
from kvhost.settings import Settings


def chunk_in_tiering(settings: Settings, need: ModelNeed) -> int:
    """Bytes of a chunk, of all ranks, as vLLM rounds it up."""
    of_rank = need.kv_of_rank(settings.tensor_parallel_size, pipeline(settings))
    whole = of_rank * ranks(settings) * settings.chunk_size
    return math.ceil(whole / PAGE_BYTES) * PAGE_BYTES


def prompt_in_tiering(settings: Settings, need: ModelNeed) -> int:
    """Bytes of the longest prompt's chunks."""
    chunks = math.ceil(settings.max_model_len / settings.chunk_size)
    return chunks * chunk_in_tiering(settings, need)


def native_refusals(settings: Settings, report: HostReport, facts: PlanInputs) -> Iterator[Refusal]:
    """A prompt that is found whole in the files, and does not fit into the memory that it comes
    through, may be loaded chunk by chunk over and over again, so that its request never ends (seen
    with vLLM 0.32.0's own tiers, tests/engine_tiering.py)."""
    if not settings.native or facts.model is None:
        return
    wanted = prompt_in_tiering(settings, facts.model)
    have = settings.l1_gib * GIB
    if wanted > have:
        fits = have // chunk_in_tiering(settings, facts.model) * settings.chunk_size
        yield Refusal(
            "cache",
            "l1_too_small",
            "vLLM's own tiering has not the memory for one whole prompt, whose request would hang",
            f"{size(wanted)}: the chunks of max_model_len = {settings.max_model_len} tokens",
            f"l1_gib = {settings.l1_gib} GiB",
            f"l1_gib = {math.ceil(wanted / GIB)}, or max_model_len = {fits}",
        )
