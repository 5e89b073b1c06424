"""The judge: did the KV cache survive what happened? A pure function of the evidence.

Order of judgement, first match wins:
1. an answer after the event differs from the one before: FAIL, the worst of all;
2. a precondition is not met or unknown (not restarted, somebody else asked, ...): INCONCLUSIVE;
3. a condition of weight "fail" is not met: FAIL;
4. any condition but a note is not met or unknown: INCONCLUSIVE;
5. PASS.
The conditions themselves are in verdict_looks.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from kvhost.verdict import looks as look
from kvhost.verdict.causes import likely_causes
from kvhost.verdict.evidence import EVENTS, Event, Evidence
from kvhost.verdict.facts import Facts
from kvhost.verdict.rules import ask, persisted
from kvhost.verdict.types import Condition, Persisted, Thresholds, Verdict, Weight

_EVERY = frozenset(EVENTS)
_RUNNER, _CACHE, _KILL, _REBOOT = (
    frozenset[Event]({event}) for event in ("runner", "cache", "kill", "reboot")
)
_FROM_L2 = _EVERY - _RUNNER


@dataclass(frozen=True)
class Rule:
    """One condition of the verdict, asked of evidence of these events and from this version on."""

    id: str
    question: str
    weight: Weight
    look: Callable[[Facts, Thresholds], look.Finding]
    order: Literal["first", "precondition", "normal"] = "normal"
    events: frozenset[Event] = _EVERY
    since: int = 1
    server: bool = False
    """It is about the cache server."""

    def asked(self, evidence: Evidence) -> bool:
        version = int(evidence.schema_.rpartition("/")[2])
        event, native = evidence.event, evidence.config.native
        # with the runner all memory of the cache is gone, where vLLM keeps it itself
        event = "both" if native and event == "runner" else event
        return event in self.events and version >= self.since and not (self.server and native)


RULES: tuple[Rule, ...] = (
    Rule("agrees", "evidence agrees", "inconclusive", look.agrees, "precondition"),
    Rule(
        "restarted_cache",
        "cache server restarted",
        "inconclusive",
        look.restarted("cache"),
        "precondition",
        server=True,
    ),
    Rule(
        "restarted_runner",
        "runner restarted",
        "inconclusive",
        look.restarted("runner"),
        "precondition",
    ),
    Rule("rebooted", "host rebooted", "inconclusive", look.rebooted, "precondition", _REBOOT),
    Rule("prompt_long", "prompt long enough", "inconclusive", look.prompt_long, "precondition"),
    Rule("same_prompt", "the right prompts sent", "inconclusive", look.same_prompt, "precondition"),
    Rule("counters", "counters can be trusted", "inconclusive", look.counters, "precondition"),
    Rule(
        "alone_runner",
        "nobody else at the runner",
        "inconclusive",
        look.alone_runner,
        "precondition",
    ),
    Rule(
        "alone_cache",
        "nobody else at the cache",
        "inconclusive",
        look.alone_cache,
        "precondition",
        server=True,
    ),
    Rule("cold_cold", "cold request was cold", "inconclusive", look.cold_cold, "precondition"),
    Rule("written", "in L2 before the restart", "inconclusive", look.written),
    Rule("killed_midway", "killed in a write", "inconclusive", look.killed_midway, events=_KILL),
    Rule("dropped", "files out of page cache", "inconclusive", look.dropped, events=_FROM_L2),
    Rule("untouched", "files still as written", "inconclusive", look.untouched),
    Rule("registered", "engine registered again", "fail", look.registered, events=_CACHE),
    Rule("restored_answered", "answered after restart", "fail", look.restored_answered),
    Rule("asked", "whole prompt asked for", "inconclusive", look.asked),
    Rule("l2_hits", "from L2, says the cache", "fail", look.l2_hits, events=_FROM_L2),
    Rule("l1_zero", "from L1, says the cache", "inconclusive", look.l1_zero, events=_FROM_L2),
    Rule("cache_hits", "from L1 or L2", "fail", look.cache_hits, events=_RUNNER),
    Rule("external_hits", "from outside, says vLLM", "fail", look.external_hits),
    Rule("engine_zero", "from the engine's memory", "inconclusive", look.engine_zero),
    Rule("cached_agrees", "cached, says the response", "inconclusive", look.cached_agrees),
    Rule("same_answer", "same answer", "fail", look.same_answer, "first"),
    Rule("first_token", "likelihood of 1st token", "fail", look.first_token, "first", since=2),
    Rule("cut_hits", "killed prompt, from L2", "fail", look.cut_hits, events=_KILL),
    Rule("cut_answer", "killed prompt, answer", "fail", look.cut_answer, "first", _KILL),
    Rule("no_rewriting", "nothing written anew", "fail", look.no_rewriting),
    Rule("control_answered", "unseen prompt answered", "inconclusive", look.control_answered),
    Rule("control_misses", "unseen prompt missed", "fail", look.control_misses),
    Rule("half_hits", "only the shared half hit", "fail", look.half_hits, since=2),
    Rule(
        "moved_misses",
        "moved files are missed",
        "fail",
        look.moved_misses,
        events=_FROM_L2,
        since=2,
    ),
    Rule(
        "foreign_unread",
        "other namespace not read",
        "inconclusive",
        look.foreign_unread,
        events=_FROM_L2,
        since=2,
    ),
    Rule("reads_seen", "reads of process / drive", "note", look.reads_seen, events=_FROM_L2),
)


_AFTER: dict[Event, str] = {
    "runner": "after a restart of the runner",
    "cache": "after a restart of the cache server",
    "both": "after a restart of both services",
    "kill": "after both services were killed",
    "other": "in a second pair of services",
    "reboot": "after a reboot",
}


def _ttft(facts: Facts, role: str) -> float | None:
    request = facts.request(role)
    return request.ttft_s if request else None


def _summary(facts: Facts, persisted: Persisted, found: list[Condition], causes: list[str]) -> str:
    if persisted == "PASS":
        by_id = {c.id: c for c in found}
        event = facts.evidence.event
        source = "L1 or L2" if event == "runner" and not facts.native else "L2"
        tokens = facts.vllm("restored", "external_hits")
        after = "after the runner was killed" if facts.native and event == "kill" else _AFTER[event]
        text = (
            f"The cache survived: {after} {tokens:.0f} of {facts.aligned}"
            f" tokens came from {source}, with the same answer; an unseen prompt missed."
        )
        reads = by_id.get("reads_seen")
        return text if reads is None or reads.met else text + " The reads were not observed."
    open_ = [c for c in found if c.weight != "note" and c.met is not True]
    what = causes[0] if causes else (open_[0].question if open_ else "")
    if not causes and open_ and open_[0].id == "agrees":
        what = f"its evidence contradicts itself: {open_[0].figure}"
    if persisted == "FAIL":
        return f"The cache did not do its work ({facts.evidence.event}): {what}"
    return f"The test cannot say whether the cache survived: {what}"


def judge(evidence: Evidence, thresholds: Thresholds | None = None) -> Verdict:
    """The verdict on one run of the test. Pure: no clock, no files, no network."""
    limits = thresholds or Thresholds()
    facts = Facts(evidence)
    rules = tuple(rule for rule in RULES if rule.asked(evidence))
    found = ask(rules, facts, limits)
    judged = persisted(rules, found)
    causes = [] if judged == "PASS" else likely_causes(facts, found)
    cold, control, restored = (_ttft(facts, role) for role in ("cold", "control", "restored"))
    worth: Literal["yes", "no", "unknown"] = "unknown"
    computed = [seconds for seconds in (cold, control) if seconds is not None]
    if computed and restored is not None:
        # the first request of a process is slower; the control, too, was computed in whole
        worth = "yes" if restored <= limits.worth_ratio * min(computed) else "no"
    return Verdict(
        event=evidence.event,
        persisted=judged,
        worth_it=worth,
        summary=_summary(facts, judged, found, [cause.title for cause in causes]),
        ttft_cold_s=cold,
        ttft_control_s=control,
        ttft_warm_s=_ttft(facts, "warm"),
        ttft_restored_s=restored,
        conditions=found,
        causes=causes,
        thresholds=limits,
    )
