"""What kvhost/onhost/evidence_llama.py hands over, schema version 1. No judgement.

Seconds are wall-clock differences, but for ttft_s, which is the server's own time for the prompt
and one token. A part that could not be read is None, never 0.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from kvhost.verdict.evidence import (
    Amount,
    Count,
    Filesystem,
    Identity,
    Part,
    Process,
    Refused,
    Restart,
    Step,
)

SCHEMA = "kvhost/evidence-llama/1"
LlamaEvent = Literal["both", "kill"]
Role = Literal["cold", "warm", "restored", "control"]


class LlamaCounters(Part):
    """llama-server's metrics page: tokens computed, taken from a slot, and answered."""

    prompt_tokens: Amount
    cached_tokens: Amount
    predicted_tokens: Amount


class LlamaSnapshot(Part):
    unix: Amount
    counters: LlamaCounters | None
    process: Process | None


class LlamaRequest(Part):
    """One greedy completion; prompts appear as a digest only. ``prompt_n``: tokens of the prompt
    that were computed, ``cache_n``: that were there already, both by the server's timings."""

    role: Role
    prompt_digest: str
    prompt_tokens: Count
    error: str | None
    http_status: Count | None
    ttft_s: Amount | None
    total_s: Amount | None
    output_tokens: list[Count] | None
    prompt_n: Count | None
    cache_n: Count | None
    first_logprobs: dict[str, float] | None
    before: LlamaSnapshot | None
    after: LlamaSnapshot | None


class LlamaService(Part):
    before: Identity | None
    after: Identity | None
    restart: Restart | None


class Saved(Part):
    """The test's slot as it was saved, by its note, and its file as it lay after the event."""

    tokens: Count | None
    bytes: Count | None
    file_bytes: Count | None
    same_digest: bool | None
    same_engine: bool | None
    saved_unix: Amount | None


class GivenBack(Part):
    """``given_back``: what was in the test's slot is there again; None: nothing was in it."""

    erased: bool
    given_back: bool | None
    why: str | None


class LlamaConfig(Part):
    model: str
    prompt_tokens: Count
    max_tokens: Count
    slot: Count
    namespace_dir: str
    disrupt: bool
    exact_numerics: bool


class LlamaEvidence(Part):
    """The test of one event on one host."""

    schema_: Literal["kvhost/evidence-llama/1"] = Field(alias="schema")
    started_unix: Amount
    finished_unix: Amount
    event: LlamaEvent
    config: LlamaConfig
    boot_id: str
    filesystem: Filesystem
    versions: dict[str, str]
    refused: Refused | None
    interrupted: str | None
    services: dict[Literal["runner", "slots"], LlamaService]
    requests: dict[Role, LlamaRequest]
    saved: Saved | None
    restored: bool | None
    cleanup: GivenBack | None
    steps: list[Step]


class _File(Part):
    schema_: Literal["kvhost/evidence-llama/1"] = Field(alias="schema")
    events: Annotated[list[LlamaEvidence], Field(min_length=1)]


def parse_llama(text: str) -> list[LlamaEvidence]:
    """Evidence of every event, from the JSON that evidence_llama.py wrote.

    Raises pydantic.ValidationError, which names every wrong field.
    """
    return _File.model_validate_json(text).events
