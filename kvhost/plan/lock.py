"""Which lock a host gets, and every reason why it gets none. Pure.

The CPU engine on a GPU host is never a silent fallback: only `accelerator = cpu` leads there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvhost.engine.matrix import PAIR, LockInfo, Matrix, ProgramInfo
from kvhost.plan.host import nvidia
from kvhost.plan.types import Refusal
from kvhost.report import HostReport
from kvhost.services.native import VLLM_TRIED
from kvhost.settings import Settings

Choice = tuple[LockInfo | ProgramInfo, tuple[Refusal, ...]]


def wanted_accelerator(settings: Settings, report: HostReport) -> str:
    """cpu or cuda: auto is cuda where there is an NVIDIA GPU."""
    if settings.accelerator != "auto":
        return settings.accelerator
    return "cuda" if report.gpu.data and nvidia(report.gpu.data) else "cpu"


def choose_lock(settings: Settings, report: HostReport, matrix: Matrix) -> Choice:
    """The lock for this host, and what stands against it. With a refusal the lock is only there so
    that the rest of the plan can be made. Raises nothing."""
    machine = report.arch.data.machine if report.arch.data else "unknown"
    accelerator = wanted_accelerator(settings, report)
    if settings.runner != "vllm":
        return _program(settings, matrix, machine, accelerator)
    rows = matrix.fitting(machine, accelerator)
    # where no lock is for such a machine, the plan's wrong_arch says it
    fallback = rows[0] if rows else next(iter(matrix.locks.values()))
    wanted = settings.engine_lock
    if wanted == "auto":
        if not rows and matrix.fitting(machine, _other(accelerator)):
            return fallback, (_no_lock_of_that_kind(machine, accelerator),)
        return fallback, tuple(_wheel(settings, fallback))
    if pair := PAIR.fullmatch(wanted):
        found = next((one for one in rows if one.pair == wanted), None)
        if found is None:
            return fallback, (_not_in_matrix(matrix, pair[1], wanted, machine, accelerator),)
    elif wanted in matrix.locks:
        found = matrix.locks[wanted]
    else:
        return fallback, (_unknown(matrix.locks, wanted),)
    return found, (*_kind(settings, found, accelerator, rows), *_wheel(settings, found))


def _program(settings: Settings, matrix: Matrix, machine: str, accelerator: str) -> Choice:
    """The lock of a runner that is one program."""
    rows = [one for one in matrix.programs.values() if one.runner == settings.runner]
    fitting = [one for one in rows if one.machine == machine]
    found, refusals = (fitting or rows)[0], []
    if settings.engine_lock != "auto":
        named = [one for one in rows if one.name == settings.engine_lock]
        if named:
            found = named[0]
        else:
            refusals.append(_unknown({one.name: one for one in rows}, settings.engine_lock))
    if accelerator == "cuda":
        refusals.append(_gpu_not_used(settings.runner))
    return found, tuple(refusals)


def _gpu_not_used(runner: str) -> Refusal:
    return Refusal(
        "engine",
        "runner_without_gpu",
        f"{runner} runs on the CPU in this version, and this host's GPU would be idle",
        "a host without a GPU, or accelerator = cpu",
        "an NVIDIA GPU, or accelerator = cuda",
        'accelerator = "cpu" to leave the GPU alone, or runner = "vllm"',
    )


def _other(accelerator: str) -> str:
    return "cuda" if accelerator == "cpu" else "cpu"


def _no_lock_of_that_kind(machine: str, accelerator: str) -> Refusal:
    return Refusal(
        "engine",
        "no_lock_of_that_kind",
        f"no lock for {machine} is made for accelerator = {accelerator}",
        f"a lock for {machine} and {accelerator} (kvhost matrix)",
        f"locks for {machine} and {_other(accelerator)} alone",
        f'accelerator = "{_other(accelerator)}", or another host',
    )


def _not_in_matrix(
    matrix: Matrix, vllm: str, wanted: str, machine: str, accelerator: str
) -> Refusal:
    why = matrix.why_absent(vllm)
    near = matrix.nearest(vllm, machine, accelerator)
    fix = "another host"
    if near:
        pair = f"vLLM {near.vllm} with LMCache {near.lmcache}"
        fix = f"the nearest that fits this host: engine_lock = {near.name!r} ({pair})"
    return Refusal(
        "engine",
        "pair_not_in_matrix",
        f"vLLM+LMCache {wanted} is not in the matrix for {machine} with {accelerator}",
        "a pair whose compiled parts are known to fit each other (kvhost matrix)",
        f"vLLM {vllm} is left out: {why}" if why else f"engine_lock = {wanted!r}",
        fix,
    )


def _unknown(locks: Mapping[str, object], wanted: str) -> Refusal:
    return Refusal(
        "engine",
        "no_such_lock",
        f"there is no lock {wanted!r}",
        f"one of {', '.join(locks)}, or a pair of them as VLLM+LMCACHE, or auto",
        f"engine_lock = {wanted!r}",
        'engine_lock = "auto"',
    )


def _kind(
    settings: Settings, found: LockInfo, accelerator: str, rows: list[LockInfo]
) -> Iterator[Refusal]:
    if found.accelerator == accelerator:
        return
    instead = f"engine_lock = {rows[0].name!r}" if rows else 'engine_lock = "auto"'
    if accelerator == "cuda":
        yield Refusal(
            "engine",
            "cpu_lock_on_gpu_host",
            f"the lock {found.name} would leave this host's GPU idle",
            "a lock for CUDA, or accelerator = cpu",
            f"torch {found.torch}, and accelerator = {settings.accelerator}",
            f'{instead}, or accelerator = "cpu" to ignore the GPU',
        )
    else:
        yield Refusal(
            "engine",
            "gpu_lock_without_gpu",
            f"the lock {found.name} is for a GPU, and the CPU is what this run would use",
            "a lock for the CPU, or an NVIDIA GPU",
            f"torch {found.torch} for CUDA {found.cuda}, and accelerator = {settings.accelerator}",
            instead,
        )


def _wheel(settings: Settings, found: LockInfo) -> Iterator[Refusal]:
    if settings.native and not found.vllm.startswith(VLLM_TRIED):
        yield Refusal(
            "engine",
            "native_not_tried",
            f"vLLM's own tiering was not tried with the vLLM of the lock {found.name}",
            f"vLLM {VLLM_TRIED[0]}x for cache_kind native",
            f"vLLM {found.vllm}",
            "another engine_lock, or cache_kind = 'mp'",
        )
    if settings.engine_wheel is not None and found.cuda is not None:
        yield Refusal(
            "engine",
            "engine_wheel_is_for_cpu",
            "engine_wheel takes the place of the third party's CPU build, and of nothing else",
            "a CPU lock",
            f"the lock {found.name}, in which vLLM is its maintainers' own",
            "leave engine_wheel out",
        )
