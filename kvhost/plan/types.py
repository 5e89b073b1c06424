"""The words of a plan: what goes into it, actions, refusals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from kvhost.driver.decide import Decision
    from kvhost.driver.mend import Mend

Stage = Literal[
    "host", "storage", "accelerator", "engine", "model", "cache", "runner", "verify"
]  # in the order of a run
State = Literal["change", "keep", "unknown"]

GIB = 1 << 30


@dataclass(frozen=True)
class ModelNeed:
    """What a model asks for: bytes of weights in memory, bytes of KV a token, tokens of context.
    `heads`, `kv_heads`: of its attention, by which tensor parallelism divides it; None: not known.
    `kv_parts`: KV heads and bytes of KV a token of layers alike, where not all are.
    """

    weights_bytes: int
    kv_bytes_per_token: int
    max_context: int
    heads: int | None = None
    kv_heads: int | None = None
    kv_parts: tuple[tuple[int, int], ...] = ()

    def weights_of_rank(self, ranks: int) -> float:
        """Bytes; embeddings, which vLLM divides too, are counted like the rest."""
        return self.weights_bytes / ranks

    def kv_of_rank(self, tensor: int, pipeline: int = 1) -> float:
        """Bytes a token that one rank holds: more ranks than KV heads each hold a whole head."""
        if not self.kv_parts and self.kv_heads is None:
            return self.kv_bytes_per_token / tensor / pipeline
        parts = self.kv_parts or ((self.kv_heads or 1, self.kv_bytes_per_token),)
        return sum(size * max(1, heads // tensor) / heads for heads, size in parts) / pipeline


@dataclass(frozen=True)
class PlanInputs:
    """What the controller knows beside settings and report. Digests are hex, sizes bytes.

    `lock_pythons`: "3.11", … that a lock exists for. `lock_arch`: as `uname -m` says it.
    `lock_refusals`: what stands against the lock, from plan_lock. `bundle_refusals`: against the
    bundle on the controller, from bundle. `lock_state`: what was run with
    it. `cuda`: the major that it is for, None for the CPU. `driver`: what is decided of the GPU's,
    `mend`: what would be done about it.
    `model`: None while it is not known (before a download). `engine_config`: the resolved
    configuration whose digest is `engine_config_digest`, to say what makes a namespace new; None
    while it is not known. `rendered`: sha256 by path, below bin/ and etc/ of base_dir, of what
    would be written; None when not rendered. `lock_is_stale`: True when the process that holds
    the host's run lock ran on this controller and is dead; None when that cannot be known here.
    `third_party`: who built the engine, where not its maintainers did. `build_cost`: what building
    it on the host takes, None where nothing is built.
    `derived`: why settings that were not given are what they are.
    """

    lock_name: str
    lock_digest: str
    lock_pythons: tuple[str, ...]
    lock_arch: str
    download_bytes: int
    env_disk_bytes: int
    third_party: str | None
    tools_digest: str
    settings_digest: str
    model: ModelNeed | None
    builtin_digest: str
    builtin_bytes: int
    engine_config_digest: str | None = None
    engine_config: Mapping[str, object] = field(default_factory=dict)
    rendered: Mapping[str, str] | None = None
    lock_is_stale: bool | None = None
    with_key: bool = False
    lock_refusals: tuple[Refusal, ...] = ()
    bundle_refusals: tuple[Refusal, ...] = ()
    lock_state: str = ""
    cuda: int | None = None
    driver: Decision | None = None
    derived: tuple[str, ...] = ()
    mend: Mend | None = None
    build_cost: str | None = None


@dataclass(frozen=True)
class Action:
    """One step: `state` says whether it changes the host; `cost` what that takes or breaks."""

    stage: Stage
    what: str
    state: State
    cost: str | None = None


@dataclass(frozen=True)
class Refusal:
    """A reason not to start: `needed` and `found` with their figures, `fix` what to do."""

    stage: Stage
    code: str
    what: str
    needed: str
    found: str
    fix: str


@dataclass(frozen=True)
class Plan:
    """What a run would do to one host. With any refusal it does nothing."""

    actions: tuple[Action, ...]
    refusals: tuple[Refusal, ...]
    notes: tuple[str, ...]


def unreadable(stage: Stage, name: str, why: str | None) -> Refusal:
    """A decision needs what could not be read on the host: it is refused, never guessed."""
    return Refusal(
        stage,
        "unreadable",
        f"{name} could not be found out on this host",
        f"{name}, to decide whether the run is safe",
        why or "no reason was given",
        "make it readable (the report runs as root), or mend what the reason names",
    )


def size(count: float) -> str:
    """Bytes as people read them: 64 MiB, 2.2 GiB, 41 GiB."""
    for unit, step in (("TiB", GIB << 10), ("GiB", GIB), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= step:
            number = count / step
            return f"{number:.{int(number < 100)}f}".removesuffix(".0") + f" {unit}"
    return f"{count:.0f} bytes"
