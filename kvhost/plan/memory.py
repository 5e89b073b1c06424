"""What model and caches take of the host's memory, part by part: refused, or said. Pure.

The figures that are said are those of a refusal. What is free just now is in a refusal alone: it
differs from host to host, and plans that say the same are shown once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvhost.llama.need import architecture
from kvhost.plan import model_need
from kvhost.plan.gpus import gpu_memory_notes
from kvhost.plan.host import memory_for_us
from kvhost.plan.types import GIB, PlanInputs, Refusal, size, unreadable
from kvhost.report import HostReport
from kvhost.services.runners import runners_of
from kvhost.settings import Settings

# vLLM and the cache server without weights and caches: about 3 GB resident were measured.
PROCESSES_BYTES = int(3.5 * GIB)
# one more rank, of the same runner or of another: 2.4 GiB were seen of a second runner on a CPU,
# of which up to 1 GiB is its KV
RANK_BYTES = int(2.5 * GIB)
#: llama-server beside weights, KV and --cache-ram: what it computes in; 0.3 GiB were seen
LLAMA_BYTES = GIB


@dataclass(frozen=True)
class Demand:
    """Bytes in all; ``words``: its parts; ``fix``: what would lower it."""

    bytes: int
    words: str
    fix: str


def demand(settings: Settings, report: HostReport, facts: PlanInputs) -> Demand:
    llama = settings.runner == "llama_server"
    return (_of_llama if llama else _of_vllm)(settings, report, facts)


def _of_vllm(settings: Settings, report: HostReport, facts: PlanInputs) -> Demand:
    runners = runners_of(settings)
    # on a CPU the ranks of a runner share its weights; with a GPU they pass through memory once
    weights = len(runners) * weights_bytes(settings, report, facts)
    # each rank of a runner has KV memory of that size; with a GPU it lies in the GPU
    kv = [one.settings.engine_kv_gib * one.ranks for one in runners if facts.cuda is None]
    # l1_gib is the cache server's, for all ranks: with LMCache's server they have none of their own
    processes = PROCESSES_BYTES + (sum(one.ranks for one in runners) - 1) * RANK_BYTES
    each = f" ({' + '.join(map(str, kv))} of {len(runners)} runners)" if len(kv) > 1 else ""
    fewer = ", fewer runners" if len(runners) > 1 else ""
    return Demand(
        weights + (sum(kv) + settings.l1_gib) * GIB + processes,
        f"weights {_words(weights)}, engine_kv_gib {sum(kv)} GiB{each}, "
        f"l1_gib {settings.l1_gib} GiB, processes {size(processes)}",
        f"lower engine_kv_gib or l1_gib, use a smaller model{fewer}, or free memory",
    )


def _of_llama(settings: Settings, report: HostReport, facts: PlanInputs) -> Demand:
    weights, slots = weights_bytes(settings, report, facts), settings.llama_slots
    # all of it is allocated when it starts
    tokens = settings.max_model_len * slots
    kv = facts.model.kv_bytes_per_token * tokens if facts.model else 0
    k, v = settings.llama_cache_type_k, settings.llama_cache_type_v
    of = f"{slots} slots of {settings.max_model_len} tokens, " + (k if k == v else f"K {k}, V {v}")
    return Demand(
        weights + kv + settings.l1_gib * GIB + LLAMA_BYTES,
        f"weights {_words(weights)}, KV {_words(kv)} ({of}), l1_gib {settings.l1_gib} GiB, "
        f"process {size(LLAMA_BYTES)}",
        "lower max_model_len, llama_slots or l1_gib, a smaller llama_cache_type_k and _v, "
        "a smaller model, or free memory",
    )


def _words(count: int) -> str:
    return size(count) if count else "not known"


def weights_bytes(settings: Settings, report: HostReport, facts: PlanInputs) -> int:
    """Of an architecture that is not known the weights still count; 0 while there are no files
    yet."""
    if facts.model is not None:
        return facts.model.weights_bytes
    return model_need.weights_bytes(report.model.data, settings) if report.model.data else 0


def memory_refusals(settings: Settings, report: HostReport, facts: PlanInputs) -> Iterator[Refusal]:
    if report.memory.data is None:
        yield unreadable("runner", "memory", report.memory.why)
        return
    needed = demand(settings, report, facts)
    have, whence = memory_for_us(report)
    if needed.bytes > have:
        yield Refusal(
            "runner",
            "ram_too_small",
            "the model and its caches do not fit into memory",
            f"{size(needed.bytes)}: {needed.words}",
            f"{size(have)} free for kvhost, {whence}",
            needed.fix,
        )


def memory_notes(settings: Settings, report: HostReport, facts: PlanInputs) -> Iterator[str]:
    """What is taken, of what; or what of it is not known, and why."""
    if report.memory.data is not None:
        needed, (have, whence) = demand(settings, report, facts), memory_for_us(report)
        if needed.bytes <= have:
            most = "up to" if facts.model is not None else "at least"
            yield f"Memory: takes {most} {size(needed.bytes)} {whence}: {needed.words}."
    if facts.model is None:
        yield _not_known(settings, report, facts)
    elif facts.cuda is not None:
        yield from gpu_memory_notes(settings, report, facts.model)


def _not_known(settings: Settings, report: HostReport, facts: PlanInputs) -> str:
    what = (
        "How much KV the model takes"
        if weights_bytes(settings, report, facts)
        else "The model's size"
    )
    why = _why_not(settings, report)
    return f"{what} is not known ({why}): memory was checked without it."


def _why_not(settings: Settings, report: HostReport) -> str:
    model = report.model
    if not settings.model_source.startswith("/"):
        return "it is not on the host yet"
    if model.data is None:
        return model.why or "it could not be looked at"
    config = model.data.config
    if config.data is None:
        return config.why or "what it says of itself could not be read"
    kind = architecture(config.data) if settings.runner == "llama_server" else None
    return "its architecture " + (f"({kind}) " if kind else "") + "is none that kvhost knows"
