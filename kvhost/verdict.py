"""The judge: did the KV cache survive the restart? A pure function of the evidence.

Order of judgement, first match wins:
1. the answer after the restart differs from the one before: FAIL, the worst of all;
2. a precondition is not met or unknown (not restarted, somebody else asked, ...): INCONCLUSIVE;
3. a condition of weight "fail" is not met: FAIL;
4. any condition but a note is not met or unknown: INCONCLUSIVE;
5. PASS.
A condition that cannot tell, because the figures contradict each other or are missing, is None.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from kvhost.evidence_model import Evidence
from kvhost.verdict_agrees import contradiction
from kvhost.verdict_causes import likely_causes
from kvhost.verdict_facts import Facts
from kvhost.verdict_types import Condition, Persisted, Thresholds, Verdict, Weight

Figure = float | int | str | None
Finding = tuple[Figure, str, bool | None]  # figure, threshold in words, met


@dataclass(frozen=True)
class Rule:
    """One condition of the verdict."""

    id: str
    question: str
    weight: Weight
    look: Callable[[Facts, Thresholds], Finding]
    order: Literal["first", "precondition", "normal"] = "normal"


def _at_most(figure: float | None, limit: float) -> bool | None:
    return None if figure is None else figure <= limit


def _agrees(facts: Facts, _: Thresholds) -> Finding:
    found = contradiction(facts)
    return found or "none", "no contradiction", found is None


def _restarted(name: str) -> Callable[[Facts, Thresholds], Finding]:
    def look(facts: Facts, _: Thresholds) -> Finding:
        service = facts.evidence.services.get(name)
        pids = []
        for side in (service.before, service.after) if service else ():
            proc = side.proc if side else None
            pids.append(str(proc.pid) if proc else "?")
        threshold = "another process"
        return " -> ".join(pids) or None, threshold, facts.restarted(name)

    return look


def _prompt_long(facts: Facts, limits: Thresholds) -> Finding:
    return facts.chunks, f">= {limits.min_chunks} whole chunks", facts.chunks >= limits.min_chunks


def _same_prompt(facts: Facts, _: Thresholds) -> Finding:
    threshold = "same, control another"
    cold, again = facts.request("cold"), facts.request("restored")
    if cold is None or again is None:
        return None, threshold, None
    warm, control = facts.request("warm"), facts.request("control")
    counts = [r.usage_prompt_tokens for r in (cold, warm, again, control) if r and not r.error]
    lengths = all(n in (None, facts.evidence.config.prompt_tokens) for n in counts)
    same = all(r.prompt_digest == cold.prompt_digest for r in (warm, again) if r)
    apart = control is None or control.prompt_digest != cold.prompt_digest
    if not (same and apart and lengths):
        return "no", threshold, False
    return (None, threshold, None) if None in counts else ("yes", threshold, True)


def _counters(facts: Facts, _: Thresholds) -> Finding:
    figure = facts.resets()
    return figure, "0 lost, 0 fell", _at_most(figure, 0)


def _alone_runner(facts: Facts, _: Thresholds) -> Finding:
    figure = facts.foreign_requests()
    return figure, "0 foreign requests", _at_most(figure, 0)


def _alone_cache(facts: Facts, _: Thresholds) -> Finding:
    figure = facts.foreign_lookups()
    return figure, "0 foreign look-ups", _at_most(figure, 0)


def _cold_cold(facts: Facts, _: Thresholds) -> Finding:
    request = facts.request("cold")
    figures = [
        facts.cache("cold", "hit_tokens"),
        facts.vllm("cold", "external_hits"),
        facts.vllm("cold", "prefix_hits"),
    ]
    if not facts.answered("cold") or request is None or None in figures:
        return None, "0 cached tokens", None
    figure = max([*(f for f in figures if f is not None), request.usage_cached_tokens or 0])
    return figure, "0 cached tokens", figure == 0


def _written(facts: Facts, _: Thresholds) -> Finding:
    written = facts.evidence.written
    if written is None:
        return None, "all files, none temporary", None
    need = written.expected_files
    whole = written.new_files >= need > 0 and not written.temporary_files and not written.timed_out
    return written.new_files, f">= {need} files, 0 temporary", whole


def _dropped(facts: Facts, limits: Thresholds) -> Finding:
    cache, written = facts.evidence.page_cache, facts.evidence.written
    threshold = f"<= {limits.max_resident:.0%} of the pages"
    if cache is None or written is None or not cache.pages or cache.files < written.expected_files:
        return None, threshold, None
    share = cache.resident_after / cache.pages
    return f"{cache.resident_after} of {cache.pages}", threshold, share <= limits.max_resident


def _untouched(facts: Facts, limits: Thresholds) -> Finding:
    request, written = facts.request("restored"), facts.evidence.written
    need = (
        math.ceil(limits.min_hit * written.expected_files) if written and written.new_files else 0
    )
    threshold = f">= {need} files"
    if request is None or request.before is None or not need:
        return None, threshold, None
    return request.before.own_files, threshold, request.before.own_files >= need


def _need(facts: Facts, limits: Thresholds) -> float:
    return limits.min_hit * facts.aligned


def _from_engine(facts: Facts, limits: Thresholds) -> bool:
    """Whether the engine's own memory explains what the external cache did not serve."""
    own, external = facts.vllm("restored", "prefix_hits"), facts.vllm("restored", "external_hits")
    return bool(own) and (own or 0) + (external or 0) >= _need(facts, limits)


def _l2_hits(facts: Facts, limits: Thresholds) -> Finding:
    need = _need(facts, limits)
    threshold = f">= {need:.0f} of {facts.aligned} tokens"
    figure = facts.cache("restored", "hit_l2_tokens")
    if figure is None or figure >= need:
        return figure, threshold, None if figure is None else True
    external = facts.vllm("restored", "external_hits")
    elsewhere = (external or 0) >= need or _from_engine(facts, limits)
    return figure, threshold, None if elsewhere else False


def _l1_zero(facts: Facts, _: Thresholds) -> Finding:
    figure = facts.cache("restored", "hit_l1_tokens")
    return figure, "0 tokens", _at_most(figure, 0)


def _external_hits(facts: Facts, limits: Thresholds) -> Finding:
    need = _need(facts, limits)
    threshold = f">= {need:.0f} of {facts.aligned} tokens"
    figure = facts.vllm("restored", "external_hits")
    if figure is None or (figure < need and _from_engine(facts, limits)):
        return figure, threshold, None
    return figure, threshold, figure >= need


def _engine_zero(facts: Facts, _: Thresholds) -> Finding:
    figure = facts.vllm("restored", "prefix_hits")
    return figure, "0 tokens", _at_most(figure, 0)


def _cached_agrees(facts: Facts, _: Thresholds) -> Finding:
    request = facts.request("restored")
    figure = request.usage_cached_tokens if request else None
    own, external = facts.vllm("restored", "prefix_hits"), facts.vllm("restored", "external_hits")
    if figure is None or own is None or external is None:
        return figure, "as counted", None
    return figure, f"{own + external:.0f} as counted", figure == own + external


def _restored_answered(facts: Facts, _: Thresholds) -> Finding:
    done = facts.answered("restored")
    if done is False and facts.answered("control") is not True:
        return "no", "an answer", None  # the server answers nothing: no matter of the cache
    return None if done is None else "yes" if done else "no", "an answer", done


def _same_answer(facts: Facts, _: Thresholds) -> Finding:
    threshold = "every greedy token"
    before, warm, after = (facts.request(role) for role in ("cold", "warm", "restored"))
    if not before or not after or not before.output_tokens or not after.output_tokens:
        return None, threshold, None
    if len(before.output_tokens) != len(after.output_tokens):
        return "another length", threshold, False
    pairs = list(zip(before.output_tokens, after.output_tokens, strict=True))
    same = sum(a == b for a, b in pairs)
    figure = f"{same} of {len(pairs)}"
    if same == len(pairs):
        # evidence.py asks with ignore_eos: fewer tokens are not the whole answer
        return figure, threshold, True if same == facts.evidence.config.max_tokens else None
    steady = warm is None or warm.output_tokens in (None, before.output_tokens)
    return figure, threshold, False if steady else None


def _no_rewriting(facts: Facts, limits: Thresholds) -> Finding:
    """As many new files as min_hit allows chunks to be missing, and no changed one."""
    config, request = facts.evidence.config, facts.request("restored")
    missing = facts.chunks - math.ceil(limits.min_hit * facts.chunks)
    threshold = f"<= {missing * config.files_per_chunk} new, 0 changed"
    if request is None or request.files is None:
        return None, threshold, None
    new, changed = request.files.new, request.files.changed
    kept = new <= missing * config.files_per_chunk and changed == 0
    return f"{new} new, {changed} changed", threshold, kept


def _control_answered(facts: Facts, _: Thresholds) -> Finding:
    done = facts.answered("control")
    return None if done is None else "yes" if done else "no", "an answer", done


def _asked(facts: Facts, _: Thresholds) -> Finding:
    """A miss says nothing where the cache was not asked for the whole prompt; nor does a hit."""
    rises = [
        rise
        for role in ("restored", "control")
        for rise in (facts.vllm(role, "external_queries"), facts.cache(role, "requested_tokens"))
    ]
    threshold = f">= {facts.aligned} tokens, each time"
    known = [rise for rise in rises if rise is not None]
    if len(known) < len(rises):
        return None, threshold, None
    return min(known), threshold, min(known) >= facts.aligned


def _control_misses(facts: Facts, _: Thresholds) -> Finding:
    request = facts.request("control")
    figures = [facts.cache("control", "hit_tokens"), facts.vllm("control", "external_hits")]
    if request is None or None in figures:
        return None, "0 cached tokens", None
    figure = max([*(f for f in figures if f is not None), request.usage_cached_tokens or 0])
    return figure, "0 cached tokens", figure == 0


def _reads_seen(facts: Facts, limits: Thresholds) -> Finding:
    written = facts.evidence.written
    by_process, by_drive = facts.reads()
    need = limits.min_hit * (written.new_bytes if written else 0)
    threshold = f">= {need / 2**20:.0f} MiB by either"
    if (by_process is None and by_drive is None) or not need:
        return "not observed", threshold, None
    figure = " / ".join("?" if b is None else f"{b / 2**20:.0f}" for b in (by_process, by_drive))
    seen = max(by_process or 0, by_drive or 0) >= need
    return f"{figure} MiB" if seen else f"not observed ({figure} MiB)", threshold, seen


RULES: tuple[Rule, ...] = (
    Rule("agrees", "evidence agrees", "inconclusive", _agrees, "precondition"),
    Rule(
        "restarted_cache",
        "cache server restarted",
        "inconclusive",
        _restarted("cache"),
        "precondition",
    ),
    Rule(
        "restarted_runner",
        "runner restarted",
        "inconclusive",
        _restarted("runner"),
        "precondition",
    ),
    Rule("prompt_long", "prompt long enough", "inconclusive", _prompt_long, "precondition"),
    Rule("same_prompt", "the right prompts sent", "inconclusive", _same_prompt, "precondition"),
    Rule("counters", "counters can be trusted", "inconclusive", _counters, "precondition"),
    Rule(
        "alone_runner",
        "nobody else at the runner",
        "inconclusive",
        _alone_runner,
        "precondition",
    ),
    Rule("alone_cache", "nobody else at the cache", "inconclusive", _alone_cache, "precondition"),
    Rule("cold_cold", "cold request was cold", "inconclusive", _cold_cold, "precondition"),
    Rule("written", "in L2 before the restart", "inconclusive", _written),
    Rule("dropped", "files out of page cache", "inconclusive", _dropped),
    Rule("untouched", "files still as written", "inconclusive", _untouched),
    Rule("restored_answered", "answered after restart", "fail", _restored_answered),
    Rule("asked", "whole prompt asked for", "inconclusive", _asked),
    Rule("l2_hits", "from L2, says the cache", "fail", _l2_hits),
    Rule("l1_zero", "from L1, says the cache", "inconclusive", _l1_zero),
    Rule("external_hits", "from outside, says vLLM", "fail", _external_hits),
    Rule("engine_zero", "from the engine's memory", "inconclusive", _engine_zero),
    Rule("cached_agrees", "cached, says the response", "inconclusive", _cached_agrees),
    Rule("same_answer", "same answer", "fail", _same_answer, "first"),
    Rule("no_rewriting", "nothing written anew", "fail", _no_rewriting),
    Rule("control_answered", "unseen prompt answered", "inconclusive", _control_answered),
    Rule("control_misses", "unseen prompt missed", "fail", _control_misses),
    Rule("reads_seen", "reads of process / drive", "note", _reads_seen),
)


def _persisted(rules: tuple[Rule, ...], found: list[Condition]) -> Persisted:
    by_order: list[tuple[str, Condition]] = [
        (rule.order, condition) for rule, condition in zip(rules, found, strict=True)
    ]
    if any(order == "first" and c.met is False for order, c in by_order):
        return "FAIL"
    if any(order == "precondition" and c.met is not True for order, c in by_order):
        return "INCONCLUSIVE"
    if any(c.weight == "fail" and c.met is False for c in found):
        return "FAIL"
    if any(c.weight != "note" and c.met is not True for c in found):
        return "INCONCLUSIVE"
    return "PASS"


def _ttft(facts: Facts, role: str) -> float | None:
    request = facts.request(role)
    return request.ttft_s if request else None


def _summary(facts: Facts, persisted: Persisted, found: list[Condition], causes: list[str]) -> str:
    if persisted == "PASS":
        by_id = {c.id: c for c in found}
        tokens = facts.cache("restored", "hit_l2_tokens")
        text = (
            f"The cache survived: after a restart of both services {tokens:.0f} of {facts.aligned}"
            " tokens came from L2, with the same answer; an unseen prompt missed."
        )
        reads = by_id.get("reads_seen")
        return text if reads is None or reads.met else text + " The reads were not observed."
    open_ = [c for c in found if c.weight != "note" and c.met is not True]
    what = causes[0] if causes else (open_[0].question if open_ else "")
    if not causes and open_ and open_[0].id == "agrees":
        what = f"its evidence contradicts itself: {open_[0].figure}"
    if persisted == "FAIL":
        return f"The cache did not do its work after the restart: {what}"
    return f"The test cannot say whether the cache survived: {what}"


def judge(evidence: Evidence, thresholds: Thresholds | None = None) -> Verdict:
    """The verdict on one run of the test. Pure: no clock, no files, no network."""
    limits = thresholds or Thresholds()
    facts = Facts(evidence)
    found: list[Condition] = []
    for rule in RULES:
        figure, threshold, met = rule.look(facts, limits)
        found.append(
            Condition(
                id=rule.id,
                question=rule.question,
                figure=figure,
                threshold=threshold,
                met=met,
                weight=rule.weight,
            )
        )
    persisted = _persisted(RULES, found)
    causes = [] if persisted == "PASS" else likely_causes(facts, found)
    cold, control, restored = (_ttft(facts, role) for role in ("cold", "control", "restored"))
    worth: Literal["yes", "no", "unknown"] = "unknown"
    computed = [seconds for seconds in (cold, control) if seconds is not None]
    if computed and restored is not None:
        # the first request of a process is slower; the control, too, was computed in whole
        worth = "yes" if restored <= limits.worth_ratio * min(computed) else "no"
    return Verdict(
        event=evidence.event,
        persisted=persisted,
        worth_it=worth,
        summary=_summary(facts, persisted, found, [cause.title for cause in causes]),
        ttft_cold_s=cold,
        ttft_control_s=control,
        ttft_warm_s=_ttft(facts, "warm"),
        ttft_restored_s=restored,
        conditions=found,
        causes=causes,
        thresholds=limits,
    )
