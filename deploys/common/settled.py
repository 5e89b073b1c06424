"""What settings and report of a host come to: its lock, and settings that follow from the model.

The one place in which they are derived, for a run and for whatever compares or counts by them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from deploys.common.context import REPO
from kvhost.engine.matrix import LockInfo, Matrix, ProgramInfo, load_matrix
from kvhost.llama.need import llama_need, need_of_heads
from kvhost.onhost import model_builtin
from kvhost.plan.derive import derived
from kvhost.plan.lock import choose_lock
from kvhost.plan.model_need import need_of, weights_bytes
from kvhost.plan.types import ModelNeed, Refusal
from kvhost.report import HostReport
from kvhost.settings import Settings


@dataclass(frozen=True)
class Settled:
    """What a run of one host goes by."""

    settings: Settings
    #: a sentence for each setting that was not given and is another than the default
    notes: tuple[str, ...]
    info: LockInfo | ProgramInfo
    #: what stands against that lock
    refusals: tuple[Refusal, ...]


def settled(settings: Settings, report: HostReport) -> Settled:
    """Of a host with any runner but Ollama, which has no lock, and of which nothing is derived.
    Raises LockError."""
    info, refusals = choose_lock(settings, report, the_matrix())
    need = model_need(settings, report)
    settings, notes = derived(settings, report, need, cuda=info.cuda is not None)
    return Settled(settings, notes, info, refusals)


@cache
def the_matrix() -> Matrix:
    """Read once in a run. Raises LockError."""
    return load_matrix(REPO / "locks")


def model_need(settings: Settings, report: HostReport) -> ModelNeed | None:
    if settings.model_source == "builtin":
        told = model_builtin.describe()
        if settings.runner == "llama_server":
            return replace(
                need_of_heads(
                    settings, [told["kv_heads"]] * told["layers"], *[told["head_dim"]] * 2
                ),
                weights_bytes=told["weights_memory_bytes"],
                max_context=told["context_tokens"],
            )
        return ModelNeed(
            told["weights_memory_bytes"],
            told["kv_bytes_per_token"],
            told["context_tokens"],
            told["attention_heads"],
            told["kv_heads"],
        )
    if report.model.data is None or report.model.data.config.data is None:
        return None
    if settings.runner == "llama_server":
        return llama_need(report.model.data.config.data, settings)
    weights = weights_bytes(report.model.data, settings)
    return need_of(report.model.data.config.data, weights, settings)
