"""Which GPUs each runner takes, and whether its model fits into them. Pure.

Tensor and pipeline parallelism share weights and KV out evenly. None of it was tried on several
GPUs (docs/testing.md); the rules are those of vLLM 0.32.0.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvhost.driver.types import SmiGpu
from kvhost.plan.types import GIB, ModelNeed, PlanInputs, Refusal, size, unreadable
from kvhost.report import HostReport
from kvhost.services.runners import Runner, runners_of
from kvhost.settings import Settings

#: vLLM 0.32.0's default of gpu_memory_utilization (vllm/config/cache.py)
GPU_MEMORY_PART = 0.92
#: the CUDA context and activations with enforce-eager; an estimate, not measured on a GPU
GPU_RESERVE_BYTES = int(1.5 * GIB)


def gpus_without_cuda(settings: Settings, facts: PlanInputs) -> Iterator[Refusal]:
    named = [runner for runner in runners_of(settings) if runner.settings.gpus]
    if named:
        yield Refusal(
            "accelerator",
            "gpus_without_cuda",
            "GPUs are named, and the engine of this host is one for the CPU",
            f"a lock for CUDA: gpus is set for {_names(named)}",
            f"{facts.lock_name}, accelerator = {settings.accelerator}",
            "gpus left out for this host, or accelerator = 'cuda'",
        )


def gpu_refusals(settings: Settings, report: HostReport, facts: PlanInputs) -> Iterator[Refusal]:
    """Everything against the choice of GPUs, and against the model on them."""
    runners, there = runners_of(settings), _listed(report)
    if there is None:
        if settings.more_runners or settings.gpus:
            yield unreadable("accelerator", "which GPUs there are", "nvidia-smi lists none")
        return
    for runner in runners:
        yield from _chosen(runner, runners, there)
        yield from _fits(runner, there, facts.model)


def _chosen(runner: Runner, runners: tuple[Runner, ...], there: list[SmiGpu]) -> Iterator[Refusal]:
    uuids = [gpu.uuid for gpu in there if gpu.uuid]
    missing = [uuid for uuid in runner.settings.gpus if uuid not in uuids]
    if missing:
        yield Refusal(
            "accelerator",
            "gpu_unknown",
            f"{runner.title} is to run on a GPU that this host has not",
            ", ".join(missing),
            ", ".join(f"{gpu.uuid} ({gpu.name})" for gpu in there),
            "gpus = with UUIDs of nvidia-smi -L; a replaced card has another one",
        )
    if len(runners) > 1 and not runner.settings.gpus:
        yield Refusal(
            "accelerator",
            "gpu_not_chosen",
            f"{runner.title} has no GPU of its own: all runners without gpus would take the first",
            f"gpus of each of {_names(runners)}",
            f"none for {runner.title}",
            f"gpus = ['{uuids[0] if uuids else 'GPU-…'}'] for it; on a GPU that two share, each "
            "needs gpu_memory_share",
        )
    if runner.ranks > len(there):
        yield Refusal(
            "model",
            "too_few_gpus",
            f"{runner.title} asks for more GPUs than there are",
            f"{runner.ranks} GPUs: tensor_parallel_size times --pipeline-parallel-size",
            f"{len(there)} in nvidia-smi",
            f"tensor_parallel_size = {len(there)} or less",
        )


def _room(runner: Runner, there: list[SmiGpu], need: ModelNeed) -> tuple[int, int, float] | None:
    """(bytes of the smallest GPU that the runner may get, of these for weights and KV, bytes of KV
    a token and rank); None where the memory is not told."""
    own = runner.settings
    mine = [gpu for gpu in there if not own.gpus or gpu.uuid in own.gpus]
    memory = min((gpu.memory_mib for gpu in mine if gpu.memory_mib), default=0) * (1 << 20)
    if not memory:
        return None
    room = int(memory * (own.gpu_memory_share or GPU_MEMORY_PART)) - GPU_RESERVE_BYTES
    return memory, room, need.kv_of_rank(own.tensor_parallel_size, runner.pipeline)


def tokens_in_gpus(runner: Runner, report: HostReport, need: ModelNeed) -> int | None:
    """Tokens of KV that fit beside the weights, 0 where not even these fit; None: not known."""
    there = _listed(report)
    found = _room(runner, there, need) if there else None
    if found is None:
        return None
    _, room, per_token = found
    return max(0, int((room - need.weights_of_rank(runner.ranks)) // per_token))


def gpu_memory_notes(settings: Settings, report: HostReport, need: ModelNeed) -> Iterator[str]:
    """What fits, in the words of what would not."""
    there = _listed(report) or []
    for runner in runners_of(settings):
        ranks, tokens = runner.ranks, runner.settings.max_model_len
        found = _room(runner, there, need) if ranks <= len(there) else None
        if found is None:
            continue
        memory, room, per_token = found
        weights, kv = need.weights_of_rank(ranks), per_token * tokens
        if weights + kv <= room:
            yield (
                f"GPU memory of {runner.title}: {size(room)} of {size(memory)}"
                + (f" on each of {ranks} GPUs" if ranks > 1 else "")
                + f" hold weights {size(weights)} and KV; one request of {tokens} tokens takes "
                f"{size(kv)}."
            )


def _fits(runner: Runner, there: list[SmiGpu], need: ModelNeed | None) -> Iterator[Refusal]:
    """Weights and the KV of one longest request, in the smallest GPU that the runner may get."""
    s, ranks = runner.settings, runner.ranks
    found = _room(runner, there, need) if need and ranks <= len(there) else None
    if need is None or found is None:
        return
    (memory, room, per_token), part = found, s.gpu_memory_share or GPU_MEMORY_PART
    weights, tokens = need.weights_of_rank(ranks), s.max_model_len
    if weights + per_token * tokens <= room:
        return
    fits = int((room - weights) / per_token)
    fix = "a smaller or quantised model, or a larger GPU: the cache keeps KV, never weights"
    if fits >= 512:
        fix = f"max_model_len = {fits}"
        if s.kv_cache_dtype == "auto":
            fix += ", or kv_cache_dtype = 'fp8', which halves the KV (and begins a new cache)"
    if len(there) > ranks:
        fix += f"; or more of the {len(there)} GPUs: tensor_parallel_size"
    each = f" on each of {ranks} GPUs" if ranks > 1 else ""
    yield Refusal(
        "model",
        "model_too_large_for_gpu",
        f"the model of {runner.title} and one request of max_model_len tokens do not fit into the "
        "GPU's memory",
        f"{size(weights + per_token * tokens)}{each}: weights {size(weights)}, KV "
        f"{size(per_token * tokens)} for {tokens} tokens",
        f"{size(max(room, 0))} of {size(memory)}: {part:.0%} of it, less "
        f"{size(GPU_RESERVE_BYTES)} for the computation",
        fix,
    )


def _names(runners: list[Runner] | tuple[Runner, ...]) -> str:
    return " and ".join(runner.title for runner in runners)


def _listed(report: HostReport) -> list[SmiGpu] | None:
    """What nvidia-smi lists; None where it does not answer."""
    smi = report.driver.data.smi if report.driver.data else None
    return smi.log.gpus if smi and smi.log else None
