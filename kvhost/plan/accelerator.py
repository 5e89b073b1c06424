"""What the engine computes on: what a plan says of it, and every reason against it. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from kvhost.driver.decide import Decision, decide
from kvhost.engine.matrix import LockInfo, Matrix, ProgramInfo
from kvhost.plan.gpus import gpu_refusals, gpus_without_cuda
from kvhost.plan.host import nvidia
from kvhost.plan.types import Action, PlanInputs, Refusal, unreadable
from kvhost.report import HostReport
from kvhost.settings import Settings


def decision_of(
    report: HostReport, lock: LockInfo | ProgramInfo, matrix: Matrix
) -> Decision | None:
    """What is decided of the driver, None for a CPU lock and where the facts are not there."""
    if isinstance(lock, ProgramInfo) or lock.cuda is None or report.driver.data is None:
        return None
    inside = report.pid1.data.container if report.pid1.data else None
    return decide(report.driver.data, lock, matrix, inside)


def accelerator_actions(
    settings: Settings, report: HostReport, facts: PlanInputs
) -> Iterator[Action]:
    what = "the CPU engine, no accelerator"
    if settings.accelerator == "auto" and report.gpu.data:
        what = "the CPU engine: accelerator = auto, and no NVIDIA GPU was found here"
    if facts.cuda is not None:
        what = facts.driver.words if facts.driver else "a GPU, of which nothing is known"
    yield Action("accelerator", what, "keep")
    if facts.mend is not None:
        yield Action("accelerator", facts.mend.words, "change", facts.mend.cost)


def accelerator_refusals(
    settings: Settings, report: HostReport, facts: PlanInputs
) -> Iterator[Refusal]:
    if settings.accelerator == "auto" and report.gpu.data is None:
        yield unreadable("accelerator", "whether there is a GPU", report.gpu.why)
    if facts.cuda is None:
        yield from gpus_without_cuda(settings, facts)
        return
    if facts.driver is None:
        yield unreadable("accelerator", "the GPU's driver", report.driver.why)
        return
    if facts.mend is not None:
        yield from facts.mend.refusals
        return  # what fits into the GPU is asked once its driver answers
    yield from facts.driver.refusals
    if not facts.driver.refusals:
        yield from gpu_refusals(settings, report, facts)


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
