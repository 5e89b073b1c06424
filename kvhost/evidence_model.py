"""What kvhost/onhost/evidence.py hands over, schema version 1. Facts only, no judgement.

Seconds are wall-clock differences by a monotonic clock, sizes are bytes, counters are the sums over
all engines and models of a Prometheus page. A part that could not be read is None, never 0.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

SCHEMA = "kvhost/evidence/1"


class Part(BaseModel):
    """Strict: an evidence file of another version is refused, not half understood."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Process(Part):
    """A process told from a later one with the same number: start_ticks is field 22 of its stat."""

    pid: int
    start_ticks: int
    boot_id: str


class Identity(Part):
    """A service by its launcher's record, by /proc, and whether it holds the listening socket."""

    record: Process | None
    proc: Process | None
    listens: bool | None


class Restart(Part):
    exit_code: int | None
    ready_s: float | None


class Service(Part):
    before: Identity
    after: Identity | None
    restart: Restart | None


class VllmCounters(Part):
    """vLLM's metrics page; names in evidence_probe.py."""

    requests_finished: float | None
    running: float | None
    waiting: float | None
    prefix_hits: float | None
    external_queries: float | None
    external_hits: float | None
    from_compute: float | None
    from_device: float | None
    from_external: float | None


class CacheCounters(Part):
    """The cache server's metrics page; a counter appears there with its first event."""

    lookups: float | None
    requested_tokens: float | None
    hit_tokens: float | None
    hit_l1_tokens: float | None
    hit_l2_tokens: float | None
    l2_loads: float | None
    l2_stored_chunks: float | None
    l2_adapters: float | None


class Reads(Part):
    """/proc/PID/io of the cache server: all reads, and those that went to storage."""

    rchar: int
    read_bytes: int


class Processes(Part):
    cache: Process | None
    runner: Process | None


class Snapshot(Part):
    """State at one moment. ``own_files``: files of the cold request that still lie unchanged."""

    unix: float
    vllm: VllmCounters | None
    cache: CacheCounters | None
    own_requests: int | None
    processes: Processes
    cache_reads: Reads | None
    device_read_bytes: int | None
    files: int
    bytes: int
    own_files: int


class FilesDelta(Part):
    """What happened to the files of the namespace between the two snapshots of a request."""

    new: int
    changed: int
    gone: int


class Request(Part):
    """One greedy completion. Prompts appear as a digest only; output tokens are token ids."""

    role: str
    prompt_digest: str
    error: str | None
    http_status: int | None
    ttft_s: float | None
    total_s: float | None
    output_tokens: list[int] | None
    usage_prompt_tokens: int | None
    usage_cached_tokens: int | None
    before: Snapshot | None
    after: Snapshot | None
    files: FilesDelta | None


class Written(Part):
    """The wait until the cold request's KV lay in the namespace."""

    expected_files: int
    new_files: int
    new_bytes: int
    sizes: list[int]
    temporary_files: int
    waited_s: float
    timed_out: bool


class PageCache(Part):
    """The test's files after fsync and posix_fadvise(DONTNEED): pages by mincore."""

    files: int
    pages: int
    resident_before: int
    resident_after: int


class Log(Part):
    """Lines with known texts between two byte offsets of a log."""

    from_offset: int = Field(alias="from")
    to: int | None
    lines: list[str]


class Cleanup(Part):
    removed: int
    bytes: int
    left: int
    why: str | None


class Refused(Part):
    """Why the test did not run; None: the metrics could not say."""

    busy: int | None
    foreign: int | None
    own: int | None


class Step(Part):
    name: str
    ok: bool
    seconds: float
    error: str | None


class TestConfig(Part):
    __test__ = False  # not for pytest

    model: str
    prompt_tokens: int
    chunk_size: int
    max_tokens: int
    files_per_chunk: int
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
    started_unix: float
    finished_unix: float
    event: Literal["both"]
    config: TestConfig
    boot_id: str
    filesystem: Filesystem
    versions: dict[str, str]
    refused: Refused | None
    interrupted: str | None
    services: dict[str, Service]
    requests: dict[str, Request]
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
