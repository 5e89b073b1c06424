"""The judge of a server that kvhost did not install: did the KV survive the restart command?

Stricter where less can be known. PASS needs all of: the restart is proven by every sign there is,
vLLM counts the tokens as got from outside, the answer is the same, an unseen prompt misses, and
where the KV lay meanwhile was seen: files that lay unchanged and were read again, or L2 hits that
an LMCache server counted. The order of judgement is that of kvhost/verdict/judge.py. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from kvhost.verdict.foreign_causes import likely_causes
from kvhost.verdict.foreign_evidence import ForeignEvidence
from kvhost.verdict.foreign_facts import ForeignFacts
from kvhost.verdict.rules import ask, persisted
from kvhost.verdict.types import Condition, Persisted, Thresholds, Verdict, Weight

Figure = float | int | str | None
Finding = tuple[Figure, str, bool | None]  # figure, threshold in words, met


@dataclass(frozen=True)
class ForeignRule:
    """One condition. ``when``: asked only where the source it looks at was given."""

    id: str
    question: str
    weight: Weight
    look: Callable[[ForeignFacts, Thresholds], Finding]
    order: Literal["first", "precondition", "normal"] = "normal"
    when: Literal["always", "storage", "cache"] = "always"


def _done(facts: ForeignFacts, _: Thresholds) -> Finding:
    evidence = facts.evidence
    if evidence.refused is not None:
        return "refused", "every step done", False
    if evidence.interrupted is not None:
        return f"interrupted by {evidence.interrupted}", "every step done", False
    failed = [s.name for s in evidence.steps if not s.ok and s.name not in facts.RESULTS]
    if failed:
        return f"failed: {failed[0]}", "every step done", False
    done = evidence.restart is not None and evidence.restart.exit_code == 0
    return ("yes" if done else "not restarted"), "every step done", done


def _restarted(facts: ForeignFacts, _: Thresholds) -> Finding:
    signs = facts.restart_signs()
    words = ", ".join(f"{k} {'other' if v else 'the same'}" for k, v in signs.items())
    threshold = "other process, all signs"
    if not facts.provable(signs):
        return words or None, threshold, None
    if all(signs.values()):
        return words, threshold, True
    # vLLM's own start time decides; what else differs may be a proxy, which proves nothing
    unclear = any(signs.values()) and signs.get("start time") is not False
    return words, threshold, None if unclear else False


def _prompt_long(facts: ForeignFacts, limits: Thresholds) -> Finding:
    threshold = f">= {limits.min_chunks} whole chunks"
    if facts.chunks is None:
        return None, threshold, None
    return facts.chunks, threshold, facts.chunks >= limits.min_chunks


def _same_prompt(facts: ForeignFacts, _: Thresholds) -> Finding:
    threshold = "same, control another"
    cold, again = facts.request("cold"), facts.request("restored")
    warm, control = facts.request("warm"), facts.request("control")
    if cold is None or again is None or control is None:
        return None, threshold, None
    sent = [r for r in (cold, warm, again) if r is not None]
    counts = [r.usage_prompt_tokens for r in sent if r.error is None]
    same = all(r.prompt_digest == cold.prompt_digest for r in sent)
    if not same or control.prompt_digest == cold.prompt_digest or len({*counts} - {None}) > 1:
        return "no", threshold, False
    return (None, threshold, None) if None in counts else ("yes", threshold, True)


def _counters(facts: ForeignFacts, _: Thresholds) -> Finding:
    figure = facts.resets()
    return figure, "0 lost, 0 fell", None if figure is None else figure == 0


def _alone(facts: ForeignFacts, _: Thresholds) -> Finding:
    figure = facts.foreign_requests()
    return figure, "0 foreign requests", None if figure is None else figure == 0


def _nothing_found(facts: ForeignFacts, role: str) -> Finding:
    request = facts.request(role)
    figures = [facts.vllm(role, f"{side}_hits") for side in ("external", "prefix")]
    if facts.evidence.cache_metrics:
        figures.append(facts.cache(role, "hit_tokens"))
    known = [figure for figure in figures if figure is not None]
    if request is None or not facts.answered(role) or len(known) < len(figures):
        return None, "0 cached tokens", None
    figure = max([*known, request.usage_cached_tokens or 0])
    return figure, "0 cached tokens", figure == 0


def _cold_cold(facts: ForeignFacts, _: Thresholds) -> Finding:
    return _nothing_found(facts, "cold")


def _restored_answered(facts: ForeignFacts, _: Thresholds) -> Finding:
    done = facts.answered("restored")
    if done is False and facts.answered("control") is not True:
        return "no", "an answer", None  # the server answers nothing: no matter of the cache
    return None if done is None else "yes" if done else "no", "an answer", done


def _need(facts: ForeignFacts, limits: Thresholds) -> tuple[float, str]:
    need = limits.min_hit * (facts.aligned or 0)
    return need, f">= {need:.0f} of {facts.aligned or 0} tokens"


def _asked(facts: ForeignFacts, _: Thresholds) -> Finding:
    rises = [facts.vllm(role, "external_queries") for role in ("restored", "control")]
    known = [rise for rise in rises if rise is not None]
    threshold = f">= {facts.aligned or 0} tokens, each time"
    if len(known) < len(rises) or facts.aligned is None:
        return None, threshold, None
    return min(known), threshold, min(known) >= facts.aligned


def _external_hits(facts: ForeignFacts, limits: Thresholds) -> Finding:
    need, threshold = _need(facts, limits)
    figure, own = facts.vllm("restored", "external_hits"), facts.vllm("restored", "prefix_hits")
    if figure is None or facts.aligned is None:
        return figure, threshold, None
    if figure < need and own and own + figure >= need:
        return figure, threshold, None  # the engine's own memory explains it
    return figure, threshold, figure >= need


def _engine_zero(facts: ForeignFacts, _: Thresholds) -> Finding:
    figure = facts.vllm("restored", "prefix_hits")
    return figure, "0 tokens", None if figure is None else figure == 0


def _by_source(facts: ForeignFacts, _: Thresholds) -> Finding:
    """vLLM counts hits twice, by look-up and by where a prompt's tokens came from."""
    hits, source = facts.vllm("restored", "external_hits"), facts.vllm("restored", "from_external")
    if hits is None or source is None:
        return source, "as counted", None
    return source, f"{hits:.0f} as counted", source == hits


def _cached_agrees(facts: ForeignFacts, _: Thresholds) -> Finding:
    request = facts.request("restored")
    figure = request.usage_cached_tokens if request else None
    own, external = facts.vllm("restored", "prefix_hits"), facts.vllm("restored", "external_hits")
    if figure is None or own is None or external is None:
        return figure, "as counted", None
    return figure, f"{own + external:.0f} as counted", figure == own + external


def _same_answer(facts: ForeignFacts, _: Thresholds) -> Finding:
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
        return figure, threshold, True if same == facts.evidence.config.max_tokens else None
    steady = warm is None or warm.output_tokens in (None, before.output_tokens)
    return figure, threshold, False if steady else None


def _control_misses(facts: ForeignFacts, _: Thresholds) -> Finding:
    return _nothing_found(facts, "control")


def _written(facts: ForeignFacts, _: Thresholds) -> Finding:
    written = facts.evidence.written
    threshold = ">= 1 file, at rest"
    if written is None:
        return None, threshold, None
    whole = written.new_files > 0 and written.new_bytes > 0 and written.at_rest
    return written.new_files, threshold, whole and not written.temporary_files


def _untouched(facts: ForeignFacts, limits: Thresholds) -> Finding:
    request, written = facts.request("restored"), facts.evidence.written
    need = math.ceil(limits.min_hit * written.new_files) if written else 0
    threshold = f">= {need} files"
    if request is None or request.before is None or request.before.own_files is None or not need:
        return None, threshold, None
    return request.before.own_files, threshold, request.before.own_files >= need


def _dropped(facts: ForeignFacts, limits: Thresholds) -> Finding:
    cache, written = facts.evidence.page_cache, facts.evidence.written
    threshold = f"<= {limits.max_resident:.0%} of the pages"
    if cache is None or written is None or not cache.pages or cache.files < written.new_files:
        return None, threshold, None
    share = cache.resident_after / cache.pages
    return f"{cache.resident_after} of {cache.pages}", threshold, share <= limits.max_resident


def _read_again(facts: ForeignFacts, limits: Thresholds) -> Finding:
    """The files are in the page cache again."""
    threshold, share = f">= {limits.min_hit:.0%} of the pages", facts.read_share()
    if share is None:
        return None, threshold, None
    return f"{share:.0%}", threshold, True if share >= limits.min_hit else None


def _l2_hits(facts: ForeignFacts, limits: Thresholds) -> Finding:
    need, threshold = _need(facts, limits)
    figure = facts.cache("restored", "hit_l2_tokens")
    if figure is None or facts.aligned is None:
        return figure, threshold, None
    elsewhere = (facts.vllm("restored", "external_hits") or 0) >= need
    return figure, threshold, True if figure >= need else None if elsewhere else False


def _l1_zero(facts: ForeignFacts, _: Thresholds) -> Finding:
    figure = facts.cache("restored", "hit_l1_tokens")
    return figure, "0 tokens", None if figure is None else figure == 0


def _where(facts: ForeignFacts, limits: Thresholds) -> Finding:
    """Some memory that the command did not restart may have served: that must be ruled out."""
    threshold = "files read, or L2 hits"
    sides = []
    if facts.evidence.config.storage_dir is not None:
        looks = (_written, _untouched, _dropped, _read_again)
        sides.append(all(look(facts, limits)[2] for look in looks))
    if facts.evidence.cache_metrics:
        sides.append(bool(_l2_hits(facts, limits)[2]) and bool(_l1_zero(facts, limits)[2]))
    if not sides:
        return "not looked at", threshold, None
    return ("seen" if any(sides) else "not seen"), threshold, True if any(sides) else None


RULES: tuple[ForeignRule, ...] = (
    ForeignRule("done", "every step done", "inconclusive", _done, "precondition"),
    ForeignRule("restarted", "server restarted", "inconclusive", _restarted, "precondition"),
    ForeignRule("prompt_long", "prompt long enough", "inconclusive", _prompt_long, "precondition"),
    ForeignRule(
        "same_prompt", "the right prompts sent", "inconclusive", _same_prompt, "precondition"
    ),
    ForeignRule("counters", "counters can be trusted", "inconclusive", _counters, "precondition"),
    ForeignRule("alone", "nobody else asked", "inconclusive", _alone, "precondition"),
    ForeignRule("cold_cold", "cold request was cold", "inconclusive", _cold_cold, "precondition"),
    ForeignRule("restored_answered", "answered after restart", "fail", _restored_answered),
    ForeignRule("asked", "whole prompt asked for", "inconclusive", _asked),
    ForeignRule("external_hits", "from outside, says vLLM", "fail", _external_hits),
    ForeignRule("by_source", "and by tokens' source", "inconclusive", _by_source),
    ForeignRule("engine_zero", "from the engine's memory", "inconclusive", _engine_zero),
    ForeignRule("cached_agrees", "cached, says the response", "inconclusive", _cached_agrees),
    ForeignRule("same_answer", "same answer", "fail", _same_answer, "first"),
    ForeignRule("control_misses", "unseen prompt missed", "fail", _control_misses),
    ForeignRule("written", "files written", "inconclusive", _written, when="storage"),
    ForeignRule("untouched", "files still as written", "inconclusive", _untouched, when="storage"),
    ForeignRule("dropped", "files out of page cache", "inconclusive", _dropped, when="storage"),
    ForeignRule("read_again", "files read again", "inconclusive", _read_again, when="storage"),
    ForeignRule("l2_hits", "from L2, says the cache", "fail", _l2_hits, when="cache"),
    ForeignRule("l1_zero", "from L1, says the cache", "inconclusive", _l1_zero, when="cache"),
    ForeignRule("where", "where it lay was seen", "inconclusive", _where),
)


def rules_of(evidence: ForeignEvidence) -> list[ForeignRule]:
    """The conditions that apply to what was given."""
    given = {"always"}
    given |= {"storage"} if evidence.config.storage_dir is not None else set()
    given |= {"cache"} if evidence.cache_metrics else set()
    return [rule for rule in RULES if rule.when in given]


def _summary(facts: ForeignFacts, persisted: Persisted, found: list[Condition], why: str) -> str:
    if persisted == "PASS":
        tokens = facts.vllm("restored", "external_hits") or 0
        return (
            f"The KV survived the restart command: {tokens:.0f} of {facts.aligned} tokens came "
            "from outside of vLLM, from where it was seen to lie, with the same answer; an unseen "
            "prompt missed."
        )
    missing = [c.question for c in found if c.met is None]
    if persisted == "FAIL":
        return f"The KV did not survive the restart command: {why}"
    said = f" Not known: {', '.join(missing)}." if missing and facts.answered("restored") else ""
    return f"The test cannot say whether the KV survived: {why}{said}"


def judge_foreign(evidence: ForeignEvidence, thresholds: Thresholds | None = None) -> Verdict:
    """The verdict on one restart of a server of others. Pure: no clock, no files, no network."""
    limits = thresholds or Thresholds()
    facts = ForeignFacts(evidence)
    rules = rules_of(evidence)
    found = ask(rules, facts, limits)
    judged = persisted(rules, found)
    causes = [] if judged == "PASS" else likely_causes(facts, found)
    open_ = [c.question for c in found if c.met is not True]
    why = causes[0].title if causes else open_[0] if open_ else ""
    cold, control, restored = (facts.ttft(role) for role in ("cold", "control", "restored"))
    computed = [seconds for seconds in (cold, control) if seconds is not None]
    worth: Literal["yes", "no", "unknown"] = "unknown"
    if computed and restored is not None:
        worth = "yes" if restored <= limits.worth_ratio * min(computed) else "no"
    return Verdict(
        event="command",
        persisted=judged,
        worth_it=worth,
        summary=_summary(facts, judged, found, why),
        ttft_cold_s=cold,
        ttft_control_s=control,
        ttft_warm_s=facts.ttft("warm"),
        ttft_restored_s=restored,
        conditions=found,
        causes=causes,
        thresholds=limits,
    )
