"""What kvhost/onhost/evidence.py hands over, schema version 1. Facts only, no judgement.

Seconds are wall-clock differences by a monotonic clock, sizes are bytes, counters are the sums over
all engines and models of a Prometheus page. A part that could not be read is None, never 0.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

SCHEMA = "kvhost/evidence/1"
Count = Annotated[int, Field(ge=0)]
Amount = Annotated[float, Field(ge=0)]
Role = Annotated[str, Field(pattern="^(cold|warm|restored|control)$")]
ServiceName = Annotated[str, Field(pattern="^(cache|runner)$")]


class Part(BaseModel):
    """Strict: evidence of another version is refused, not half understood; no text is a number,
    no number is infinite or none."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


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


class Written(Part):
    """The wait until the cold request's KV lay in the namespace."""

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


class Filesystem(Part):
    fstype: str | None
    device: str | None


class Evidence(Part):
    """One run of the restart-persistence test on one host.

    ``event`` is what was restarted; ``requests`` is by role (cold, warm, restored, control), so
    that further events and controls are further values, not another shape.
    """

    schema_: Literal["kvhost/evidence/1"] = Field(alias="schema")
    started_unix: Amount
    finished_unix: Amount
    event: Literal["both"]
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


def parse_evidence(text: str) -> Evidence:
    """Evidence from the JSON that evidence.py wrote.

    Raises pydantic.ValidationError, which names every field that is missing, unknown or wrong.
    """
    return Evidence.model_validate_json(text)
