"""Likely causes of a verdict that is not PASS, most specific first, with what to change.

Each slug is a heading of docs/troubleshooting.md; a test compares.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvhost.verdict.facts import AFTER, BEFORE, Facts
from kvhost.verdict.rules import fitting
from kvhost.verdict.types import Cause, Condition

Met = dict[str, bool | None]
#: What vLLM and LMCache log when they go on without compiled operations
NOT_COMPILED = ("Failed to import from vllm._C", "No compute backend loaded")


@dataclass(frozen=True)
class Row:
    slug: str
    title: str
    change: str
    applies: Callable[[Facts, Met], bool]
    server: bool = False
    """Its words are about LMCache's server."""


def _missed(met: Met) -> bool:
    """The restored request got too little from the cache, by either side."""
    return met.get("l2_hits") is False or met.get("external_hits") is False


def _another_answer(met: Met) -> bool:
    return False in (met.get("same_answer"), met.get("first_token"))


def _more_than_shared(facts: Facts, met: Met) -> bool:
    found, whole = facts.cache("half", "hit_tokens"), facts.aligned_of("half_cold")
    return met.get("half_hits") is False and found is not None and found > whole / 2


def _unasked_restart(facts: Facts, met: Met) -> bool:
    """A service that was to go on is another process."""
    stay = {"cache", "runner"} - facts.replaced
    return any(met.get(f"restarted_{name}") is False and not facts.off_port(name) for name in stay)


def _not_restarted(facts: Facts, met: Met) -> bool:
    """A service is the process of before; not each that is not met is (see the rows above it)."""
    wrong = [name for name in facts.replaced if met.get(f"restarted_{name}") is False]
    return any(not facts.is_another(name) for name in wrong)


def _off_port(facts: Facts, met: Met) -> bool:
    wrong = [name for name in ("cache", "runner") if met.get(f"restarted_{name}") is False]
    return any(facts.off_port(name) for name in wrong)


def _booted_anew(facts: Facts, met: Met) -> bool:
    return any(facts.rebooted_between(name) for name in ("cache", "runner"))


def _removed(facts: Facts) -> bool:
    """Whether there were fewer files right after the event than before it."""
    before = [shot for r in facts.phase(BEFORE) for shot in (r.before, r.after) if shot]
    after = facts.phase(AFTER)
    if not before or not after or after[0].before is None:
        return False
    moved = facts.evidence.moved
    aside = moved.moved if moved and after[0].role == "moved" else 0
    return after[0].before.files + aside < before[-1].files


def _all_there(facts: Facts) -> bool:
    """Whether the test's own files lay unchanged before the restored request."""
    request, written = facts.request("restored"), facts.evidence.written
    if request is None or request.before is None or written is None:
        return False
    return 0 < written.new_files <= request.before.own_files


def _found_none(facts: Facts, met: Met) -> bool:
    """Nothing at all was found, although every file of the prompt lay there unchanged."""
    return (
        met.get("l2_hits") is False
        and facts.cache("restored", "hit_l2_tokens") == 0
        and _all_there(facts)
    )


def _new_files(facts: Facts) -> int | None:
    request = facts.request("restored")
    return request.files.new if request and request.files else None


def _elsewhere(facts: Facts, met: Met) -> bool:
    """The server stored the prompt once more, and not in this directory."""
    stored = facts.cache("restored", "l2_stored_chunks")
    return _found_none(facts, met) and bool(stored) and _new_files(facts) == 0


def _other_names(facts: Facts, met: Met) -> bool:
    """The prompt was written once more, under other names, beside the files of before."""
    written, new = facts.evidence.written, _new_files(facts)
    return _found_none(facts, met) and bool(written and new and new >= written.new_files)


def _index_lost(facts: Facts, met: Met) -> bool:
    """Nothing was found and nothing was written under another name."""
    return _found_none(facts, met) and _new_files(facts) == 0


def _in_memory(facts: Facts) -> bool:
    return facts.evidence.filesystem.fstype in ("tmpfs", "ramfs")


def _logged(facts: Facts, *words: str) -> bool:
    lines = [line for log in facts.evidence.logs.values() for line in log.lines]
    return any(word in line for line in lines for word in words)


def _adapters(facts: Facts) -> float | None:
    request = facts.request("restored")
    page = request.after.cache if request and request.after else None
    return page.l2_adapters if page else None


def _step_failed(facts: Facts, start: str) -> bool:
    return any(s.name.startswith(start) and not s.ok for s in facts.evidence.steps)


def _in_use(facts: Facts, met: Met) -> bool:
    refused = facts.evidence.refused
    return refused is not None and refused.busy is not None


def _no_metrics(facts: Facts, met: Met) -> bool:
    refused = facts.evidence.refused
    if refused is not None:
        return refused.busy is None
    return any(shot.vllm is None or shot.cache is None for shot in facts.shots())


def _other_server(facts: Facts, met: Met) -> bool:
    request = facts.request("restored")
    if request is None or not (request.before and request.after and facts.asked("restored")):
        return False
    before, after = request.before.cache, request.after.cache
    return after is not None and (after.lookups or 0) == ((before and before.lookups) or 0)


def _never_written(facts: Facts, met: Met) -> bool:
    written = facts.evidence.written
    return written is not None and written.new_files == 0 and _adapters(facts) != 0


def _unfinished(facts: Facts, met: Met) -> bool:
    return met.get("written") is False and bool(
        facts.evidence.written and facts.evidence.written.new_files
    )


TABLE: tuple[Row, ...] = (
    Row(
        "wrong-kv-served",
        "Wrong KV was served: the answer changed after the restart.",
        "Stop using this namespace. Compare model, KV dtype, versions and parallelism with those"
        " that wrote it; remove the namespace's directory and run the test again.",
        lambda f, m: (
            m.get("cut_answer") is False
            or (_another_answer(m) and (f.cache("restored", "hit_tokens") or 0) > 0)
        ),
    ),
    Row(
        "answer-differs-without-a-hit",
        "The answer changed although nothing came from the cache.",
        "Look at what else changed with the restart: model files, dtype, versions, flags.",
        lambda f, m: _another_answer(m) and not f.cache("restored", "hit_tokens"),
    ),
    Row(
        "answers-not-repeatable",
        "The engine does not repeat its own greedy answer, so answers cannot be compared.",
        "Use float32 or a longer-margin model for the test, or settings that make the engine's"
        " arithmetic repeatable.",
        lambda f, m: (
            None in (m.get("same_answer", True), m.get("first_token", True))
            and f.answered("restored") is True
            and f.answered("warm") is True
        ),
    ),
    Row(
        "server-in-use",
        "The server is in use; the test restarts it.",
        "Run it when nobody uses the server, or disturb it: kvhost verify --disrupt, or "
        "--data disrupt=true.",
        _in_use,
    ),
    Row(
        "metrics-unreadable",
        "The metrics of the runner or of the cache server cannot be read.",
        "Check both URLs from the host itself; kvhost's own configuration serves both on loopback.",
        _no_metrics,
    ),
    Row(
        "request-failed",
        "The cold request was not answered.",
        "See the error of the step, then the log of the runner.",
        lambda f, m: f.answered("cold") is False,
    ),
    Row(
        "service-not-ready",
        "A service did not come back after its restart.",
        "See the last log lines in the step's error; run `kvhost` again once it is mended.",
        lambda f, m: _step_failed(f, "restart ") or _step_failed(f, "the services come back"),
    ),
    Row(
        "second-pair-missing",
        "The second pair of services did not start.",
        "See the error of the step: free memory for a second engine is needed, and free ports.",
        lambda f, m: _step_failed(f, "start a second pair"),
    ),
    Row(
        "not-rebooted",
        "The host was not rebooted: it is the same boot, and the same first process.",
        "See whether the account may reboot the host; in a container, the container is meant.",
        lambda f, m: m.get("rebooted") is False,
    ),
    Row(
        "booted-anew",
        "The machine was started anew in the middle of the test.",
        "Repeat the test; whether the cache survives a reboot is the event reboot.",
        _booted_anew,
    ),
    Row(
        "not-on-its-port",
        "A service does not listen on its port, so that something else, or nothing, answers there.",
        "Look at who holds the port (ss -ltnp), and in the log of the service at where it listens.",
        _off_port,
    ),
    Row(
        "restarted-by-itself",
        "A service that was to go on was restarted too.",
        "Look in its log for a crash. A runner that dies when the cache server is restarted has a"
        " time-out that is too long (mq_timeout_s) or is bound to it by its unit.",
        _unasked_restart,
    ),
    Row(
        "not-restarted",
        "A service was not restarted: its process is the one of before.",
        "Look at the restart command and at who holds the port; a second instance may serve it.",
        _not_restarted,
    ),
    Row(
        "prompt-too-short",
        "The prompt is too short: only whole chunks are cached.",
        "Raise verify_prompt_tokens to at least two chunks (chunk_size).",
        lambda f, m: m.get("prompt_long") is False,
    ),
    Row(
        "not-alone",
        "Somebody else used the servers during the test.",
        "Repeat the test when the server is quiet.",
        lambda f, m: m.get("alone_runner") is False or m.get("alone_cache") is False,
    ),
    Row(
        "counters-reset",
        "A counter fell or a process changed in the middle of the test.",
        "Look in the logs for a crash and automatic restart, then repeat the test.",
        lambda f, m: m.get("counters") is False,
    ),
    Row(
        "unseen-prompt-hits",
        "A prompt that was never seen hits: hits mean nothing on this server.",
        "Look for a proxy or a cache in front of the server, and for planted KV files.",
        lambda f, m: (
            m.get("control_misses") is False
            or m.get("cold_cold") is False
            or _more_than_shared(f, m)
        ),
    ),
    Row(
        "hits-without-files",
        "A prompt was found although its files were in another namespace.",
        "Its KV comes from elsewhere: a second tier, another directory, a cache in front. See the"
        " cache server's adapters, and whether they read more than their base_path.",
        lambda f, m: m.get("moved_misses") is False,
    ),
    Row(
        "not-registered-again",
        "The engine did not register again with the cache server after its restart.",
        "It notices only a server that was away longer than two heartbeats (LMCache#4642): see"
        " heartbeat_s and mq_timeout_s, or restart the runner with the cache server.",
        lambda f, m: m.get("registered", True) is not True and f.evidence.registered is not None,
    ),
    Row(
        "engine-not-emptied",
        "The engine's own memory could not be filled, so that it may have answered.",
        "See the error of the step; a large memory needs more time. The event both needs none.",
        lambda f, m: _step_failed(f, "empty the engine"),
    ),
    Row(
        "kill-too-late",
        "The services were not killed in the middle of a write: all was written, or nothing.",
        "Repeat it; a longer prompt (verify_prompt_tokens) takes longer to write.",
        lambda f, m: m.get("killed_midway") is False,
    ),
    Row(
        "connector-missing",
        "vLLM asks no external cache: the connector is not configured or not registered.",
        "Check --kv-transfer-config; the runner's log must say 'Registering kv caches', or 'Created"
        " TieringOffloadingManager' (cache_kind native).",
        lambda f, m: (
            f.vllm("cold", "external_queries") == 0 and f.vllm("restored", "external_queries") == 0
        ),
    ),
    Row(
        "other-cache-server",
        "vLLM asks a cache, but not the server whose metrics were read.",
        "Compare the port in --kv-transfer-config with that of the cache server.",
        _other_server,
        server=True,
    ),
    Row(
        "l2-absent",
        "The cache server has no L2: its cache is memory only.",
        "Give it a file tier: --l2-adapter with type fs or fs_native and a base_path.",
        lambda f, m: _adapters(f) == 0,
        server=True,
    ),
    Row(
        "load-failed",
        "The KV was found in L2, but vLLM could not load it.",
        "Look for truncated or unreadable files in the namespace; start the services again"
        " through kvhost, which sweeps files of a wrong size, or remove the namespace.",
        lambda f, m: (
            (m.get("l2_hits") is True and m.get("external_hits") is False)
            or m.get("restored_answered") is False
        ),
    ),
    Row(
        "nothing-written",
        "Nothing was written to the namespace's directory.",
        "Compare base_path of the L2 adapter with the namespace; look for write errors (full disk,"
        " permissions) in the cache server's log.",
        _never_written,
    ),
    Row(
        "write-not-finished",
        "The write to L2 had not finished before the restart.",
        "Look at the drive's write speed and free space; raise the time-out of the wait.",
        _unfinished,
    ),
    Row(
        "compiled-ops-missing",
        "vLLM or LMCache runs without its compiled operations.",
        "Run kvhost up: its ABI check names what is missing (often libnuma1, or a NUMBA_CACHE_DIR"
        " that cannot be written).",
        lambda f, m: _logged(f, *NOT_COMPILED),
    ),
    Row(
        "tier-in-memory",
        "The tier lies on tmpfs: its files were gone after the event.",
        "Put tier_dir on a drive: a tmpfs is empty after a reboot.",
        lambda f, m: _missed(m) and _removed(f) and _in_memory(f),
    ),
    Row(
        "evicted",
        "The test's files were removed before the restored request.",
        "Look at the pruner's limit and at other clean-up on the directory; raise cache_limit_gib.",
        lambda f, m: _missed(m) and _removed(f),
    ),
    Row(
        "namespace-changed",
        "The files are there, but the cache server now writes to another directory.",
        "Give the L2 adapter the base_path of before. kvhost's namespace follows model, dtype,"
        " chunk size, versions and parallelism; what it held stays on the drive till it is purged.",
        _elsewhere,
    ),
    Row(
        "hash-seed-unstable",
        "The same prompt was written anew under other names: its keys changed with the restart.",
        "Set PYTHONHASHSEED=0 for every process, or a hash that does not depend on it; keep the"
        " model's name, chunk size and parallelism.",
        _other_names,
    ),
    Row(
        "index-in-memory",
        "The files are there, but were not found: their index was in the memory that is gone.",
        "LMCache's local_disk never reads its directory again, in any release. Use LMCache's server"
        " with an L2 adapter of type fs or fs_native, which looks the file up.",
        _index_lost,
        server=True,
    ),
    Row(
        "keys-changed",
        "The files are there, but not all of them were found: keys or index changed.",
        "The same directory, model string and chunk size must be used after the restart; look in"
        " the cache server's log for files that it could not read.",
        lambda f, m: _missed(m) and m.get("l2_hits") is False and _all_there(f),
    ),
    Row(
        "files-touched",
        "The test's files were changed or truncated before the restored request.",
        "Find out who writes to the namespace's directory besides the cache server; check the drive"
        " and its filesystem. Files of a wrong size are swept when kvhost starts the cache server.",
        lambda f, m: m.get("untouched") is False and not _removed(f),
    ),
    Row(
        "rewritten",
        "KV was computed and written anew although hits were counted.",
        "See whether two configurations write to one directory.",
        lambda f, m: m.get("no_rewriting") is False and not _missed(m),
    ),
    Row(
        "engine-memory",
        "The engine's own memory answered, not the cache.",
        "Restart the runner within the test; nobody may send the same prompt in between.",
        lambda f, m: m.get("engine_zero") is False,
    ),
    Row(
        "served-from-l1",
        "The cache's memory (L1) answered, not its files.",
        "Restart the service that has it within the test; see whether it loads files at its start.",
        lambda f, m: m.get("l1_zero") is False,
    ),
    Row(
        "page-cache-not-dropped",
        "The files stayed in memory: that the drive serves them is not shown.",
        "Is the tier on tmpfs? It would be empty after a reboot. Put it on a drive.",
        lambda f, m: m.get("dropped") is False,
    ),
    Row(
        "cached-tokens-missing",
        "The response does not say how many tokens were cached, or not what the counters say.",
        "Start vLLM with --enable-prompt-tokens-details.",
        lambda f, m: f.answered("restored") is True and m.get("cached_agrees") is not True,
    ),
    Row(
        "interrupted",
        "The test was interrupted.",
        "Run it again; its own files were removed where they could be told apart.",
        lambda f, m: f.evidence.interrupted is not None,
    ),
)


def likely_causes(facts: Facts, conditions: list[Condition]) -> list[Cause]:
    """Every row of the table that fits, in its order; empty when none does."""
    rows = [row for row in TABLE if not (row.server and facts.native)]
    return fitting(rows, facts, conditions)
