"""Broken set-ups with the verdict and the cause that each must get, as docs/verdict.md shows them.

`python -m tests.verdict_setups` prints the table. Each row is evidence that a real engine gave
(vLLM 0.32.0 and LMCache 0.5.6 on CPU), as it was recorded, or with one stated edit of it. How it
was recorded is in the README.md beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvhost.verdict.evidence import Evidence
from kvhost.verdict.foreign import judge_foreign
from kvhost.verdict.foreign_evidence import ForeignEvidence
from kvhost.verdict.judge import judge
from kvhost.verdict.types import Verdict
from tests import foreign_cases
from tests.verdict_cases import evidence_of
from tests.verdict_edits import (
    Edit,
    Json,
    between,
    both,
    chunks,
    count,
    in_life,
    no_reads,
    other_token,
    put,
    restored_hits,
    same_process,
)
from tests.verdict_types import Case

R = "requests.restored."
HIT = 8192.0
HEALTHY = "healthy-fs_native"


@dataclass(frozen=True)
class Setup:
    """A set-up. ``base``: recorded evidence; ``edited``: what of it was changed, in words, None
    when nothing was; ``url``: of `kvhost verify --url`."""

    what: str
    persisted: str
    cause: str | None
    base: str = HEALTHY
    edited: str | None = None
    edit: Edit = lambda e: None
    url: bool = False

    def judged(self) -> Verdict:
        if self.url:
            evidence = foreign_cases.evidence_of(self.base)
            self.edit(evidence)
            return judge_foreign(ForeignEvidence.model_validate(evidence))
        case = Case("", "", self.edit, base=self.base)
        return judge(Evidence.model_validate(evidence_of(case)))


def logged(line: str) -> Edit:
    def edit(e: Json) -> None:
        e["logs"]["runner"]["lines"].append(line)

    return edit


def new_names(e: Json) -> None:
    """The prompt was stored once more, as files beside those of before."""
    number = e["written"]["new_files"]
    e["requests"]["restored"]["files"]["new"] = number
    after = e["requests"]["restored"]["after"]
    after["files"] += number
    after["cache"]["l2_stored_chunks"] = (after["cache"]["l2_stored_chunks"] or 0) + number
    for shot in (e["requests"]["control"][side] for side in ("before", "after")):
        shot["files"] += number
        shot["cache"]["l2_stored_chunks"] = (shot["cache"]["l2_stored_chunks"] or 0) + number


def files_gone(e: Json) -> None:
    """The directory was empty when the services came back, and the prompt was written again."""
    for role in ("restored", "control"):
        for side in ("before", "after"):
            e["requests"][role][side]["own_files"] = 0
    e["requests"]["restored"]["before"]["files"] = 0
    e["requests"]["restored"]["files"]["new"] = e["written"]["new_files"]


def missed(*edits: Edit) -> Edit:
    return both(restored_hits(0), *edits)


SETUPS: tuple[Setup, ...] = (
    # recorded as they were
    Setup("cache server without L2", "FAIL", "l2-absent", "l2-absent"),
    Setup("vLLM without a connector", "FAIL", "connector-missing", "no-connector"),
    Setup("KV of another prompt under the names", "FAIL", "wrong-kv-served", "planted"),
    Setup("half of the files deleted", "FAIL", "evicted", "half-deleted"),
    Setup("all files deleted", "FAIL", "evicted", "wiped"),
    Setup("half of the files truncated", "FAIL", "files-touched", "truncated"),
    Setup("namespace changed", "FAIL", "namespace-changed", "namespace-changed"),
    Setup(
        "files' contents swapped, which changes no answer",
        "INCONCLUSIVE",
        "files-touched",
        "chunks-swapped-same-answer",
    ),
    Setup("L2 on tmpfs", "INCONCLUSIVE", "page-cache-not-dropped", "tmpfs"),
    Setup("restart that did not restart", "INCONCLUSIVE", "not-restarted", "no-restart"),
    Setup("only the cache server restarted", "INCONCLUSIVE", "not-restarted", "cache-only"),
    Setup(
        "another pair held the ports, and two clients asked",
        "INCONCLUSIVE",
        "metrics-unreadable",
        "other-instance-died",
    ),
    Setup("server in use", "INCONCLUSIVE", "server-in-use", "in-use"),
    Setup("response silent", "INCONCLUSIVE", "cached-tokens-missing", "no-details"),
    # recorded, with one edit
    Setup(
        "restart that restarted the cache server only in its record",
        "INCONCLUSIVE",
        "not-restarted",
        edited="PID and start time of before",
        edit=same_process("cache"),
    ),
    Setup(
        "counters reset in between",
        "INCONCLUSIVE",
        "counters-reset",
        edited="computed tokens fall in the control",
        edit=count("control", "vllm", from_compute=-8205),
    ),
    Setup(
        "runner crashed in between",
        "INCONCLUSIVE",
        "counters-reset",
        edited="another start time after the control",
        edit=put("requests.control.after.processes.runner.start_ticks", 7),
    ),
    Setup(
        "metrics endpoint of vLLM missing",
        "INCONCLUSIVE",
        "metrics-unreadable",
        edited="no page after the restart",
        edit=in_life(1, "vllm", None),
    ),
    Setup(
        "metrics endpoint of the cache server missing",
        "INCONCLUSIVE",
        "metrics-unreadable",
        edited="no page after the restart",
        edit=in_life(1, "cache", None),
    ),
    Setup(
        "reads not observable, all else well",
        "PASS",
        None,
        edited="no bytes read",
        edit=no_reads,
    ),
    Setup(
        "answer altered by a proxy",
        "FAIL",
        "wrong-kv-served",
        edited="one token is another",
        edit=other_token,
    ),
    Setup(
        "answer altered, and nothing came from the cache",
        "FAIL",
        "answer-differs-without-a-hit",
        edited="one token is another, no hit",
        edit=missed(other_token),
    ),
    Setup(
        "prompt shorter than two chunks",
        "INCONCLUSIVE",
        "prompt-too-short",
        edited="as of a prompt of one chunk",
        edit=chunks(1),
    ),
    Setup(
        "`PYTHONHASHSEED` unset with builtin hashing",
        "FAIL",
        "hash-seed-unstable",
        edited="nothing found, as many files written under other names",
        edit=missed(new_names),
    ),
    Setup(
        "index in memory only, as `local_disk`",
        "FAIL",
        "index-in-memory",
        edited="nothing found, no file written",
        edit=missed(),
    ),
    Setup(
        "L2 on tmpfs, empty afterwards as after a reboot",
        "FAIL",
        "tier-in-memory",
        "tmpfs",
        edited="nothing found, no file left",
        edit=missed(files_gone),
    ),
    Setup(
        "evicted while the services were down",
        "FAIL",
        "evicted",
        edited="nothing found, no file left",
        edit=missed(files_gone),
    ),
    Setup(
        "compiled operations missing",
        "FAIL",
        "compiled-ops-missing",
        edited="nothing found, and the log says so",
        edit=missed(logged("WARNING Failed to import from vllm._C: libnuma.so.1")),
    ),
    Setup(
        "a client between two requests",
        "INCONCLUSIVE",
        "not-alone",
        edited="a request more",
        edit=between("vllm", requests_finished=1),
    ),
    Setup(
        "a second runner at the same cache server",
        "INCONCLUSIVE",
        "not-alone",
        edited="a look-up more",
        edit=between("cache", lookups=1),
    ),
    Setup(
        "answered by the engine's own memory",
        "INCONCLUSIVE",
        "engine-memory",
        edited="hits of vLLM's prefix cache in place of external ones",
        edit=count("restored", "vllm", external_hits=-HIT, prefix_hits=HIT),
    ),
    Setup(
        "answered by the cache server's memory",
        "INCONCLUSIVE",
        "served-from-l1",
        edited="hits in L1 in place of L2",
        edit=restored_hits(0, l1=HIT),
    ),
    Setup(
        "write to L2 not finished",
        "INCONCLUSIVE",
        "write-not-finished",
        edited="a file fewer, and the wait ran out",
        edit=both(put("written.new_files", 31), put("written.timed_out", True)),
    ),
    Setup(
        "files in the page cache",
        "INCONCLUSIVE",
        "page-cache-not-dropped",
        edited="half of the pages stayed",
        edit=put("page_cache.resident_after", 16384),
    ),
    Setup(
        "found, but not loaded",
        "FAIL",
        "load-failed",
        edited="hits in L2, none in vLLM",
        edit=restored_hits(HIT, external=0),
    ),
    Setup(
        "vLLM asks another cache server",
        "INCONCLUSIVE",
        "other-cache-server",
        edited="no look-up at this one",
        edit=count("restored", "cache", lookups=-1, hit_tokens=-HIT, hit_l2_tokens=-HIT),
    ),
    Setup(
        "a proxy that caches answers any prompt",
        "FAIL",
        "unseen-prompt-hits",
        edited="the control has hits in L2",
        edit=both(
            count("control", "cache", hit_tokens=256, hit_l2_tokens=256),
            count("control", "vllm", external_hits=256),
            put("requests.control.usage_cached_tokens", 256),
        ),
    ),
    *(Setup(*row[:4], edited=row[4], edit=row[5], url=True) for row in foreign_cases.SETUPS),
)


def row(setup: Setup) -> str:
    folder = "evidence_foreign" if setup.url else "evidence"
    source = f"{folder}/{setup.base}"
    if setup.base == "mp":
        source = "evidence/healthy-fs_native, as `--url` sees it"
    source += f", edited: {setup.edited}" if setup.edited else ", as recorded"
    cause = f"`{setup.cause}`" if setup.cause else "-"
    what = ("`--url`: " if setup.url else "") + setup.what
    return f"| {what} | {source} | {setup.persisted} | {cause} |"


def table() -> str:
    """The rows in Markdown, as docs/verdict.md holds them."""
    head = ["| set-up | evidence | verdict | cause named first |", "|---|---|---|---|"]
    return "\n".join([*head, *(row(setup) for setup in SETUPS)]) + "\n"


def outcome(setup: Setup) -> tuple[Any, ...]:
    found = setup.judged()
    return found.persisted, found.causes[0].slug if found.causes else None


if __name__ == "__main__":
    print(table(), end="")
