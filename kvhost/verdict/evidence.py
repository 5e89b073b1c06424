"""What kvhost/onhost/evidence.py hands over, schema version 2 and the older 1. No judgement.

A run tests one event after another; each is one `Evidence` with prompts of its own, so that each
can be judged by itself. Version 1 knows the event "both" and one control, the unseen prompt.

Seconds are wall-clock differences by a monotonic clock, sizes are bytes, counters are the sums over
all engines and models of a Prometheus page. A part that could not be read is None, never 0.
"""

from __future__ import annotations

import json
from typing import Annotated, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

SCHEMA = "kvhost/evidence/2"
#: What is done to the services between the two requests (docs/verdict.md)
Event = Literal["runner", "cache", "both", "kill", "reboot", "other"]
EVENTS: tuple[Event, ...] = get_args(Event)
Count = Annotated[int, Field(ge=0)]
Amount = Annotated[float, Field(ge=0)]
#: cold, warm, restored: the prompt of the test. control: never seen. half: shares the first half
#: of the prompt of half_cold. moved: the prompt of moved_cold, its files moved aside. killed:
#: cut off by kill -9; cut: the same prompt afterwards, reference: once more, computed anew.
Role = Annotated[
    str,
    Field(
        pattern="^(cold|warm|restored|control|half_cold|half|moved_cold|moved|killed|cut|reference)$"
    ),
]
ServiceName = Annotated[str, Field(pattern="^(cache|runner)$")]


class Part(BaseModel):
    """Strict: evidence of another version is refused, not half understood; no text is a number,
    no number is infinite or none."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, defer_build=True
    )


class Process(Part):
    """A process told from a later one with the same number: start_ticks is field 22 of its stat."""

    pid: Annotated[int, Field(ge=1)]
    start_ticks: Count
    boot_id: str


class Identity(Part):
    """A service by its launcher's record, by /proc, and whether it holds the listening socket."""

    record: Process | None
    proc: Process | None
    listens: bool | None


class Restart(Part):
    exit_code: int | None
    ready_s: Amount | None


class Service(Part):
    before: Identity
    after: Identity | None
    restart: Restart | None


class VllmCounters(Part):
    """vLLM's metrics page; names in evidence_probe.py."""

    requests_finished: Amount | None
    running: Amount | None
    waiting: Amount | None
    prefix_hits: Amount | None
    external_queries: Amount | None
    external_hits: Amount | None
    from_compute: Amount | None
    from_device: Amount | None
    from_external: Amount | None


class CacheCounters(Part):
    """The cache server's metrics page; a counter appears there with its first event."""

    lookups: Amount | None
    requested_tokens: Amount | None
    hit_tokens: Amount | None
    hit_l1_tokens: Amount | None
    hit_l2_tokens: Amount | None
    l2_loads: Amount | None
    l2_stored_chunks: Amount | None
    l2_adapters: Amount | None


class Reads(Part):
    """/proc/PID/io of the cache server: all reads, and those that went to storage."""

    rchar: Count
    read_bytes: Count


class Processes(Part):
    cache: Process | None
    runner: Process | None


class Snapshot(Part):
    """State at one moment. ``own_files``: files of the cold request that still lie unchanged."""

    unix: Amount
    vllm: VllmCounters | None
    cache: CacheCounters | None
    own_requests: Count | None
    processes: Processes
    cache_reads: Reads | None
    device_read_bytes: Count | None
    files: Count
    bytes: Count
    own_files: Count


class FilesDelta(Part):
    """What happened to the files of the namespace between the two snapshots of a request."""

    new: Count
    changed: Count
    gone: Count


class Request(Part):
    """One greedy completion. Prompts appear as a digest only; output tokens are token ids."""

    role: Role
    prompt_digest: str
    error: str | None
    http_status: Count | None
    ttft_s: Amount | None
    total_s: Amount | None
    output_tokens: list[Count] | None
    usage_prompt_tokens: Count | None
    usage_cached_tokens: Count | None
    before: Snapshot | None
    after: Snapshot | None
    files: FilesDelta | None
    prompt_tokens: Count | None = None
    """Tokens of this prompt; None: those of the config."""
    first_logprobs: dict[str, float] | None = None
    """Token id -> log probability (natural logarithm) of the likeliest first tokens."""
    written: Written | None = None
    """The wait for this request's files, where the test depends on them."""


class Written(Part):
    """The wait until a request's KV lay in the namespace."""

    expected_files: Count
    new_files: Count
    new_bytes: Count
    sizes: list[Count]
    temporary_files: Count
    waited_s: Amount
    timed_out: bool


class PageCache(Part):
    """The test's files after fsync and posix_fadvise(DONTNEED): pages by mincore."""

    files: Count
    pages: Count
    resident_before: Count
    resident_after: Count


class Moved(Part):
    """Files of one of the test's own prompts, moved to another namespace while it was asked, and
    put back; how many of their pages were in the page cache then (None: they cannot be dropped)."""

    moved: Count
    put_back: Count
    left: Count
    pages: Count
    resident_after: Count | None


class Flushed(Part):
    """The engine's own KV memory, filled with other prompts until the test's was evicted."""

    blocks: Count | None
    block_size: Count | None
    tokens: Count
    requests: Count
    seconds: Amount
    error: str | None


class Killed(Part):
    """kill -9 of both services in the middle of a write; ``files``: new whole ones at that moment,
    ``kept``: those of them that a sweep at the start left."""

    pids: list[Count]
    files: Count
    expected_files: Count
    kept: Count | None


class Resumed(Part):
    """A test that went on after a reboot: boots and PID 1's start times of before and after."""

    boot_id: str
    pid1_ticks: Count
    boot_id_after: str
    pid1_ticks_after: Count
    waited_s: Amount


class Log(Part):
    """Lines with known texts between two byte offsets of a log."""

    from_offset: Count = Field(alias="from")
    to: Count | None
    lines: list[str]


class Cleanup(Part):
    removed: Count
    bytes: Count
    left: Count
    why: str | None


class Refused(Part):
    """Why the test did not run; None: the metrics could not say."""

    busy: Count | None
    foreign: int | None
    own: Count | None


class Step(Part):
    name: str
    ok: bool
    seconds: Amount
    error: str | None


class TestConfig(Part):
    __test__ = False  # not for pytest

    model: str
    prompt_tokens: Count
    chunk_size: Count
    max_tokens: Count
    files_per_chunk: Annotated[int, Field(ge=1)]
    warm: bool
    disrupt: bool
    namespace_dir: str
    exact_numerics: bool = True
    """Whether the same request gives the same arithmetic; False on a GPU."""
    native: bool = False
    """Whether vLLM keeps its cache itself: no cache server, and the counters called the cache's are
    those of vLLM's tiers, chunks as tokens."""


class Filesystem(Part):
    fstype: str | None
    device: str | None


class Evidence(Part):
    """The test of one event on one host. ``requests`` is by role.

    ``services``: ``before`` is who was asked before the event, ``after`` who was asked after it.
    """

    schema_: Literal["kvhost/evidence/1", "kvhost/evidence/2"] = Field(alias="schema")
    started_unix: Amount
    finished_unix: Amount
    event: Event
    config: TestConfig
    boot_id: str
    filesystem: Filesystem
    versions: dict[str, str]
    refused: Refused | None
    interrupted: str | None
    services: dict[ServiceName, Service]
    requests: dict[Role, Request]
    written: Written | None
    page_cache: PageCache | None
    logs: dict[str, Log]
    cleanup: Cleanup | None
    steps: list[Step]
    moved: Moved | None = None
    registered: bool | None = None
    flushed: Flushed | None = None
    killed: Killed | None = None
    resumed: Resumed | None = None


class EvidenceFile(Part):
    """What evidence.py writes since version 2: the events in the order of their tests."""

    schema_: Literal["kvhost/evidence/2"] = Field(alias="schema")
    events: list[Evidence] = Field(min_length=1)


def parse_evidence(text: str) -> Evidence:
    """Evidence of one event from its JSON.

    Raises pydantic.ValidationError, which names every field that is missing, unknown or wrong.
    """
    return Evidence.model_validate_json(text)


def parse_events(text: str) -> list[Evidence]:
    """Evidence of every event from the JSON that evidence.py wrote, of version 2 or 1.

    Raises ValueError: JSON's own, or pydantic.ValidationError, which names every wrong field.
    """
    found = json.loads(text)
    if isinstance(found, dict) and found.get("schema") == "kvhost/evidence/1":
        return [parse_evidence(text)]
    return EvidenceFile.model_validate_json(text).events
