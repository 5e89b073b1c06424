"""The judge of servers of others, case by case; taking out any one condition fails a case."""

from __future__ import annotations

import itertools

import pytest

from kvhost.verdict import foreign as verdict_foreign
from kvhost.verdict.foreign import judge_foreign
from kvhost.verdict.foreign_evidence import ForeignEvidence
from kvhost.verdict.types import Verdict
from tests.foreign_cases import ALL, Case, evidence_of, put

pytestmark = pytest.mark.verdict


def judged(case: Case) -> Verdict:
    evidence = evidence_of(case.base)
    case.edit(evidence)
    return judge_foreign(ForeignEvidence.model_validate(evidence))


@pytest.mark.parametrize("case", ALL, ids=lambda case: f"{case.base}: {case.name}")
def test_case(case: Case) -> None:
    found = judged(case)
    cause = found.causes[0].slug if found.causes and case.cause else None
    unmet = [(c.id, c.figure) for c in found.conditions if c.met is not True]
    assert (found.persisted, cause) == (case.persisted, case.cause), unmet


@pytest.mark.parametrize("gone", [rule.id for rule in verdict_foreign.RULES])
def test_without_any_one_condition_a_case_is_judged_wrongly(
    gone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = tuple(rule for rule in verdict_foreign.RULES if rule.id != gone)
    monkeypatch.setattr(verdict_foreign, "RULES", left)
    assert [case.name for case in ALL if judged(case).persisted != case.persisted]


FIELDS = ("requests_finished", "external_queries", "external_hits", "prefix_hits", "from_external")
MISSING = [
    *(f"requests.restored.after.vllm.{field}" for field in FIELDS),
    *(
        f"requests.{role}.{part}"
        for role, part in itertools.product(
            ("cold", "restored", "control"), ("before", "after", "after.vllm", "http_status")
        )
    ),
    "requests.restored.output_tokens",
    "requests.cold.usage_prompt_tokens",
    "requests.restored.after.cache.lookups",
    "restart",
]


@pytest.mark.parametrize("path", MISSING)
def test_a_missing_number_never_passes(path: str) -> None:
    case = Case("", "INCONCLUSIVE", None, put(path, None))
    assert judged(case).persisted == "INCONCLUSIVE"


def test_time_decides_nothing() -> None:
    slow = judged(Case("", "", None, put("requests.restored.ttft_s", 99.0)))
    assert (slow.persisted, slow.worth_it) == ("PASS", "no")
