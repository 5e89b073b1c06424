"""The judge of the shared tier, case by case: taking out any one condition fails a case."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from kvhost.verdict.shared import judge_shared

Json = dict[str, Any]
Edit = Callable[[Json, Json], None]


def request(tokens: list[int], hits: int, l2: int, digest: str = "d1") -> Json:
    before = {"hit_tokens": 100, "hit_l2_tokens": 100, "lookups": 5}
    after = {"hit_tokens": 100 + hits, "hit_l2_tokens": 100 + l2, "lookups": 6}
    return {
        "output_tokens": tokens, "prompt_digest": digest, "error": None,
        "before": {"cache": before}, "after": {"cache": after},
    }  # fmt: skip


def healthy() -> tuple[Json, Json]:
    """As both answer where all is well: 32 chunks, of 256 tokens, and two of half a short one."""
    store = {"place": "redis://10.0.0.5:6379", "answers": True, "why": None}
    common = {
        "namespace": "ns-1", "fields": {"dtype": "float32"},
        "expected": {"prompt": 32, "short": 4, "half_tokens": 512, "whole_tokens": 8192},
    }  # fmt: skip
    a = {
        **common, "arrived": {"values": 36, "wanted": 36}, "after": {"store": store},
        "requests": {"cold": request([1, 2, 3], 0, 0), "half_cold": request([4], 0, 0, "d2")},
    }  # fmt: skip
    b = {
        **common, "held_here": 0, "after": {"store": store},
        "before": {"store": {**store, "loaded": 7}, "loads_all": 3.0, "loads_shared": 2.0},
        "after_again": {"store": {**store, "loaded": 39}, "loads_all": 4.0, "loads_shared": 3.0},
        "requests": {
            "again": request([1, 2, 3], 8192, 8192), "half": request([5], 512, 512, "d3"),
            "unseen": request([6], 0, 0, "d4"),
        },
    }  # fmt: skip
    return copy.deepcopy(a), copy.deepcopy(b)


def test_all_is_well() -> None:
    word, conditions = judge_shared(*healthy(), min_hit=0.95)
    assert word == "PASS", conditions
    assert all(one.met for one in conditions)


def again(b: Json, **changed: Any) -> None:
    b["requests"]["again"].update(changed)


def grown(one: Json, role: str, field: str, by: int | None) -> None:
    page = one["requests"][role]["after"]["cache"]
    page[field] = None if by is None else one["requests"][role]["before"]["cache"][field] + by


CASES: dict[str, tuple[str, str, Edit]] = {
    "another answer": (
        "FAIL", "same_answer", lambda a, b: again(b, output_tokens=[1, 2, 4])),
    "no tokens": ("INCONCLUSIVE", "same_answer", lambda a, b: again(b, output_tokens=None)),
    "another prompt": (
        "INCONCLUSIVE", "same_prompt", lambda a, b: again(b, prompt_digest="d9")),
    "two namespaces": ("INCONCLUSIVE", "same_namespace", lambda a, b: b.update(namespace="ns-2")),
    "two stores": (
        "INCONCLUSIVE", "same_store", lambda a, b: b["after"].update(
            store={"place": "redis://10.0.0.6:6379", "answers": True})),
    "A is without the store": (
        "INCONCLUSIVE", "store_answers_a", lambda a, b: a["after"]["store"].update(answers=False)),
    "B is without the store": (
        "INCONCLUSIVE", "store_answers_b", lambda a, b: b["after"]["store"].update(answers=False)),
    "A had it before": (
        "INCONCLUSIVE", "cold_cold", lambda a, b: grown(a, "cold", "hit_tokens", 256)),
    "not all came into the store": (
        "INCONCLUSIVE", "in_store", lambda a, b: a["arrived"].update(values=35)),
    "B had it before": ("INCONCLUSIVE", "not_local", lambda a, b: b.update(held_here=1)),
    "somebody else at A": (
        "INCONCLUSIVE", "alone_a", lambda a, b: grown(a, "half_cold", "lookups", 2)),
    "somebody else at B": ("INCONCLUSIVE", "alone_b", lambda a, b: grown(b, "half", "lookups", 3)),
    "B found nothing": ("FAIL", "hit", lambda a, b: grown(b, "again", "hit_l2_tokens", 0)),
    "B found too little": ("FAIL", "hit", lambda a, b: grown(b, "again", "hit_l2_tokens", 7680)),
    "not counted": (
        "INCONCLUSIVE", "hit", lambda a, b: grown(b, "again", "hit_l2_tokens", None)),
    "found, and not read from the store": (
        "FAIL", "from_shared", lambda a, b: b["after_again"]["store"].update(loaded=8)),
    "B's own tier answered": (
        "FAIL", "no_local", lambda a, b: b["after_again"].update(loads_all=5)),
    "half a prompt found whole": (
        "INCONCLUSIVE", "half", lambda a, b: grown(b, "half", "hit_tokens", 1024)),
    "an unseen prompt found": (
        "INCONCLUSIVE", "unseen", lambda a, b: grown(b, "unseen", "hit_tokens", 256)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_is_not_well(name: str) -> None:
    word, condition, edit = CASES[name]
    a, b = healthy()
    edit(a, b)
    found, conditions = judge_shared(a, b, min_hit=0.95)
    assert found == word
    assert [one.id for one in conditions if one.met is not True] == [condition]


def test_every_condition_has_its_case() -> None:
    _, conditions = judge_shared(*healthy(), min_hit=0.95)
    assert {condition for _, condition, _ in CASES.values()} == {one.id for one in conditions}


def test_of_two_namespaces_it_says_what_differs() -> None:
    a, b = healthy()
    b.update(namespace="ns-2", fields={"dtype": "bfloat16"})
    _, conditions = judge_shared(a, b, min_hit=0.95)
    assert next(one for one in conditions if one.id == "same_namespace").figure == (
        "two: other dtype"
    )
