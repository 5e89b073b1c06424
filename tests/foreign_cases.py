"""Evidence of servers that kvhost did not install, and edits of it with the verdict each must get.

fixtures/evidence_foreign/*.json are recorded, see its README. "mp" is made of the counters, answers
and processes that fixtures/evidence/healthy-fs_native.json holds, in the shape of this evidence, as
seen with --cache-metrics-url and without a storage directory.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Json = dict[str, Any]
Edit = Callable[[Json], None]
FIXTURES = Path(__file__).parent / "fixtures" / "evidence_foreign"
OWN = Path(__file__).parent / "fixtures" / "evidence"
TITLES = {
    "cold": "cold request",
    "warm": "warm request",
    "restored": "the same request again",
    "control": "control: an unseen prompt",
}


def _shot(own: Json, life: int, sent: int) -> Json:
    runner = own["processes"]["runner"]
    born = {"start_time": 1795970000.0 + runner["start_ticks"] / 100}
    return {
        "unix": own["unix"],
        "vllm": {**own["vllm"], **born},
        "cache": {**own["cache"], "start_time": None},
        "sent": sent,
        "runner": runner,
        **dict.fromkeys(("files", "own_files", "own_pages")),
    }


@functools.cache
def _of_own(name: str) -> Json:
    own = json.loads((OWN / f"{name}.json").read_text())
    requests = {}
    for index, (role, found) in enumerate(own["requests"].items()):
        life, sent = index // 2, index % 2
        kept = {k: v for k, v in found.items() if k not in ("before", "after", "files")}
        kept["before"] = _shot(found["before"], life, sent)
        kept["after"] = _shot(found["after"], life, sent + 1)
        requests[role] = {**kept, "files": None}
    names = ["what answers", "is the server in use", "make two prompts", *TITLES.values()]
    names.insert(5, "restart command")
    keys = ("model", "prompt_tokens", "chunk_size", "max_tokens", "disrupt")
    return {
        "schema": "kvhost/evidence-foreign/1",
        "started_unix": own["started_unix"],
        "finished_unix": own["finished_unix"],
        "event": "command",
        "config": {**{key: own["config"][key] for key in keys}, "storage_dir": None},
        "where": {"host": "box", "user": "root"},
        "cache_metrics": True,
        "filesystem": None,
        "versions": {"vllm": "0.32.0"},
        "prompts": "ids",
        "refused": None,
        "interrupted": None,
        "restart": {
            "program": "restart-both",
            "exit_code": 0,
            "began_unix": own["started_unix"],
            "ready_s": 40.0,
        },
        "requests": requests,
        "written": None,
        "page_cache": None,
        "steps": [{"name": n, "ok": True, "seconds": 1.0, "error": None} for n in names],
    }


def evidence_of(name: str) -> Json:
    """A copy of recorded evidence; "mp" as said above."""
    if name == "mp":
        return copy.deepcopy(_of_own("healthy-fs_native"))
    found: Json = json.loads((FIXTURES / f"{name}.json").read_text())
    return found


# -- edits ------------------------------------------------------------------------------------
def put(path: str, value: object) -> Edit:
    def edit(e: Json) -> None:
        *way, last = path.split(".")
        place: Any = e
        for key in way:
            place = place[key]
        place[last] = value

    return edit


def both(*edits: Edit) -> Edit:
    def edit(e: Json) -> None:
        for one in edits:
            one(e)

    return edit


def shots(e: Json, *lives: int) -> list[Json]:
    roles = [role for life in lives for role in (("cold", "warm"), ("restored", "control"))[life]]
    found = [e["requests"].get(role) for role in roles]
    return [r[side] for r in found if r for side in ("before", "after") if r[side]]


def count(role: str, page: str, **amounts: float) -> Edit:
    """Other growth over one request; later snapshots of the same life follow."""

    def edit(e: Json) -> None:
        life = 0 if role in ("cold", "warm") else 1
        all_shots = shots(e, life)
        first = all_shots.index(e["requests"][role]["after"])
        for shot in all_shots[first:]:
            for field, amount in amounts.items():
                shot[page][field] = (shot[page][field] or 0) + amount

    return edit


def in_life(life: int, field: str, value: object) -> Edit:
    def edit(e: Json) -> None:
        for shot in shots(e, life):
            put(field, value)(shot)

    return edit


def same_start(e: Json) -> None:
    old = e["requests"]["cold"]["before"]["vllm"]["start_time"]
    in_life(1, "vllm.start_time", old)(e)


def same_process(e: Json) -> None:
    in_life(1, "runner", e["requests"]["cold"]["before"]["runner"])(e)


def same_counters(e: Json) -> None:
    last = shots(e, 0)[-1]["vllm"]["requests_finished"]
    for shot in shots(e, 1):
        shot["vllm"]["requests_finished"] += last


def hits(external: float, l2: float | None = None, l1: float = 0.0) -> Edit:
    """What the restored request got, told by every source."""

    def edit(e: Json) -> None:
        request = e["requests"]["restored"]
        delta = external - request["after"]["vllm"]["external_hits"]
        count("restored", "vllm", external_hits=delta, from_external=delta, from_compute=-delta)(e)
        request["usage_cached_tokens"] = int(external)
        if e["cache_metrics"]:
            old = request["after"]["cache"]
            mine = external if l2 is None else l2
            change = {
                "hit_l2_tokens": mine - old["hit_l2_tokens"],
                "hit_l1_tokens": l1 - old["hit_l1_tokens"],
                "hit_tokens": mine + l1 - old["hit_tokens"],
            }
            count("restored", "cache", **change)(e)

    return edit


def other_token(e: Json) -> None:
    e["requests"]["restored"]["output_tokens"][5] += 1


def no_cache_metrics(e: Json) -> None:
    e["cache_metrics"] = False
    for shot in shots(e, 0, 1):
        shot["cache"] = None


HIT = 8192.0
LOAD = "requests.restored."
#: what, verdict, cause, base, what was edited, edit; for tests/verdict_setups.py
SETUPS: tuple[tuple[str, str, str | None, str, str | None, Edit], ...] = (
    (
        "LMCacheConnectorV1 with `local_disk: file:///…`, the recipe that circulates",
        "FAIL",
        "index-in-memory",
        "local-disk",
        None,
        lambda e: None,
    ),
    (
        "LMCacheConnectorV1 with a remote `fs:///…`, a URL without host, dropped with a warning",
        "FAIL",
        "nothing-written",
        "fs-without-host",
        None,
        lambda e: None,
    ),
    (
        "LMCacheConnectorV1 with a remote `fs://`, builtin hashing, `PYTHONHASHSEED` unset",
        "FAIL",
        "hash-seed-unstable",
        "fs-no-seed",
        None,
        lambda e: None,
    ),
    ("vLLM without a connector", "FAIL", "connector-missing", "plain", None, lambda e: None),
    (
        "LMCache's server, only the runner restarted: its memory answered",
        "INCONCLUSIVE",
        "storage-not-seen",
        "mp-runner-only",
        None,
        lambda e: None,
    ),
    (
        "LMCache's server, both restarted, for comparison",
        "PASS",
        None,
        "mp-both",
        None,
        lambda e: None,
    ),
    (
        "LMCacheConnectorV1 with a remote `fs://` and a seed, for comparison",
        "PASS",
        None,
        "fs-seed",
        None,
        lambda e: None,
    ),
    ("ExampleConnector, for comparison", "PASS", None, "example", None, lambda e: None),
    (
        "reads not observable",
        "INCONCLUSIVE",
        "reads-not-observed",
        "example",
        "pages in memory not known",
        put("requests.restored.after.own_pages", None),
    ),
    (
        "where the KV lay is not looked at",
        "INCONCLUSIVE",
        "storage-not-seen",
        "mp",
        "the cache server's page not given",
        no_cache_metrics,
    ),
    (
        "a command that restarts nothing",
        "INCONCLUSIVE",
        "not-restarted",
        "mp",
        "process, start time and counters of before",
        both(same_start, same_process, same_counters),
    ),
    (
        "a proxy was restarted, the server behind it was not",
        "INCONCLUSIVE",
        "not-restarted",
        "mp",
        "start time and counters of before",
        both(same_start, same_counters),
    ),
    (
        "neither process nor start time can be had",
        "INCONCLUSIVE",
        "restart-not-proven",
        "mp",
        "both not known",
        both(
            *(in_life(life, "runner", None) for life in (0, 1)),
            *(in_life(life, "vllm.start_time", None) for life in (0, 1)),
        ),
    ),
    (
        "the proxy in front stayed, the server restarted",
        "INCONCLUSIVE",
        "restart-not-proven",
        "mp",
        "process of before",
        same_process,
    ),
    (
        "the cache server's memory answered",
        "INCONCLUSIVE",
        "served-from-l1",
        "mp",
        "hits in L1 in place of L2",
        hits(HIT, l2=0.0, l1=HIT),
    ),
    ("nothing persisted", "FAIL", "nothing-persisted", "mp", "no hit", hits(0.0)),
    (
        "another answer after the restart",
        "FAIL",
        "wrong-kv-served",
        "mp",
        "one token is another",
        other_token,
    ),
)


def without_start(e: Json) -> None:
    for life in (0, 1):
        in_life(life, "vllm.start_time", None)(e)


def failed(role: str) -> Edit:
    """A request that was not answered, with the step that says so."""

    def edit(e: Json) -> None:
        request = e["requests"][role]
        request.update(error="HTTP 500", http_status=500, ttft_s=None, total_s=None)
        request.update(output_tokens=None, usage_prompt_tokens=None, usage_cached_tokens=None)
        step = next(s for s in e["steps"] if s["name"] == TITLES[role])
        step.update(ok=False, error="HTTP 500")

    return edit


def asked_before(e: Json) -> None:
    for shot in shots(e, 1):
        shot["vllm"]["requests_finished"] += 1


@dataclass(frozen=True)
class Case:
    """A case of the judge; ``cause`` None: whatever is named."""

    name: str
    persisted: str
    cause: str | None
    edit: Edit
    base: str = "mp"


_OF_MP: tuple[tuple[str, str, str | None, Edit], ...] = (
    ("healthy", "PASS", None, lambda e: None),
    ("where it lay is not looked at", "INCONCLUSIVE", "storage-not-seen", no_cache_metrics),
    (
        "no hit, where it lay is not looked at",
        "FAIL",
        "nothing-persisted",
        both(no_cache_metrics, hits(0.0)),
    ),
    ("no start time, the process proves it", "PASS", None, without_start),
    (
        "no process, the start time proves it",
        "PASS",
        None,
        both(in_life(0, "runner", None), in_life(1, "runner", None)),
    ),
    ("counters go on in another process", "INCONCLUSIVE", "restart-not-proven", same_counters),
    (
        "process of before, no start time, counters anew",
        "INCONCLUSIVE",
        "restart-not-proven",
        both(without_start, same_process),
    ),
    ("interrupted", "INCONCLUSIVE", "interrupted", put("interrupted", "SIGTERM")),
    ("the restart command failed", "INCONCLUSIVE", None, put("restart.exit_code", 1)),
    ("refused", "INCONCLUSIVE", "server-in-use", put("refused", {"busy": 0, "finished": 3})),
    (
        "prompt of one chunk",
        "INCONCLUSIVE",
        "prompt-too-short",
        both(*(put(f"requests.{role}.usage_prompt_tokens", 300) for role in TITLES)),
    ),
    ("another prompt again", "INCONCLUSIVE", None, put(LOAD + "prompt_digest", "x")),
    (
        "the control sent the same prompt",
        "INCONCLUSIVE",
        None,
        lambda e: put("requests.control.prompt_digest", e["requests"]["cold"]["prompt_digest"])(e),
    ),
    ("the length is not told", "INCONCLUSIVE", None, put(LOAD + "usage_prompt_tokens", None)),
    (
        "a counter fell",
        "INCONCLUSIVE",
        "counters-reset",
        count("control", "vllm", from_compute=-8205.0),
    ),
    (
        "another server answered in between",
        "INCONCLUSIVE",
        "counters-reset",
        put("requests.control.after.vllm.start_time", 1.0),
    ),
    (
        "the process changed in between",
        "INCONCLUSIVE",
        "counters-reset",
        put("requests.control.after.runner.pid", 7),
    ),
    (
        "no metrics after the restart",
        "INCONCLUSIVE",
        "metrics-unreadable",
        in_life(1, "vllm", None),
    ),
    (
        "no metrics of the cache server",
        "INCONCLUSIVE",
        "metrics-unreadable",
        in_life(1, "cache", None),
    ),
    (
        "a client meanwhile",
        "INCONCLUSIVE",
        "not-alone",
        count("restored", "vllm", requests_finished=1.0),
    ),
    (
        "a client waits",
        "INCONCLUSIVE",
        "not-alone",
        put("requests.control.before.vllm.waiting", 1.0),
    ),
    (
        "others asked after the restart, before the test did",
        "PASS",
        None,
        asked_before,
    ),
    (
        "the cold request found something",
        "INCONCLUSIVE",
        "unseen-prompt-hits",
        count("cold", "vllm", external_hits=128.0),
    ),
    (
        "the cold request found something in the engine",
        "INCONCLUSIVE",
        "unseen-prompt-hits",
        count("cold", "vllm", prefix_hits=128.0),
    ),
    (
        "not answered after the restart",
        "FAIL",
        "load-failed",
        both(failed("restored"), put("requests.restored.after", None)),
    ),
    (
        "nothing is answered after the restart",
        "INCONCLUSIVE",
        None,
        both(failed("restored"), failed("control")),
    ),
    (
        "a part of the prompt was asked for",
        "INCONCLUSIVE",
        None,
        count("restored", "vllm", external_queries=-9.0),
    ),
    (
        "a part of the control was asked for",
        "INCONCLUSIVE",
        None,
        count("control", "vllm", external_queries=-9.0),
    ),
    ("too few hits", "FAIL", "nothing-persisted", hits(7680.0)),
    ("just enough", "PASS", None, hits(7783.0)),
    (
        "the engine's own memory answered",
        "INCONCLUSIVE",
        "engine-memory",
        count("restored", "vllm", external_hits=-HIT, from_external=-HIT, prefix_hits=HIT),
    ),
    (
        "a block of the engine's own memory",
        "INCONCLUSIVE",
        "engine-memory",
        both(count("restored", "vllm", prefix_hits=128.0), put(LOAD + "usage_cached_tokens", 8320)),
    ),
    (
        "vLLM counts it twice and differently",
        "INCONCLUSIVE",
        None,
        count("restored", "vllm", from_external=-128.0),
    ),
    (
        "response silent",
        "INCONCLUSIVE",
        "cached-tokens-missing",
        put(LOAD + "usage_cached_tokens", None),
    ),
    (
        "response disagrees",
        "INCONCLUSIVE",
        "cached-tokens-missing",
        put(LOAD + "usage_cached_tokens", 8064),
    ),
    (
        "another answer without a hit",
        "FAIL",
        "answer-differs-without-a-hit",
        both(other_token, hits(0.0)),
    ),
    (
        "another answer, not restarted",
        "FAIL",
        "wrong-kv-served",
        both(other_token, same_start, same_process),
    ),
    ("no token ids", "INCONCLUSIVE", None, put(LOAD + "output_tokens", None)),
    ("a shorter answer", "FAIL", "wrong-kv-served", put(LOAD + "output_tokens", [1])),
    (
        "the engine does not repeat itself",
        "INCONCLUSIVE",
        "answers-not-repeatable",
        both(other_token, put("requests.warm.output_tokens", [1] * 16)),
    ),
    (
        "the control hit",
        "FAIL",
        "unseen-prompt-hits",
        count("control", "vllm", external_hits=256.0),
    ),
    (
        "the control hit, by the cache server",
        "FAIL",
        "unseen-prompt-hits",
        count("control", "cache", hit_tokens=256.0),
    ),
    (
        "the control hit, by the response",
        "FAIL",
        "unseen-prompt-hits",
        put("requests.control.usage_cached_tokens", 256),
    ),
    ("the control is not answered", "INCONCLUSIVE", None, failed("control")),
    ("L2 found less than vLLM got", "INCONCLUSIVE", None, hits(HIT, l2=256.0)),
    ("L2 found nothing, nor did vLLM get it", "FAIL", "nothing-persisted", hits(0.0, l2=0.0)),
    ("a chunk of L1", "INCONCLUSIVE", "served-from-l1", hits(HIT, l2=7936.0, l1=256.0)),
)
#: Of "example", where files were written, dropped from the page cache, and read again.
_OF_EXAMPLE: tuple[tuple[str, str, str | None, Edit], ...] = (
    ("as recorded", "PASS", None, lambda e: None),
    (
        "nothing written",
        "INCONCLUSIVE",
        "storage-not-seen",
        both(put("written.new_files", 0), put("written.new_bytes", 0)),
    ),
    ("not at rest", "INCONCLUSIVE", None, put("written.at_rest", False)),
    ("temporary files", "INCONCLUSIVE", None, put("written.temporary_files", 1)),
    ("files changed meanwhile", "INCONCLUSIVE", None, put(LOAD + "before.own_files", 7)),
    (
        "pages stayed in memory",
        "INCONCLUSIVE",
        "page-cache-not-dropped",
        put("page_cache.resident_after", 2000),
    ),
    ("pages not looked at", "INCONCLUSIVE", "page-cache-not-dropped", put("page_cache", None)),
    ("not all files dropped", "INCONCLUSIVE", "page-cache-not-dropped", put("page_cache.files", 7)),
    (
        "half of the pages read",
        "INCONCLUSIVE",
        "reads-not-observed",
        put(LOAD + "after.own_pages.resident", 2052),
    ),
    (
        "reads not observable",
        "INCONCLUSIVE",
        "reads-not-observed",
        put(LOAD + "after.own_pages", None),
    ),
    (
        "files removed",
        "FAIL",
        "evicted",
        both(hits(0.0), put(LOAD + "before.own_files", 0), put(LOAD + "files.new", 8)),
    ),
    (
        "written anew under other names",
        "FAIL",
        "hash-seed-unstable",
        both(hits(0.0), put(LOAD + "files.new", 8)),
    ),
    ("not found, not written", "FAIL", "index-in-memory", hits(0.0)),
    (
        "not written, not found",
        "FAIL",
        "nothing-written",
        both(hits(0.0), put("written.new_files", 0), put("written.new_bytes", 0)),
    ),
)


#: Both sources: where one of them is enough to see where the KV lay, the other must not disagree.
_OF_BOTH: tuple[tuple[str, str, str | None, Edit], ...] = (
    ("files and L2 agree", "PASS", None, lambda e: None),
    ("files not at rest, but L2 hits", "INCONCLUSIVE", None, put("written.at_rest", False)),
    ("files changed, but L2 hits", "INCONCLUSIVE", None, put(LOAD + "before.own_files", 7)),
    ("pages in memory, but L2 hits", "INCONCLUSIVE", None, put("page_cache.resident_after", 2000)),
    (
        "files not read, but L2 hits",
        "INCONCLUSIVE",
        None,
        put(LOAD + "after.own_pages.resident", 0),
    ),
    (
        "files read, but no hits in L2",
        "INCONCLUSIVE",
        None,
        count("restored", "cache", hit_tokens=-2048.0, hit_l2_tokens=-2048.0),
    ),
    (
        "files read, but a chunk of L1",
        "INCONCLUSIVE",
        "served-from-l1",
        count("restored", "cache", hit_l1_tokens=256.0),
    ),
)
ALL: tuple[Case, ...] = (
    *(Case(*case, base="mp-both") for case in _OF_BOTH),
    Case("as recorded", "FAIL", "connector-missing", lambda e: None, base="plain"),
    Case("as recorded", "INCONCLUSIVE", "storage-not-seen", lambda e: None, "mp-runner-only"),
    *(Case(*case) for case in _OF_MP),
    *(Case(*case, base="example") for case in _OF_EXAMPLE),
    Case("as recorded", "FAIL", "index-in-memory", lambda e: None, base="local-disk"),
)
