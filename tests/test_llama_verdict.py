"""The judge of llama-server, on what a real one gave (build 11434) and on edits of it."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from kvhost.llama.evidence import parse_llama
from kvhost.llama.verdict import RULES, judge_llama
from kvhost.reports.html import host_page
from kvhost.reports.kept import load_report, make_report, write_report
from kvhost.reports.views import SOURCES, event_views, load_hosts
from kvhost.verdict.types import Verdict

RECORDED = Path(__file__).parent / "fixtures" / "llama" / "both_and_kill.json"
Json = dict[str, Any]


def recorded() -> Json:
    loaded: Json = json.loads(RECORDED.read_text())
    return loaded


def judged(change: Callable[[Json], object] = lambda e: None, event: int = 0) -> Verdict:
    one = copy.deepcopy(recorded()["events"][event])
    change(one)
    text = json.dumps({"schema": recorded()["schema"], "events": [one]})
    return judge_llama(parse_llama(text)[0])


def met(verdict: Verdict, name: str) -> bool | None:
    return next(one.met for one in verdict.conditions if one.id == name)


@pytest.mark.parametrize("event, name", [(0, "both"), (1, "kill")])
def test_the_real_ones_pass(event: int, name: str) -> None:
    verdict = judged(event=event)
    assert (verdict.event, verdict.persisted, verdict.worth_it) == (name, "PASS", "yes")
    assert all(one.met for one in verdict.conditions)
    assert "1999 of 2000 tokens were not computed again" in verdict.summary


def request(role: str, **changes: Any) -> Callable[[Json], object]:
    return lambda e: e["requests"][role].update(changes)


def other_tokens(e: Json) -> None:
    tokens = e["requests"]["restored"]["output_tokens"]
    e["requests"]["restored"]["output_tokens"] = [tokens[0], *(t + 1 for t in tokens[1:])]


def first_less_likely(e: Json) -> None:
    told = e["requests"]["restored"]["first_logprobs"]
    likeliest = max(told, key=lambda one: told[one])
    told[likeliest] -= 1


def counted(role: str, side: str, field: str, more: float) -> Callable[[Json], object]:
    def change(e: Json) -> None:
        e["requests"][role][side]["counters"][field] += more

    return change


def same_process(name: str) -> Callable[[Json], object]:
    return lambda e: e["services"][name].update(after=e["services"][name]["before"])


def failed(name: str) -> Callable[[Json], object]:
    step = {"name": name, "ok": False, "seconds": 1.0, "error": "OSError: no"}
    return lambda e: e["steps"].append(step)


CASES: list[tuple[str, Callable[[Json], object], str, str | None]] = [
    # condition, edit, persisted, likely cause
    ("same_answer", other_tokens, "FAIL", "wrong-kv-served"),
    ("first_token", first_less_likely, "FAIL", "wrong-kv-served"),
    ("reused", request("restored", cache_n=0, prompt_n=2000), "FAIL", "restored-not-reused"),
    ("computed", request("restored", prompt_n=400, cache_n=1600), "FAIL", "restored-not-reused"),
    ("adds_up", request("restored", prompt_n=2), "INCONCLUSIVE", None),
    ("control_misses", request("control", cache_n=9, prompt_n=1991), "FAIL", "unseen-prompt-hits"),
    ("cold_cold", request("cold", cache_n=1, prompt_n=1999), "INCONCLUSIVE", None),
    ("counted", counted("restored", "after", "cached_tokens", 5), "INCONCLUSIVE", None),
    ("alone", counted("control", "after", "prompt_tokens", 5), "INCONCLUSIVE", "not-alone"),
    ("restarted_runner", same_process("runner"), "INCONCLUSIVE", None),
    ("restarted_slots", same_process("slots"), "INCONCLUSIVE", None),
    ("saved", lambda e: e["saved"].update(tokens=3), "FAIL", "slots-not-saved"),
    ("saved", lambda e: e.update(saved=None), "INCONCLUSIVE", "slots-not-saved"),
    ("verified", lambda e: e["saved"].update(same_digest=False), "FAIL", "slots-damaged"),
    ("verified", lambda e: e["saved"].update(same_engine=False), "FAIL", "slots-damaged"),
    ("verified", lambda e: e["saved"].update(file_bytes=7), "FAIL", "slots-damaged"),
    ("same_prompt", request("restored", prompt_digest="x"), "INCONCLUSIVE", None),
    ("done", failed("warm request"), "INCONCLUSIVE", "request-failed"),
    ("done", lambda e: e.update(interrupted="SIGTERM"), "INCONCLUSIVE", "interrupted"),
    (
        "done",
        lambda e: e.update(refused={"busy": 1, "foreign": 9, "own": 0}),
        "INCONCLUSIVE",
        "server-in-use",
    ),
    ("restored_answered", request("restored", error="HTTP 500"), "FAIL", None),
    ("control_answered", request("control", error="HTTP 500"), "INCONCLUSIVE", None),
]


@pytest.mark.parametrize("name, change, persisted, cause", CASES)
def test_one_thing_amiss_is_no_pass(
    name: str, change: Callable[[Json], object], persisted: str, cause: str | None
) -> None:
    verdict = judged(change)
    assert met(verdict, name) is not True
    assert verdict.persisted == persisted
    assert cause is None or cause in [one.slug for one in verdict.causes]


def test_every_condition_but_the_note_was_broken_once() -> None:
    assert {name for name, *_ in CASES} == {r.id for r in RULES if r.weight != "note"}


@pytest.mark.parametrize("role", ["cold", "warm", "restored", "control"])
def test_a_request_that_is_missing_never_passes(role: str) -> None:
    assert judged(lambda e: e["requests"].pop(role)).persisted != "PASS"


def test_the_warm_answer_may_stand_for_the_cold_one_and_nothing_else_may() -> None:
    def batched(e: Json) -> None:
        e["requests"]["cold"]["output_tokens"][-1] += 1

    assert judged(batched).persisted == "PASS"


def test_what_the_server_says_it_restored_is_not_looked_at() -> None:
    assert "n_restored" not in RECORDED.read_text()
    verdict = judged(request("restored", cache_n=0, prompt_n=2000))
    assert verdict.persisted == "FAIL"  # although the keeper said that it had restored


def test_time_decides_nothing_of_persisted() -> None:
    verdict = judged(request("restored", ttft_s=1000.0))
    assert (verdict.persisted, verdict.worth_it) == ("PASS", "no")


def test_evidence_of_another_form_is_refused() -> None:
    with pytest.raises(ValidationError):
        judged(lambda e: e.update(surprise=1))


def test_a_report_of_it_is_kept_read_and_shown(tmp_path: Path) -> None:
    found = parse_llama(RECORDED.read_text())
    results = [(judge_llama(one), one) for one in found]
    report = make_report("box", results, datetime(2026, 11, 30, tzinfo=UTC))
    path = write_report(tmp_path, report)
    assert load_report(path) == report and report.persisted == "PASS"
    both, _ = event_views(report)
    assert both.tokens["cold"] == {"computed": 2000}
    assert both.tokens["warm"] == {"computed": 1, "engine": 1999}
    assert both.tokens["restored"] == {"computed": 1, "slot": 1999}
    (view,) = load_hosts(tmp_path)
    page = host_page(view)
    assert "slot, from its file" in page and "2000 random tokens" in page and "chunks" not in page
    colours = (Path(__file__).parents[1] / "templates/report/base.html.j2").read_text()
    assert all(f"--{name}:" in colours and f'"{name}"' in colours for name in SOURCES)
