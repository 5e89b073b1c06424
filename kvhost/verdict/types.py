"""The verdict on one event of the test, and how several are summed up."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from kvhost.basics import EXIT_CODES, Persisted
from kvhost.verdict.evidence import Event

__all__ = ["EXIT_CODES", "Persisted"]  # and what is below

Weight = Literal["fail", "inconclusive", "note"]
_RANK: dict[Persisted, int] = {"PASS": 0, "NO_BY_DESIGN": 1, "INCONCLUSIVE": 2, "FAIL": 3}


def worst(verdicts: Iterable[Persisted]) -> Persisted:
    """A FAIL outweighs an INCONCLUSIVE; none at all is INCONCLUSIVE."""
    return max(verdicts, key=_RANK.__getitem__, default="INCONCLUSIVE")


class Thresholds(BaseModel):
    """What the judge asks for. Ratios are fractions of 1."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    min_hit: float = Field(default=0.95, gt=0, le=1)
    """Part of the prompt's whole chunks that must come from L2."""
    min_chunks: int = Field(default=2, ge=1)
    """A prompt of fewer whole chunks says too little."""
    max_resident: float = Field(default=0.01, ge=0, le=1)
    """Part of the test's pages that may stay in the page cache."""
    max_gap: float = Field(default=0.2, gt=0)
    """How far the log probability (nats) of the first token may be off, see docs/verdict.md."""
    worth_ratio: float = Field(default=0.8, gt=0, le=1)
    """Worth it: the first token after the restart takes at most this part of the time that
    computing takes, the shorter one of the cold request and the control."""


class Condition(BaseModel):
    """One question, its figure and threshold. ``met`` None: the figure is missing or cannot tell.

    weight: what a condition that is not met means. fail: the cache did not do it. inconclusive: the
    test cannot say. note: it is only said. A ``met`` of None never passes, except for a note.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    id: str
    question: str
    figure: float | int | str | None
    threshold: str
    met: bool | None
    weight: Weight


class Cause(BaseModel):
    """A likely cause with what to change; ``link`` is a place in docs/troubleshooting.md."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    slug: str
    title: str
    change: str
    link: str


class Verdict(BaseModel):
    """Of one event. persisted never depends on time; worth_it depends on nothing else."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    event: Event | Literal["command", "none"] = "both"
    """"command": the restart command of a server that kvhost did not install; "none": nothing is
    restarted, for nothing could persist."""
    persisted: Persisted
    worth_it: Literal["yes", "no", "unknown"]
    summary: str
    ttft_cold_s: float | None
    ttft_warm_s: float | None
    ttft_restored_s: float | None
    ttft_control_s: float | None
    conditions: list[Condition]
    causes: list[Cause]
    thresholds: Thresholds

    @property
    def exit_code(self) -> int:
        """NO_BY_DESIGN is as good as its conditions: 1 or 2 where one is not met, or not known."""
        if self.persisted == "NO_BY_DESIGN":
            met = [one.met for one in self.conditions if one.weight == "fail"]
            if not all(met):
                return 1 if False in met else 2
        return EXIT_CODES[self.persisted]
