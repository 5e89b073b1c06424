"""What kvhost/onhost/evidence_foreign.py hands over, schema version 1. Facts only, no judgement.

Like kvhost/verdict/evidence.py, for a server that kvhost did not install: what cannot be had
there is None. Seconds are differences by a monotonic clock, unix times are wall clock, sizes are
bytes.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from kvhost.verdict.evidence import (
    Amount,
    CacheCounters,
    Count,
    FilesDelta,
    Filesystem,
    PageCache,
    Part,
    Process,
    Step,
    VllmCounters,
)

ForeignRole = Annotated[str, Field(pattern="^(cold|warm|restored|control)$")]


class RunnerPage(VllmCounters):
    """vLLM's metrics page; ``start_time``: unix seconds, of the process that serves the API."""

    start_time: Amount | None


class CachePage(CacheCounters):
    """An LMCache server's metrics page."""

    start_time: Amount | None


class Pages(Part):
    """Pages of the cold request's files that are as they were, and those in the page cache."""

    pages: Count
    resident: Count


class ForeignSnapshot(Part):
    """State at one moment. ``runner``: who listens on the port, where that is on this machine.
    ``sent``: requests of the test to this process.
    What concerns files is None without a storage directory."""

    unix: Amount
    vllm: RunnerPage | None
    cache: CachePage | None
    sent: Count
    runner: Process | None
    files: Count | None
    own_files: Count | None
    own_pages: Pages | None


class ForeignRequest(Part):
    role: ForeignRole
    prompt_digest: str
    error: str | None
    http_status: int | None
    ttft_s: Amount | None
    total_s: Amount | None
    output_tokens: list[Count] | None
    usage_prompt_tokens: Count | None
    usage_cached_tokens: Count | None
    before: ForeignSnapshot | None
    after: ForeignSnapshot | None
    files: FilesDelta | None


class ForeignWritten(Part):
    """What the cold request wrote below the storage directory. at_rest: unchanged at the end."""

    new_files: Count
    new_bytes: Count
    temporary_files: Count
    at_rest: bool
    waited_s: Amount


class ForeignRefused(Part):
    """Why the test did not run; None: the metrics could not say."""

    busy: Count | None
    finished: Count | None


class Command(Part):
    """The restart command. Only its program is kept: arguments may hold secrets."""

    program: str
    exit_code: int | None
    began_unix: Amount
    ready_s: Amount | None


class ForeignConfig(Part):
    model: str | None
    prompt_tokens: Count
    chunk_size: Count
    max_tokens: Count
    disrupt: bool
    storage_dir: str | None


class Where(Part):
    """Where the script and with it the restart command ran, and as whom."""

    host: str
    user: str


class ForeignEvidence(Part):
    """The test of one restart of a server of others."""

    schema_: Literal["kvhost/evidence-foreign/1"] = Field(alias="schema")
    started_unix: Amount
    finished_unix: Amount
    event: Literal["command"]
    config: ForeignConfig
    where: Where
    cache_metrics: bool
    filesystem: Filesystem | None
    versions: dict[str, str]
    prompts: Literal["ids", "words", "text"] | None
    refused: ForeignRefused | None
    interrupted: str | None
    restart: Command | None
    requests: dict[ForeignRole, ForeignRequest]
    written: ForeignWritten | None
    page_cache: PageCache | None
    steps: list[Step]


def parse_foreign(text: str) -> ForeignEvidence:
    """Evidence from the JSON that evidence_foreign.py wrote.

    Raises pydantic.ValidationError, which names every field that is missing, unknown or wrong.
    """
    return ForeignEvidence.model_validate_json(text)
