"""What the engine computes on: what a plan says of it, and every reason against it. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from kvhost.driver import Decision, decide
from kvhost.matrix import LockInfo, Matrix
from kvhost.plan_host import nvidia
from kvhost.plan_types import GIB, Action, PlanInputs, Refusal, size, unreadable
from kvhost.report import HostReport
from kvhost.settings import Settings

#: vLLM 0.32.0's default of gpu_memory_utilization (vllm/config/cache.py)
GPU_MEMORY_PART = 0.92
#: the CUDA context and activations with enforce-eager; an estimate, not measured on a GPU
GPU_RESERVE_BYTES = int(1.5 * GIB)


def decision_of(report: HostReport, lock: LockInfo, matrix: Matrix) -> Decision | None:
    """What is decided of the driver, None for a CPU lock and where the facts are not there."""
    if lock.cuda is None or report.driver.data is None:
        return None
    inside = report.pid1.data.container if report.pid1.data else None
    return decide(report.driver.data, lock, matrix, inside)


def accelerator_action(settings: Settings, report: HostReport, facts: PlanInputs) -> Action:
    what = "the CPU engine, no accelerator"
    if settings.accelerator == "auto" and report.gpu.data:
        what = "the CPU engine: accelerator = auto, and no NVIDIA GPU was found here"
    if facts.cuda is not None:
        what = facts.driver.words if facts.driver else "a GPU, of which nothing is known"
    return Action("accelerator", what, "keep")


def accelerator_refusals(
    settings: Settings, report: HostReport, facts: PlanInputs
) -> Iterator[Refusal]:
    if settings.accelerator == "auto" and report.gpu.data is None:
        yield unreadable("accelerator", "whether there is a GPU", report.gpu.why)
    if facts.cuda is None:
        return
    if facts.driver is None:
        yield unreadable("accelerator", "the GPU's driver", report.driver.why)
        return
    yield from facts.driver.refusals
    if not facts.driver.refusals:
        yield from _fit(settings, report, facts)


def _fit(settings: Settings, report: HostReport, facts: PlanInputs) -> Iterator[Refusal]:
    """Whether weights and the KV of one longest request fit into the GPUs that the flags ask for.

    Tensor and pipeline parallelism share both out evenly; a model whose heads do not divide so
    needs more, which vLLM says when it starts.
    """
    need, memory, args = facts.model, gpu_memory(report), settings.runner_extra_args
    ranks = gpus_needed(args)
    listed = len(_memories(report))
    if listed and ranks > listed:
        yield Refusal(
            "model",
            "too_few_gpus",
            "runner_extra_args asks for more GPUs than there are",
            f"{ranks} GPUs: tensor-parallel-size times pipeline-parallel-size",
            f"{listed} in nvidia-smi",
            f"--tensor-parallel-size {listed} or less",
        )
        return
    if need is None or memory is None:
        return
    part = float(_flag(args, "gpu-memory-utilization") or GPU_MEMORY_PART)
    room = int(memory * part) - GPU_RESERVE_BYTES
    tokens = settings.max_model_len
    weights, per_token = need.weights_bytes / ranks, need.kv_bytes_per_token / ranks
    if weights + per_token * tokens <= room:
        return
    fits = int((room - weights) / per_token)
    fix = "a smaller or quantised model, or a larger GPU: the cache keeps KV, never weights"
    if fits >= 512:
        fix = f"max_model_len = {fits}"
        if settings.kv_cache_dtype == "auto":
            fix += ", or kv_cache_dtype = 'fp8', which halves the KV (and begins a new cache)"
    if listed > ranks:
        fix += f"; or more of the {listed} GPUs: --tensor-parallel-size in runner_extra_args"
    each = f" on each of {ranks} GPUs" if ranks > 1 else ""
    yield Refusal(
        "model",
        "model_too_large_for_gpu",
        "the model and one request of max_model_len tokens do not fit into the GPU's memory",
        f"{size(weights + per_token * tokens)}{each}: weights {size(weights)}, KV "
        f"{size(per_token * tokens)} for {tokens} tokens",
        f"{size(max(room, 0))} of {size(memory)}: {part:.0%} of it, less "
        f"{size(GPU_RESERVE_BYTES)} for the computation",
        fix,
    )


def gpus_needed(args: Sequence[str]) -> int:
    """GPUs that the runner's arguments ask for: tensor times pipeline parallelism."""
    tensor = _count(args, "tensor-parallel-size", "tp")
    return tensor * _count(args, "pipeline-parallel-size", "pp")


def _count(args: Sequence[str], *names: str) -> int:
    """A flag that is a whole number; 1 when it is not there, or is what vLLM will refuse."""
    value = _flag(args, *names) or ""
    return max(1, int(value)) if value.isdigit() else 1


def _flag(args: Sequence[str], *names: str) -> str | None:
    """The value of a flag of vllm serve; None when it is not there or is no number."""
    found = None
    for place, word in enumerate(args):
        head, equals, value = word.partition("=")
        if head.lstrip("-").replace("_", "-") in names and head.startswith("-"):
            found = value if equals else next(iter(args[place + 1 : place + 2]), None)
    return found if found and re.fullmatch(r"\d+(\.\d+)?", found) else None


def _memories(report: HostReport) -> list[int | None]:
    """MiB of every GPU that nvidia-smi lists."""
    smi = report.driver.data.smi if report.driver.data else None
    return [gpu.memory_mib for gpu in smi.log.gpus] if smi and smi.log else []


def gpu_memory(report: HostReport) -> int | None:
    """Bytes of the smallest GPU: which one the engine will take is CUDA's choice."""
    return min((mib for mib in _memories(report) if mib), default=0) * (1 << 20) or None


def accelerator_notes(settings: Settings, report: HostReport, facts: PlanInputs) -> Iterator[str]:
    gpu = report.gpu.data
    if gpu and facts.cuda is None:
        idle = nvidia(gpu) if settings.accelerator == "cpu" else None
        amd = ", ".join(device.address for device in gpu.amd.pci)
        if idle or amd:
            yield f"A GPU is here and will not be used: {idle or f'AMD at PCI {amd}'}."
    if facts.cuda is not None and facts.lock_state.startswith("resolved"):
        yield (
            f"The lock {facts.lock_name} was resolved and never run, by whoever made this version "
            "(kvhost matrix): its ABI check and the restart test decide on this host."
        )
    if facts.driver:
        yield from facts.driver.notes
