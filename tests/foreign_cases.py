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
