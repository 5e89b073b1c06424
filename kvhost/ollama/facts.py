"""What onhost/ollama_look.py printed, checked."""

from __future__ import annotations

from typing import Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

T = TypeVar("T")


class _Fact(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Part(_Fact, Generic[T]):
    """``why`` is None exactly where the status is ok."""

    status: Literal["ok", "absent", "unreadable"]
    why: str | None
    data: T | None


class Api(_Fact):
    version: str


class Model(_Fact):
    """``digest``: of the manifest, as `ollama list` shows its beginning; ``blob``: of the file."""

    digest: str
    blob: str | None
    architecture: str | None
    quantization: str | None
    #: key of the GGUF without its architecture -> value; a list has one value a layer
    shape: dict[str, int | float | list[int] | str | None]


class Loaded(_Fact):
    """Tokens, and bytes of weights, KV and buffers together."""

    context_length: int | None
    size: int | None
    size_vram: int | None
    expires_at: str | None


class Told(_Fact):
    k: str
    v: str


class Allocated(_Fact):
    """One line of llama.cpp's. MiB are rounded to two digits."""

    cells: int | None
    layers: int | None
    k: str
    v: str
    k_mib: float
    v_mib: float


class Why(_Fact):
    slug: str
    text: str
    type: str | None = None


class Load(_Fact):
    """One load of a model: onhost/ollama_log.py's load()."""

    via: Literal["runner", "llama-server", "unseen"]
    blob: str | None
    told: Told | None
    flash: str | None
    cells: int | None
    parallel: int | None
    allocated: list[Allocated]
    buffers: tuple[int, int] | None
    why: list[Why]
    failed: Why | None


class Log(_Fact):
    config: dict[str, str]
    version: str | None
    load: Load | None
    loads: int


class OllamaFacts(_Fact):
    schema_: Literal[1] = Field(alias="schema")
    url: str
    name: str
    api: Part[Api]
    model: Part[Model]
    #: whether the model could be loaded, where that was asked for
    asked: Part[None] | None = None
    loaded: Part[Loaded]
    log: Part[Log]


class OllamaEvidence(_Fact):
    """What the verdict on an Ollama rests on; times in seconds since 1970, ``wanted``: KV type."""

    schema_: Literal["kvhost/evidence-ollama/1"] = Field(
        default="kvhost/evidence-ollama/1", alias="schema"
    )
    started_unix: float
    finished_unix: float
    wanted: str
    #: as `ollama list` shows its beginning, where it is pinned
    wanted_digest: str | None
    facts: OllamaFacts

    @property
    def event(self) -> Literal["none"]:
        """Nothing is restarted: nothing could come back."""
        return "none"

    @property
    def refused(self) -> None:
        return None

    @property
    def versions(self) -> dict[str, str]:
        api = self.facts.api.data
        return {"ollama": api.version} if api else {}


def parse_facts(text: str) -> OllamaFacts:
    """Raises ValueError."""
    return OllamaFacts.model_validate_json(text)
