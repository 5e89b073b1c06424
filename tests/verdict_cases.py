"""The case table of the judge: real evidence, and real evidence with one documented edit.

fixtures/evidence/*.json are recorded from vLLM 0.32.0 and lmcache 0.5.6 on CPU, see its README. An
edit changes what the case is about and whatever the real servers would count with it.
"""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path

from tests.verdict_contradictions import CONTRADICTIONS
from tests.verdict_edits import (
    Json,
    between,
    both,
    chunks,
    count,
    each_shot,
    failed,
    first,
    in_life,
    no_reads,
    no_step,
    only,
    other_token,
    put,
    ready,
    refused,
    restored_hits,
    same_process,
)
from tests.verdict_event_cases import EVENT_CASES
from tests.verdict_types import Case

FIXTURES = Path(__file__).parent / "fixtures" / "evidence"


@functools.cache
def _fixture(name: str) -> Json:
    loaded: Json = json.loads((FIXTURES / f"{name}.json").read_text())
    return loaded


def evidence_of(case: Case) -> Json:
    evidence = copy.deepcopy(_fixture(case.base))
    case.edit(evidence)
    return evidence


R = "requests.restored."
HIT = 8192.0
CASES: tuple[Case, ...] = (
    # recorded as they are
    Case("real: fs_native, healthy", "PASS"),
    Case("real: no L2 adapter", "FAIL", cause="l2-absent", base="l2-absent"),
    Case("real: fs, healthy", "PASS", base="healthy-fs"),
    Case("real: no restart", "INCONCLUSIVE", cause="not-restarted", base="no-restart"),
    Case("real: another prompt's KV planted", "FAIL", cause="wrong-kv-served", base="planted"),
    Case("real: half of the files removed", "FAIL", cause="evicted", base="half-deleted"),
    Case("real: half of the files truncated", "FAIL", cause="files-touched", base="truncated"),
    Case("real: namespace changed", "FAIL", cause="namespace-changed", base="namespace-changed"),
    Case("real: no connector", "FAIL", cause="connector-missing", base="no-connector"),
    Case("real: fs_native, the built-in model", "PASS", base="healthy-fs_native-builtin"),
    Case("real: on tmpfs", "INCONCLUSIVE", cause="page-cache-not-dropped", base="tmpfs"),
    Case("real: response silent", "INCONCLUSIVE", cause="cached-tokens-missing", base="no-details"),
    Case("real: in use", "INCONCLUSIVE", cause="server-in-use", base="in-use"),
    Case("real: cache restarted alone", "INCONCLUSIVE", cause="not-restarted", base="cache-only"),
    Case("real: another instance held the ports", "INCONCLUSIVE", base="other-instance-died"),
    Case("real: files removed", "FAIL", cause="evicted", base="wiped"),
    Case(
        "real: files' contents swapped, the same answer",
        "INCONCLUSIVE",
        cause="files-touched",
        base="chunks-swapped-same-answer",
    ),
    Case("real: vLLM's own tiering", "PASS", base="native-runner"),
    Case("real: vLLM's own tiering, killed in a write", "PASS", base="native-kill"),
    Case("real: vLLM's own tiering, files removed", "FAIL", cause="evicted", base="native-wiped"),
    # identity
    Case("cache not restarted", "INCONCLUSIVE", same_process("cache"), "not-restarted"),
    Case("runner not restarted", "INCONCLUSIVE", same_process("runner"), "not-restarted"),
    Case("PID differs, start time not", "INCONCLUSIVE", same_process("cache", pid=7)),
    Case("start time differs, PID not", "INCONCLUSIVE", same_process("runner", start_ticks=7)),
    Case(
        "rebooted in between",
        "INCONCLUSIVE",
        same_process("runner", pid=7, start_ticks=7, boot_id="another"),
        "booted-anew",
    ),
    Case(
        "another process holds the port",
        "INCONCLUSIVE",
        put("services.runner.after.listens", False),
        "not-on-its-port",
    ),
    Case(
        "another process held the port",
        "INCONCLUSIVE",
        put("services.cache.before.listens", False),
        "not-on-its-port",
    ),
    Case(
        "not restarted, and a miss", "INCONCLUSIVE", both(same_process("runner"), restored_hits(0))
    ),
    Case(
        "another client, and a miss",
        "INCONCLUSIVE",
        both(between("cache", lookups=1), restored_hits(0)),
        "not-alone",
    ),
    Case(
        "the control not seen by the cache server",
        "INCONCLUSIVE",
        count("control", "cache", lookups=-1),
    ),
    Case("cold had hits, by vLLM", "INCONCLUSIVE", count("cold", "vllm", external_hits=256)),
    Case("files did not come to rest", "INCONCLUSIVE", put("written.timed_out", True)),
    Case("who listens is unknown", "INCONCLUSIVE", put("services.cache.after.listens", None)),
    Case("record of another process", "INCONCLUSIVE", put("services.cache.after.record.pid", 7)),
    Case(
        "runner did not come back",
        "INCONCLUSIVE",
        both(
            only("cold", "warm"),
            put("services.runner.after.proc", None),
            lambda e: e["steps"].append(
                {"name": "restart the runner", "ok": False, "seconds": 600, "error": "not ready"}
            ),
        ),
        "service-not-ready",
    ),
    # the test itself
    Case("prompt of one chunk", "INCONCLUSIVE", chunks(1), "prompt-too-short"),
    Case("prompt of two chunks", "PASS", chunks(2)),
    Case("another prompt again", "INCONCLUSIVE", put(R + "prompt_digest", "x")),
    Case(
        "control sent the same prompt",
        "INCONCLUSIVE",
        lambda e: put("requests.control.prompt_digest", e["requests"]["cold"]["prompt_digest"])(e),
    ),
    Case("prompt was cut", "INCONCLUSIVE", put(R + "usage_prompt_tokens", 4096)),
    Case("refused: in use", "INCONCLUSIVE", lambda e: refused(e, 1, 4), "server-in-use"),
    Case(
        "refused: no metrics",
        "INCONCLUSIVE",
        lambda e: refused(e, None, None),
        "metrics-unreadable",
    ),
    Case(
        "interrupted after the cold request",
        "INCONCLUSIVE",
        both(only("cold"), put("interrupted", "SIGTERM"), put("services.cache.after", None)),
        "interrupted",
    ),
    Case(
        "cold request failed", "INCONCLUSIVE", both(only("cold"), failed("cold")), "request-failed"
    ),
    Case("no control", "INCONCLUSIVE", only("cold", "warm", "restored")),
    Case(
        "no warm request",
        "PASS",
        both(
            only("cold", "restored", "control"),
            put("config.warm", False),
            no_step("warm request"),
        ),
    ),
    Case("length of the prompt unsaid", "INCONCLUSIVE", put(R + "usage_prompt_tokens", None)),
    Case(
        "length of the control unsaid",
        "INCONCLUSIVE",
        put("requests.control.usage_prompt_tokens", None),
    ),
    Case("warm sent another prompt", "INCONCLUSIVE", put("requests.warm.prompt_digest", "x")),
    Case(
        "one token of answer",
        "INCONCLUSIVE",
        both(put("requests.cold.output_tokens", [1]), put(R + "output_tokens", [1])),
    ),
    # the cache was not asked
    Case(
        "vLLM did not ask for the control",
        "INCONCLUSIVE",
        count("control", "vllm", external_queries=-8200),
    ),
    Case(
        "vLLM asked for a part of the control",
        "INCONCLUSIVE",
        count("control", "vllm", external_queries=-9),
    ),
    Case(
        "the cache was asked for a part of the control",
        "INCONCLUSIVE",
        count("control", "cache", requested_tokens=-256),
    ),
    Case(
        "vLLM asked for a part again",
        "INCONCLUSIVE",
        count("restored", "vllm", external_queries=-9),
    ),
    Case(
        "the cache was asked for a part again",
        "INCONCLUSIVE",
        count("restored", "cache", requested_tokens=-256),
    ),
    *(
        Case("contradiction: " + said, "INCONCLUSIVE", edit, contradiction=said)
        for said, edit in CONTRADICTIONS
    ),
    Case("interrupted at the end", "INCONCLUSIVE", put("interrupted", "SIGTERM"), "interrupted"),
    # counters
    Case(
        "a counter fell",
        "INCONCLUSIVE",
        count("control", "vllm", from_compute=-8205),
        "counters-reset",
    ),
    Case(
        "runner crashed in between",
        "INCONCLUSIVE",
        put("requests.control.after.processes.runner.start_ticks", 7),
        "counters-reset",
    ),
    Case("no metrics of vLLM", "INCONCLUSIVE", in_life(1, "vllm", None), "metrics-unreadable"),
    Case(
        "no metrics of the cache", "INCONCLUSIVE", in_life(1, "cache", None), "metrics-unreadable"
    ),
    Case("not lmcache's metrics", "INCONCLUSIVE", in_life(1, "cache.l2_adapters", None)),
    Case(
        "another client",
        "INCONCLUSIVE",
        count("restored", "vllm", requests_finished=3),
        "not-alone",
    ),
    Case("client in the gap", "INCONCLUSIVE", between("vllm", requests_finished=1), "not-alone"),
    Case(
        "client before the restart",
        "INCONCLUSIVE",
        count("warm", "vllm", requests_finished=1),
        "not-alone",
    ),
    Case("client right after the restart", "INCONCLUSIVE", first, "not-alone"),
    Case(
        "client still waits",
        "INCONCLUSIVE",
        put("requests.control.before.vllm.waiting", 1),
        "not-alone",
    ),
    Case(
        "used before, quiet now (disrupt)",
        "PASS",
        lambda e: [
            s["vllm"].update(requests_finished=s["vllm"]["requests_finished"] + 40)
            for s in each_shot(e, 0)
        ],
    ),
    Case("readiness asked first", "PASS", ready),
    Case("another runner at the cache", "INCONCLUSIVE", between("cache", lookups=1), "not-alone"),
    Case(
        "another look-up meanwhile",
        "INCONCLUSIVE",
        count("restored", "cache", lookups=1),
        "not-alone",
    ),
    Case(
        "vLLM asks another cache server",
        "INCONCLUSIVE",
        count("restored", "cache", lookups=-1, hit_tokens=-HIT, hit_l2_tokens=-HIT),
        "other-cache-server",
    ),
    # before the restart
    Case(
        "cold had hits",
        "INCONCLUSIVE",
        count("cold", "cache", hit_tokens=256),
        "unseen-prompt-hits",
    ),
    Case(
        "cold had engine hits",
        "INCONCLUSIVE",
        count("cold", "vllm", prefix_hits=128),
        "unseen-prompt-hits",
    ),
    Case(
        "one chunk not written",
        "INCONCLUSIVE",
        both(put("written.new_files", 31), put("written.timed_out", True)),
        "write-not-finished",
    ),
    Case(
        "temporary files left",
        "INCONCLUSIVE",
        put("written.temporary_files", 2),
        "write-not-finished",
    ),
    Case(
        "page cache kept",
        "INCONCLUSIVE",
        put("page_cache.resident_after", 16384),
        "page-cache-not-dropped",
    ),
    Case("page cache nearly empty", "PASS", put("page_cache.resident_after", 327)),
    Case("page cache unknown", "INCONCLUSIVE", put("page_cache", None)),
    Case("not all files dropped", "INCONCLUSIVE", put("page_cache.files", 31)),
    Case(
        "files changed in between, the same answer",
        "INCONCLUSIVE",
        put(R + "before.own_files", 30),
        "files-touched",
    ),
    Case("one file pruned", "PASS", put(R + "before.own_files", 31)),
    # after the restart
    Case("load fails the request", "FAIL", failed("restored"), "load-failed"),
    Case("nothing is answered", "INCONCLUSIVE", both(failed("restored"), failed("control"))),
    Case("hit, but not loaded", "FAIL", restored_hits(HIT, external=0), "load-failed"),
    Case("nothing found, files there", "FAIL", restored_hits(0), "index-in-memory"),
    Case(
        "files removed",
        "FAIL",
        both(
            restored_hits(0),
            put(R + "before.own_files", 0),
            put(R + "before.files", 0),
            put(R + "files.new", 32),
        ),
        "evicted",
    ),
    Case("too few hits", "FAIL", restored_hits(7680), "keys-changed"),
    Case("just too few", "FAIL", restored_hits(7782), "keys-changed"),
    Case("just enough", "PASS", restored_hits(7783)),
    Case("one chunk pruned", "PASS", both(restored_hits(7936), put(R + "files.new", 1))),
    Case("cache says nothing, vLLM all", "INCONCLUSIVE", restored_hits(0, external=HIT)),
    Case("a chunk from L1", "INCONCLUSIVE", restored_hits(7936, l1=256), "served-from-l1"),
    Case("all from L1", "INCONCLUSIVE", restored_hits(0, l1=HIT), "served-from-l1"),
    Case(
        "a block from the engine's memory",
        "INCONCLUSIVE",
        both(
            count("restored", "vllm", external_hits=-128, prefix_hits=128),
        ),
        "engine-memory",
    ),
    Case(
        "all from the engine's memory",
        "INCONCLUSIVE",
        count("restored", "vllm", external_hits=-HIT, prefix_hits=HIT),
        "engine-memory",
    ),
    Case(
        "response silent",
        "INCONCLUSIVE",
        put(R + "usage_cached_tokens", None),
        "cached-tokens-missing",
    ),
    Case(
        "response disagrees",
        "INCONCLUSIVE",
        put(R + "usage_cached_tokens", 8064),
        "cached-tokens-missing",
    ),
    Case("another answer", "FAIL", other_token, "wrong-kv-served"),
    Case(
        "another answer, not restarted",
        "FAIL",
        both(other_token, same_process("cache")),
        "wrong-kv-served",
    ),
    Case(
        "another answer, no hit",
        "FAIL",
        both(other_token, restored_hits(0)),
        "answer-differs-without-a-hit",
    ),
    Case("shorter answer", "FAIL", put(R + "output_tokens", [1, 2]), "wrong-kv-served"),
    Case("no token ids", "INCONCLUSIVE", put(R + "output_tokens", None)),
    Case(
        "warm and restored differ from cold",
        "INCONCLUSIVE",
        both(other_token, put("requests.warm.output_tokens", [1] * 16)),
        "answers-not-repeatable",
    ),
    Case("written anew", "FAIL", put(R + "files.new", 32), "rewritten"),
    Case("a file changed", "FAIL", put(R + "files.changed", 1), "rewritten"),
    Case("control unanswered", "INCONCLUSIVE", failed("control")),
    Case(
        "control hit L2",
        "FAIL",
        count("control", "cache", hit_tokens=256, hit_l2_tokens=256),
        "unseen-prompt-hits",
    ),
    Case(
        "control hit, by vLLM",
        "FAIL",
        count("control", "vllm", external_hits=256),
        "unseen-prompt-hits",
    ),
    Case(
        "control hit, by the response",
        "FAIL",
        put("requests.control.usage_cached_tokens", 9),
        "unseen-prompt-hits",
    ),
    Case("reads not observed", "PASS", no_reads, said="not observed"),
    Case(
        "reads unreadable",
        "PASS",
        both(in_life(1, "cache_reads", None), in_life(1, "device_read_bytes", None)),
        said="not observed",
    ),
    Case("slower after the restart", "PASS", put(R + "ttft_s", 99.0)),
    *EVENT_CASES,
)
