"""Likely causes of a verdict on a server of others, most specific first, with what to change.

Each slug is a heading of docs/troubleshooting.md; a test compares.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvhost.verdict.foreign_facts import ForeignFacts
from kvhost.verdict.rules import fitting
from kvhost.verdict.types import Cause, Condition

Met = dict[str, bool | None]


@dataclass(frozen=True)
class ForeignRow:
    slug: str
    title: str
    change: str
    applies: Callable[[ForeignFacts, Met], bool]


def _missed(met: Met) -> bool:
    return met.get("external_hits") is False


def _open(met: Met, condition: str) -> bool:
    """Asked, and not met."""
    return condition in met and met[condition] is not True


def _files(facts: ForeignFacts) -> tuple[int, int, int] | None:
    """(written by the cold request, of these still there, new ones of the restored request)."""
    written, again = facts.evidence.written, facts.request("restored")
    if written is None or again is None or again.before is None or again.files is None:
        return None
    return written.new_files, again.before.own_files or 0, again.files.new


def _nothing_written(facts: ForeignFacts, met: Met) -> bool:
    files = _files(facts)
    return _missed(met) and files is not None and files[0] == 0


def _evicted(facts: ForeignFacts, met: Met) -> bool:
    files = _files(facts)
    return _missed(met) and files is not None and files[1] < files[0]


def _other_keys(facts: ForeignFacts, met: Met) -> bool:
    """The old files lie there, and as many new ones were written for the same prompt."""
    files = _files(facts)
    return _missed(met) and files is not None and files[0] > 0 and files[2] >= files[0]


def _index_lost(facts: ForeignFacts, met: Met) -> bool:
    files = _files(facts)
    return _missed(met) and files is not None and 0 < files[0] <= files[1] and not files[2]


def _no_metrics(facts: ForeignFacts, met: Met) -> bool:
    refused = facts.evidence.refused
    if refused is not None:
        return refused.busy is None
    shots = [shot for life in facts.lives() for shot in life]
    return any(s.vllm is None or (facts.evidence.cache_metrics and s.cache is None) for s in shots)


def _step_failed(facts: ForeignFacts, start: str) -> bool:
    return any(s.name.startswith(start) and not s.ok for s in facts.evidence.steps)


TABLE: tuple[ForeignRow, ...] = (
    ForeignRow(
        "wrong-kv-served",
        "Wrong KV was served: the answer changed after the restart.",
        "Stop using this storage. Compare model, KV dtype, versions and parallelism with those"
        " that wrote it; empty it and run the test again.",
        lambda f, m: m.get("same_answer") is False and bool(f.vllm("restored", "external_hits")),
    ),
    ForeignRow(
        "answer-differs-without-a-hit",
        "The answer changed although nothing came from the cache.",
        "Look at what else changed with the restart: model files, dtype, versions, flags.",
        lambda f, m: m.get("same_answer") is False,
    ),
    ForeignRow(
        "answers-not-repeatable",
        "The engine does not repeat its own greedy answer, so answers cannot be compared.",
        "Use float32 or a longer-margin model for the test, or settings that make the engine's"
        " arithmetic repeatable.",
        lambda f, m: (
            m.get("same_answer") is None
            and bool(f.answered("restored") and f.answered("warm"))
            and bool((r := f.request("cold")) and r.output_tokens)
        ),
    ),
    ForeignRow(
        "server-in-use",
        "The server is in use; the test restarts it.",
        "Run it when nobody uses the server, or disturb it with --disrupt.",
        lambda f, m: f.evidence.refused is not None and f.evidence.refused.busy is not None,
    ),
    ForeignRow(
        "metrics-unreadable",
        "The metrics of the runner or of the cache server cannot be read.",
        "Check --metrics-url and --cache-metrics-url from the machine where the command runs.",
        _no_metrics,
    ),
    ForeignRow(
        "request-failed",
        "The cold request was not answered.",
        "See the error of the step, then the log of the server; check --url, --model and the key.",
        lambda f, m: f.answered("cold") is False or _step_failed(f, "what answers"),
    ),
    ForeignRow(
        "service-not-ready",
        "The restart command failed, or the server did not come back after it.",
        "Run the command by hand, where and as whom the report says, and see the server's log.",
        lambda f, m: _step_failed(f, "restart command"),
    ),
    ForeignRow(
        "not-restarted",
        "The server was not restarted: its process is the one of before.",
        "Look at the restart command and at who holds the port; a second instance may serve it.",
        lambda f, m: m.get("restarted") is False,
    ),
    ForeignRow(
        "restart-not-proven",
        "Nothing proves that another process answers since the restart.",
        "Run the test on the server's machine (--where), as root or as the server's user, or let"
        " --metrics-url lead to vLLM itself, whose page tells its start time.",
        lambda f, m: (
            m.get("restarted") is None
            and f.request("restored") is not None
            and m.get("done") is True
        ),
    ),
    ForeignRow(
        "prompt-too-short",
        "The prompt is too short: only whole chunks are cached.",
        "Raise --prompt-tokens to at least two chunks (--chunk-size).",
        lambda f, m: m.get("prompt_long") is False,
    ),
    ForeignRow(
        "not-alone",
        "Somebody else used the server during the test.",
        "Repeat the test when the server is quiet.",
        lambda f, m: m.get("alone") is False,
    ),
    ForeignRow(
        "counters-reset",
        "A counter fell or a process changed in the middle of the test.",
        "Look in the logs for a crash and automatic restart; behind a load balancer, test one"
        " server at a time.",
        lambda f, m: m.get("counters") is False,
    ),
    ForeignRow(
        "unseen-prompt-hits",
        "A prompt that was never seen hits: hits mean nothing on this server.",
        "Look for a proxy or a cache in front of the server, and for planted KV files.",
        lambda f, m: m.get("control_misses") is False or m.get("cold_cold") is False,
    ),
    ForeignRow(
        "connector-missing",
        "vLLM asks no external cache: the connector is not configured or not registered.",
        "Give vLLM a --kv-transfer-config with a connector that writes to files; its log names it.",
        lambda f, m: (
            f.vllm("cold", "external_queries") == 0 and f.vllm("restored", "external_queries") == 0
        ),
    ),
    ForeignRow(
        "nothing-written",
        "Nothing was written below the storage directory.",
        "Is it the directory of the connector's configuration, on this machine? Look for write"
        " errors in the log; a connector without a file tier keeps KV in memory only.",
        _nothing_written,
    ),
    ForeignRow(
        "evicted",
        "The test's files were removed before the restored request.",
        "Look at the limit of the cache and at other clean-up on the directory.",
        _evicted,
    ),
    ForeignRow(
        "hash-seed-unstable",
        "The same prompt was written anew under other names: its keys changed with the restart.",
        "Set PYTHONHASHSEED=0 for the server, or a hash that does not depend on it (LMCache:"
        " pre_caching_hash_algorithm: sha256_cbor); keep model name, parallelism and dtype.",
        _other_keys,
    ),
    ForeignRow(
        "index-in-memory",
        "The files are there, but were not found: their index was in the memory that is gone.",
        "LMCache's local_disk never reads its directory again, in any release. Use a tier that"
        " looks the file up: LMCache's server with L2 fs or fs_native, or fs:// as remote.",
        _index_lost,
    ),
    ForeignRow(
        "nothing-persisted",
        "The server asked its cache for the prompt and got nothing: nothing persisted.",
        "Does the connector write to files, and does it find them after a restart? Give"
        " --storage-dir, so that the test can tell more.",
        lambda f, m: _missed(m) and _files(f) is None,
    ),
    ForeignRow(
        "load-failed",
        "The cache found the KV, but the request failed.",
        "Look for truncated or unreadable files, and at the server's log.",
        lambda f, m: m.get("restored_answered") is False,
    ),
    ForeignRow(
        "engine-memory",
        "The engine's own memory answered, not the cache.",
        "Let the restart command restart the engine; nobody may send the prompt in between.",
        lambda f, m: m.get("engine_zero") is False,
    ),
    ForeignRow(
        "served-from-l1",
        "The cache server's memory (L1) answered, not its files.",
        "Let the restart command restart the cache server, too.",
        lambda f, m: m.get("l1_zero") is False,
    ),
    ForeignRow(
        "page-cache-not-dropped",
        "The files stayed in memory: that the drive serves them is not shown.",
        "Is the storage on tmpfs? It would be empty after a reboot. The test must also be allowed"
        " to write the files (root, or their owner).",
        lambda f, m: (
            m.get("external_hits") is True and m.get("written") is True and _open(m, "dropped")
        ),
    ),
    ForeignRow(
        "reads-not-observed",
        "That the files were read again was not seen, so another memory may have served the KV.",
        "Look for a further cache in memory that the command does not restart. A tier that passes"
        " by the page cache cannot be seen reading: give --cache-metrics-url, if it is LMCache's.",
        lambda f, m: (
            m.get("external_hits") is True and m.get("dropped") is True and _open(m, "read_again")
        ),
    ),
    ForeignRow(
        "cached-tokens-missing",
        "The response does not say how many tokens were cached, or not what the counters say.",
        "Start vLLM with --enable-prompt-tokens-details.",
        lambda f, m: f.answered("restored") is True and m.get("cached_agrees") is not True,
    ),
    ForeignRow(
        "storage-not-seen",
        "KV came from outside of vLLM, but where it lay meanwhile was not seen: another process's"
        " memory would look the same.",
        "Give --storage-dir (the directory that the connector writes to) or --cache-metrics-url.",
        lambda f, m: m.get("external_hits") is True and m.get("where") is not True,
    ),
    ForeignRow(
        "interrupted",
        "The test was interrupted.",
        "See whether the server runs, then repeat the test.",
        lambda f, m: f.evidence.interrupted is not None,
    ),
)


def likely_causes(facts: ForeignFacts, conditions: list[Condition]) -> list[Cause]:
    """Every row of the table that fits, in its order; empty when none does."""
    return fitting(TABLE, facts, conditions)
