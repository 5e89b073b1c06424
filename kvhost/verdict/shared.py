"""The judge of the shared tier: was what host A computed served on host B, and right? Pure.

The evidence is that of onhost/shared_check.py on both, in turn. As with the restart test: a figure
that is missing never passes, another answer is FAIL whatever else, and time plays no part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvhost.basics import Persisted
from kvhost.verdict.types import Condition, Weight

Json = Mapping[str, Any]


def judge_shared(a: Json, b: Json, *, min_hit: float) -> tuple[Persisted, list[Condition]]:
    """The verdict and every condition. ``a``, ``b``: the answers of the step write and of the step
    read; ``min_hit``: part of the prompt that must come from the shared tier, at most 1."""
    conditions = list(_conditions(a, b, min_hit))
    if conditions[0].met is False:
        return "FAIL", conditions
    if any(c.met is not True for c in conditions if c.weight == "inconclusive"):
        return "INCONCLUSIVE", conditions
    if any(c.met is False for c in conditions):
        return "FAIL", conditions
    return ("PASS" if all(c.met for c in conditions) else "INCONCLUSIVE"), conditions


def _conditions(a: Json, b: Json, min_hit: float) -> Iterator[Condition]:
    expected = b["expected"]
    chunks, whole = expected["prompt"], expected["whole_tokens"]
    cold, again = _request(a, "cold"), _request(b, "again")
    first, second = cold.get("output_tokens"), again.get("output_tokens")
    same = first == second if first and second else None
    found = "equal" if same else "missing" if same is None else "another"
    yield _one("same_answer", "same answer on both", found, "equal", same, "fail")
    yield _one(
        "same_prompt", "the same prompt", _digest(again), "that of A",
        _both(cold.get("prompt_digest"), again.get("prompt_digest")), "inconclusive",
    )  # fmt: skip
    yield _one(
        "same_namespace", "one namespace", _differing(a, b), "the same on both",
        a["namespace"] == b["namespace"], "inconclusive",
    )  # fmt: skip
    places = [_store(one, "after").get("place") for one in (a, b)]
    yield _one(
        "same_store", "one store", str(places[1]), str(places[0]), _both(*places), "inconclusive"
    )
    for name, one in (("A", a), ("B", b)):
        store = _store(one, "after")
        found = "yes" if store.get("answers") else str(store.get("why") or "missing")
        yield _one(
            f"store_answers_{name.lower()}", f"{name} uses the store", found, "yes",
            store.get("answers"), "inconclusive",
        )  # fmt: skip
    hits = _grew(cold, "cache", "hit_tokens")
    yield _one("cold_cold", "new to A", hits, "0 tokens found", _is(hits, 0), "inconclusive")
    came = a["arrived"]["values"]
    yield _one(
        "in_store", "in the store before B", came, f">= {a['arrived']['wanted']} values",
        None if came is None else came >= a["arrived"]["wanted"], "inconclusive",
    )  # fmt: skip
    held = b.get("held_here")
    yield _one("not_local", "not in B's own tier", held, "0 files", _is(held, 0), "inconclusive")
    for name, one in (("a", a), ("b", b)):
        others = _others(one)
        yield _one(
            f"alone_{name}", f"nobody else at {name.upper()}", others, "0 requests",
            _is(others, 0), "inconclusive",
        )  # fmt: skip
    tokens = _grew(again, "cache", "hit_l2_tokens")
    yield _one(
        "hit", "B found it in L2", tokens, f">= {min_hit * whole:.0f} tokens",
        None if tokens is None else tokens >= min_hit * whole, "fail",
    )  # fmt: skip
    loaded = _loaded(b)
    yield _one(
        "from_shared", "read from the store", loaded, f">= {min_hit * chunks:.0f} values",
        None if loaded is None else loaded >= min_hit * chunks, "fail",
    )  # fmt: skip
    local = _local_loads(b)
    yield _one("no_local", "B's own tier read nothing", local, "0 loads", _is(local, 0), "fail")
    half = _grew(_request(b, "half"), "cache", "hit_tokens")
    yield _one(
        "half", "half a prompt: half found", half, f"{expected['half_tokens']} tokens",
        _is(half, expected["half_tokens"]), "inconclusive",
    )  # fmt: skip
    unseen = _grew(_request(b, "unseen"), "cache", "hit_tokens")
    yield _one(
        "unseen", "an unseen prompt misses", unseen, "0 tokens found", _is(unseen, 0),
        "inconclusive",
    )  # fmt: skip


def _one(
    name: str, question: str, figure: float | int | str | None, threshold: str, met: bool | None,
    weight: Weight,
) -> Condition:  # fmt: skip
    return Condition(
        id=name, question=question, figure=figure, threshold=threshold, met=met, weight=weight
    )


def _request(one: Json, role: str) -> Json:
    found: Json = one["requests"].get(role) or {}
    return found if not found.get("error") else {}


def _grew(request: Json, page: str, field: str) -> float | None:
    """By how much a counter grew over a request; one that appears with it began at 0. None where
    the page could not be had, or it fell."""
    before, after = ((request.get(when) or {}).get(page) for when in ("before", "after"))
    if before is None or after is None or after.get(field) is None:
        return None
    grown: float = after[field] - (before.get(field) or 0)
    return grown if grown >= 0 else None


def _store(one: Json, when: str) -> Json:
    return (one.get(when) or {}).get("store") or {}


def _loaded(b: Json) -> int | None:
    """Values that B's cache server read from the store over the first prompt."""
    before, after = _store(b, "before").get("loaded"), _store(b, "after_again").get("loaded")
    return None if before is None or after is None else int(after) - int(before)


def _local_loads(b: Json) -> float | None:
    """Loads of B over the first prompt that were not the shared tier's."""
    pages = [b.get("before") or {}, b.get("after_again") or {}]
    if pages[1].get("loads_all") is None:
        return None
    own = [(page.get("loads_all") or 0) - (page.get("loads_shared") or 0) for page in pages]
    return float(own[1] - own[0])


def _others(one: Json) -> float | None:
    """Look-ups at the cache server beyond one for each request of the test."""
    found = 0.0
    for request in one["requests"].values():
        grown = _grew(request, "cache", "lookups")
        if grown is None:
            return None
        found += grown - 1
    return found


def _differing(a: Json, b: Json) -> str:
    if a["namespace"] == b["namespace"]:
        return str(a["namespace"])
    keys = sorted({*a["fields"], *b["fields"]})
    names = [key for key in keys if a["fields"].get(key) != b["fields"].get(key)]
    return f"two: other {', '.join(names) or 'fields, which could not be read'}"


def _digest(request: Json) -> str | None:
    digest = request.get("prompt_digest")
    return str(digest)[:12] if digest else None


def _both(one: object, other: object) -> bool | None:
    return None if one is None or other is None else one == other


def _is(figure: float | None, wanted: float) -> bool | None:
    return None if figure is None else figure == wanted
