"""Healthy evidence edited so that it contradicts itself, with the words that the judge must say.

At least one for each check of kvhost/verdict/agrees.py.
"""

from __future__ import annotations

from tests.verdict_edits import (
    Edit,
    both,
    count,
    failed,
    in_life,
    no_step,
    only,
    put,
    same_process,
    step,
)

R = "requests.restored."
CONTRADICTIONS: tuple[tuple[str, Edit], ...] = (
    ("more than one boot", put("boot_id", "another")),
    ("chunk_size is 0", put("config.chunk_size", 0)),
    ("1 files expected, 32 by the prompt", put("written.expected_files", 1)),
    ("33 files expected, 32 by the prompt", put("written.expected_files", 33)),
    ("0 bytes in 32 new files", put("written.new_bytes", 0)),
    ("1 bytes in 32 new files", put("written.new_bytes", 1)),
    ("134217728 bytes in 32 new files", put("written.sizes", [])),
    ("99 own files, 32 written", put(R + "before.own_files", 99)),
    ("32 own files of 0", put(R + "before.files", 0)),
    (
        "1 pages of 32 files, 32 own",
        both(
            put("page_cache.pages", 1),
            put("page_cache.resident_before", 0),
        ),
    ),
    ("32610 of 9999 pages resident", put("page_cache.pages", 9999)),
    (
        "the new cache started before the old one",
        same_process("cache", pid=7, start_ticks=1),
    ),
    ("restart of the runner: exit 1", put("services.runner.restart.exit_code", 1)),
    ("restart of the cache: exit unknown", put("services.cache.restart", None)),
    ("the restored request: HTTP 503, but no error", put(R + "http_status", 503)),
    ("the warm request failed", failed("warm")),
    ("the restored request says it is cold", put(R + "role", "cold")),
    ("times run backwards", put(R + "before.unix", 1.0)),
    ("the test was refused", put("refused", {"busy": None, "foreign": None, "own": 0})),
    (
        "restored: 8201 hits of 8200 tokens, says the cache",
        count("restored", "cache", hit_tokens=9),
    ),
    (
        "restored: 8201 hits of 8200 tokens, says L1 and L2",
        count("restored", "cache", hit_l2_tokens=9),
    ),
    (
        "restored: 8201 hits of 8200 tokens, says vLLM",
        both(
            count("restored", "vllm", external_hits=9),
            put(R + "usage_cached_tokens", 8201),
        ),
    ),
    (
        "warm: 9000 hits of 8200 tokens, says the response",
        put("requests.warm.usage_cached_tokens", 9000),
    ),
    ("restored: hits in L2 without an L2", in_life(1, "cache.l2_adapters", 0.0)),
    ("step not done: identify the services", no_step("identify the services")),
    ("step not done: is the server in use", step("is the server in use", ok=False)),
    ("step not done: restart the runner", step("restart the runner", error="exit 1")),
    (
        "step and its result differ: the same request again",
        step("the same request again", ok=False),
    ),
    ("step and its result differ: warm request", only("cold", "restored", "control")),
)
