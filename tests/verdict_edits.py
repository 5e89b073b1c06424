"""Edits of recorded evidence: each changes one thing, and what real servers would count with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvhost.verdict.agrees import REQUESTS

LIVES = (
    ("cold", "moved_cold", "half_cold", "warm", "killed"),
    ("moved", "half", "restored", "cut", "reference", "control"),
)
Json = dict[str, Any]
Edit = Callable[[Json], object]


def both(*edits: Edit) -> Edit:
    return lambda e: [edit(e) for edit in edits]


def put(path: str, value: object) -> Edit:
    """Sets one value; the path must exist, so that a typing error is no edit."""

    def edit(e: Json) -> None:
        *way, last = path.split(".")
        place: Any = e
        for key in way:
            place = place[key]
        assert last in place, path
        place[last] = value

    return edit


def count(role: str, page: str, **amounts: float) -> Edit:
    """Adds to counters in a request: to its after-snapshot and all later ones of its life."""

    def edit(e: Json) -> None:
        life = next(roles for roles in LIVES if role in roles)
        shots = [e["requests"][role]["after"]]
        for later in life[life.index(role) + 1 :]:
            if later in e["requests"]:
                shots += [e["requests"][later]["before"], e["requests"][later]["after"]]
        for shot in filter(None, shots):  # a killed request has no end
            for field, amount in amounts.items():
                shot[page][field] = (shot[page][field] or 0) + amount

    return edit


def each_shot(e: Json, *lives: int) -> list[Json]:
    roles = [role for life in lives for role in LIVES[life] if role in e["requests"]]
    shots = [e["requests"][role][side] for role in roles for side in ("before", "after")]
    return [shot for shot in shots if shot]


def in_life(life: int, path: str, value: object) -> Edit:
    return lambda e: [put(path, value)(shot) for shot in each_shot(e, life)]


def same_process(name: str, **changed: int | str) -> Edit:
    """The process after the restart is the one of before, but for what is given."""

    def edit(e: Json) -> None:
        service = e["services"][name]
        who = {**service["before"]["proc"], **changed}
        service["after"] = {"record": who, "proc": who, "listens": True}
        in_life(1, f"processes.{name}", who)(e)

    return edit


def restored_hits(l2: float, l1: float = 0, external: float | None = None) -> Edit:
    """What the cache served to the restored request, told by every source."""

    def edit(e: Json) -> None:
        request = e["requests"]["restored"]
        served = l2 + l1 if external is None else external
        before, after = request["before"]["cache"], request["after"]["cache"]
        old = {key: (value or 0) - (before[key] or 0) for key, value in after.items()}
        change = {
            "hit_l2_tokens": l2 - old["hit_l2_tokens"],
            "hit_l1_tokens": l1 - old["hit_l1_tokens"],
            "hit_tokens": l2 + l1 - old["hit_tokens"],
        }
        count("restored", "cache", **change)(e)
        before, after = request["before"]["vllm"], request["after"]["vllm"]
        delta = served - (after["external_hits"] - (before["external_hits"] or 0))
        count("restored", "vllm", external_hits=delta, from_external=delta)(e)
        count("restored", "vllm", from_compute=-delta)(e)
        request["usage_cached_tokens"] = int(served)

    return edit


STEPS = REQUESTS


def step(name: str, **changed: object) -> Edit:
    return lambda e: next(s for s in e["steps"] if s["name"] == name).update(changed)


def no_step(name: str) -> Edit:
    def edit(e: Json) -> None:
        left = [s for s in e["steps"] if s["name"] != name]
        assert len(left) < len(e["steps"]), name
        e["steps"] = left

    return edit


def failed(role: str) -> Edit:
    def edit(e: Json) -> None:
        nothing = ("ttft_s", "total_s", "output_tokens", "usage_prompt_tokens")
        e["requests"][role] |= {**dict.fromkeys(nothing), "usage_cached_tokens": None}
        e["requests"][role] |= {"error": "HTTPError: 500", "http_status": 500}
        step(STEPS[role], ok=False)(e)

    return edit


def only(*roles: str) -> Edit:
    return lambda e: [e["requests"].pop(r) for r in list(e["requests"]) if r not in roles]


def chunks(number: int) -> Edit:
    def edit(e: Json) -> None:
        old = e["written"]["new_files"]
        size = e["config"]["chunk_size"]

        def tokens(value: float) -> float:
            whole = value // (old * size)
            return float(value - whole * (old - number) * size)

        def scale(place: Json, *fields: str) -> None:
            for field in fields:
                place[field] = place[field] and place[field] * number // old

        e["config"]["prompt_tokens"] = number * size + 8
        scale(e["written"], "expected_files", "new_files", "new_bytes")
        scale(e["page_cache"], "files", "pages", "resident_before")
        for request in e["requests"].values():
            for field in ("usage_prompt_tokens", "usage_cached_tokens"):
                request[field] = int(tokens(request[field]))
            scale(request["files"], "new")
        for shot in each_shot(e, 0, 1):
            scale(shot, "files", "bytes", "own_files")
            scale(shot["cache"], "l2_stored_chunks")
            for page in (shot["vllm"], shot["cache"]):
                for field in page:
                    if page[field] and page[field] >= size:
                        page[field] = tokens(page[field])

    return edit


def between(page: str, **amounts: float) -> Edit:
    """Counts after the restored request was over and before the control was sent."""

    def edit(e: Json) -> None:
        for shot in e["requests"]["control"]["before"], e["requests"]["control"]["after"]:
            for field, amount in amounts.items():
                shot[page][field] = (shot[page][field] or 0) + amount

    return edit


def other_token(e: Json) -> None:
    e["requests"]["restored"]["output_tokens"][5] += 1


def no_reads(e: Json) -> None:
    request = e["requests"]["restored"]
    for field in ("cache_reads", "device_read_bytes"):
        request["after"][field] = request["before"][field]


def refused(e: Json, busy: int | None, foreign: int | None) -> None:
    e["refused"] = {"busy": busy, "foreign": foreign, "own": 0}
    e["requests"].clear()
    for service in e["services"].values():
        service["after"] = service["restart"] = None
    e |= {"written": None, "page_cache": None}


def first(e: Json) -> None:
    for shot in each_shot(e, 1):
        shot["vllm"]["requests_finished"] += 1


def ready(e: Json) -> None:
    for shot in each_shot(e, 1):
        shot["vllm"]["requests_finished"] += 1
        shot["own_requests"] += 1
