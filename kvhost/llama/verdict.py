"""The judge of llama-server: were prompt tokens reused after its restart? Pure.

The server's own count of restored tokens is not looked at: it has told of a success after which
nothing was reused (llama.cpp#26676, #25913). What counts is that the same prompt is asked again and
its tokens are not computed. The order of judgement is that of kvhost/verdict/judge.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from kvhost.llama.evidence import LlamaEvidence, LlamaRequest, Role
from kvhost.verdict.facts import odd
from kvhost.verdict.rules import ask, fitting, persisted
from kvhost.verdict.types import Condition, Persisted, Thresholds, Verdict, Weight

Finding = tuple[float | int | str | None, str, bool | None]  # figure, threshold in words, met
Met = dict[str, bool | None]
#: steps whose failure is what the test is about, not a test that could not be made
RESULTS = frozenset({"the keeper restores", "the saved file", "the same request again", "clean up"})


class LlamaFacts:
    """Evidence with what the conditions ask for."""

    def __init__(self, evidence: LlamaEvidence) -> None:
        self.evidence = evidence
        self.tokens = evidence.config.prompt_tokens

    def request(self, role: Role) -> LlamaRequest | None:
        return self.evidence.requests.get(role)

    def answered(self, role: Role) -> bool | None:
        request = self.request(role)
        if request is None or (request.error is None and request.http_status is None):
            return None
        return request.error is None

    def least(self, limits: Thresholds) -> int:
        """Tokens that must be reused."""
        return math.ceil(limits.min_hit * self.tokens)

    def failed(self) -> str | None:
        return next((s.name for s in self.evidence.steps if not s.ok), None)

    def own(self, role: Role) -> tuple[int, int, int] | None:
        """Tokens of a request as its answer counts them: computed, reused, answered."""
        one = self.request(role)
        if one is None or one.prompt_n is None or one.cache_n is None or one.output_tokens is None:
            return None
        return one.prompt_n, one.cache_n, len(one.output_tokens)

    def foreign(self) -> int | None:
        """Tokens that the counters hold beside those of the test's requests, of both processes."""
        found = 0
        for roles in (("cold", "warm"), ("restored", "control")):
            shots, own = [], 0
            for role in roles:
                one, counts = self.request(role), self.own(role)
                if one is None or counts is None:
                    return None
                shots += [one.before, one.after]
                own += sum(counts)
            first, last = shots[0], shots[-1]
            if not (first and last and first.counters and last.counters):
                return None
            if any(shot is None or shot.process != first.process for shot in shots):
                return None
            grown = sum(
                after - before
                for (_, before), (_, after) in zip(first.counters, last.counters, strict=True)
            )
            found += abs(int(grown) - own)
        return found


@dataclass(frozen=True)
class LlamaRule:
    id: str
    question: str
    weight: Weight
    look: Callable[[LlamaFacts, Thresholds], Finding]
    order: Literal["first", "precondition", "normal"] = "normal"


def _done(facts: LlamaFacts, _: Thresholds) -> Finding:
    evidence, threshold = facts.evidence, "every step done"
    if evidence.refused is not None:
        return "refused", threshold, False
    if evidence.interrupted is not None:
        return f"interrupted by {evidence.interrupted}", threshold, False
    failed = [s.name for s in evidence.steps if not s.ok and s.name not in RESULTS]
    if failed:
        return f"failed: {failed[0]}", threshold, False
    runner = evidence.services.get("runner")
    happened = bool(runner and runner.restart and runner.restart.exit_code == 0)
    return "yes" if happened else "not restarted", threshold, happened


def _restarted(name: Literal["runner", "slots"]) -> Callable[[LlamaFacts, Thresholds], Finding]:
    def look(facts: LlamaFacts, _: Thresholds) -> Finding:
        threshold, service = "another process", facts.evidence.services.get(name)
        old = service.before if service else None
        new = service.after if service else None
        if old is None or new is None or old.proc is None or new.proc is None:
            return None, threshold, None
        figure = f"{old.proc.pid} -> {new.proc.pid}"
        if (strange := odd(old, new)) is not None:
            figure += f": {strange}"
        if old.proc != old.record or new.proc != new.record:
            return figure, threshold, None  # the record speaks of another process
        another = old.proc.boot_id == new.proc.boot_id and old.proc != new.proc
        listens = name != "runner" or bool(old.listens and new.listens)
        return figure, threshold, another and listens

    return look


def _same_prompt(facts: LlamaFacts, _: Thresholds) -> Finding:
    threshold = "same, control another"
    found = [facts.request(role) for role in ("cold", "warm", "restored", "control")]
    if None in found:
        return None, threshold, None
    digests = [one.prompt_digest for one in found if one]
    lengths = {one.prompt_tokens for one in found if one}
    fine = len(set(digests[:3])) == 1 and digests[3] != digests[0] and lengths == {facts.tokens}
    return "yes" if fine else "no", threshold, fine


def _alone(facts: LlamaFacts, _: Thresholds) -> Finding:
    figure = facts.foreign()
    return figure, "0 tokens of others", None if figure is None else figure == 0


def _cold_cold(facts: LlamaFacts, _: Thresholds) -> Finding:
    one = facts.request("cold")
    figure = one.cache_n if one else None
    return figure, "0 tokens", None if figure is None else figure == 0


def _saved(facts: LlamaFacts, _: Thresholds) -> Finding:
    threshold, saved = f">= {facts.tokens} tokens", facts.evidence.saved
    if saved is None:
        return None, threshold, None
    if saved.tokens is None:
        return "nothing", threshold, False
    return saved.tokens, threshold, saved.tokens >= facts.tokens


def _verified(facts: LlamaFacts, _: Thresholds) -> Finding:
    threshold, saved = "bytes, checksum, engine", facts.evidence.saved
    if saved is None or saved.file_bytes is None:
        return None, threshold, None
    fine = saved.file_bytes == saved.bytes and bool(saved.same_digest) and bool(saved.same_engine)
    return "as saved" if fine else "another", threshold, fine


def _restored_answered(facts: LlamaFacts, _: Thresholds) -> Finding:
    done = facts.answered("restored")
    return None if done is None else "yes" if done else "no", "an answer", done


def _reused(facts: LlamaFacts, limits: Thresholds) -> Finding:
    least = facts.least(limits)
    threshold, one = f">= {least} of {facts.tokens} tokens", facts.request("restored")
    figure = one.cache_n if one else None
    return figure, threshold, None if figure is None else figure >= least


def _computed(facts: LlamaFacts, limits: Thresholds) -> Finding:
    # the last token of a prompt is always computed: its likelihoods are asked for
    most = max(1, facts.tokens - facts.least(limits))
    threshold, one = f"<= {most} tokens", facts.request("restored")
    figure = one.prompt_n if one else None
    return figure, threshold, None if figure is None else figure <= most


def _adds_up(facts: LlamaFacts, _: Thresholds) -> Finding:
    threshold, one = f"{facts.tokens} together", facts.request("restored")
    if one is None or one.prompt_n is None or one.cache_n is None:
        return None, threshold, None
    figure = one.prompt_n + one.cache_n
    return figure, threshold, figure == facts.tokens


def _counted(facts: LlamaFacts, _: Thresholds) -> Finding:
    """The metrics page counts it too, in a process that had counted nothing before."""
    one = facts.request("restored")
    if one is None or one.cache_n is None or not (one.before and one.after):
        return None, "as the answer says", None
    before, after = one.before.counters, one.after.counters
    if before is None or after is None:
        return None, "as the answer says", None
    figure = int(after.cached_tokens - before.cached_tokens)
    return figure, f"{one.cache_n} as it says", figure == one.cache_n


def _gap(old: LlamaRequest | None, new: LlamaRequest | None) -> float | None:
    """How much less or more likely the first token of one answer is in the other, in nats."""
    if not (old and new and old.first_logprobs and new.first_logprobs):
        return None
    token = max(old.first_logprobs, key=lambda one: (old.first_logprobs or {})[one])
    if token not in new.first_logprobs:
        return math.inf
    return abs(old.first_logprobs[token] - new.first_logprobs[token])


def _same_answer(facts: LlamaFacts, limits: Thresholds) -> Finding:
    threshold = "every greedy token"
    before, warm, after = (facts.request(role) for role in ("cold", "warm", "restored"))
    if not (before and after and before.output_tokens and after.output_tokens):
        return None, threshold, None
    if len(before.output_tokens) != len(after.output_tokens):
        return "another length", threshold, False
    pairs = list(zip(before.output_tokens, after.output_tokens, strict=True))
    same = sum(a == b for a, b in pairs)
    figure = f"{same} of {len(pairs)}"
    if same == len(pairs):
        return figure, threshold, True if same == facts.evidence.config.max_tokens else None
    # a slot's own answer is computed one token at a time, the cold one in a batch
    if warm is not None and warm.output_tokens == after.output_tokens:
        return figure, "or the warm answer", True
    steady = warm is None or warm.output_tokens in (None, before.output_tokens)
    return figure, threshold, False if steady else None


def _first_token(facts: LlamaFacts, limits: Thresholds) -> Finding:
    threshold = f"<= {limits.max_gap} nats off"
    before, warm, after = (facts.request(role) for role in ("cold", "warm", "restored"))
    gap = _gap(before, after)
    if gap is None:
        return None, threshold, None
    figure = "not among the likeliest" if math.isinf(gap) else f"{gap:.4f}"
    if gap <= limits.max_gap:
        return figure, threshold, True
    again = _gap(before, warm)
    return figure, threshold, False if again is None or again <= limits.max_gap else None


def _control_answered(facts: LlamaFacts, _: Thresholds) -> Finding:
    done = facts.answered("control")
    return None if done is None else "yes" if done else "no", "an answer", done


def _control_misses(facts: LlamaFacts, _: Thresholds) -> Finding:
    one = facts.request("control")
    figure = one.cache_n if one else None
    return figure, "0 tokens", None if figure is None else figure == 0


def _given_back(facts: LlamaFacts, _: Thresholds) -> Finding:
    cleanup = facts.evidence.cleanup
    if cleanup is None:
        return None, "as it was", None
    fine = cleanup.erased and cleanup.given_back is not False
    words = "it was empty" if cleanup.given_back is None else "yes" if fine else "no"
    return words, "as it was", fine


RULES: tuple[LlamaRule, ...] = (
    LlamaRule("done", "every step done", "inconclusive", _done, "precondition"),
    LlamaRule(
        "restarted_runner", "runner restarted", "inconclusive", _restarted("runner"), "precondition"
    ),
    LlamaRule(
        "restarted_slots", "keeper restarted", "inconclusive", _restarted("slots"), "precondition"
    ),
    LlamaRule(
        "same_prompt", "the right prompts sent", "inconclusive", _same_prompt, "precondition"
    ),
    LlamaRule("alone", "nobody else asked", "inconclusive", _alone, "precondition"),
    LlamaRule("cold_cold", "cold request was cold", "inconclusive", _cold_cold, "precondition"),
    LlamaRule("saved", "slot saved before the end", "fail", _saved),
    LlamaRule("verified", "the file is as saved", "fail", _verified),
    LlamaRule("restored_answered", "answered after restart", "fail", _restored_answered),
    LlamaRule("reused", "prompt tokens reused", "fail", _reused),
    LlamaRule("computed", "prompt tokens computed", "fail", _computed),
    LlamaRule("adds_up", "both make up the prompt", "inconclusive", _adds_up),
    LlamaRule("counted", "reused, say the metrics", "inconclusive", _counted),
    LlamaRule("same_answer", "same answer", "fail", _same_answer, "first"),
    LlamaRule("first_token", "likelihood of 1st token", "fail", _first_token, "first"),
    LlamaRule("control_answered", "unseen prompt answered", "inconclusive", _control_answered),
    LlamaRule("control_misses", "unseen prompt missed", "fail", _control_misses),
    LlamaRule("given_back", "the slot is given back", "note", _given_back),
)


@dataclass(frozen=True)
class Row:
    slug: str
    title: str
    change: str
    applies: Callable[[LlamaFacts, Met], bool]


TABLE: tuple[Row, ...] = (
    Row(
        "wrong-kv-served",
        "The answer from the restored slot is another one: the KV is not that of this prompt.",
        "Take the saved slots away (slots.py forget) and report it with the model and the build: "
        "llama-server read a file whose checksum was right.",
        lambda f, m: m.get("same_answer") is False or m.get("first_token") is False,
    ),
    Row(
        "server-in-use",
        "The server is in use: the test restarts it, and was not made.",
        "kvhost verify --disrupt, when it may be disturbed.",
        lambda f, m: f.evidence.refused is not None,
    ),
    Row(
        "interrupted",
        "The test was interrupted.",
        "Run it again.",
        lambda f, m: f.evidence.interrupted is not None,
    ),
    Row(
        "not-alone",
        "Somebody else asked while the test ran.",
        "Run it again when nobody does.",
        lambda f, m: m.get("alone") is False,
    ),
    Row(
        "slots-not-saved",
        "Nothing was saved of the slot before llama-server ended.",
        "Look at the end of the runner's log: what runs before the stop says there why (a full "
        "drive, a request that did not end).",
        lambda f, m: m.get("done") is True and m.get("saved") is not True,
    ),
    Row(
        "slots-damaged",
        "The saved file is not as it was saved, so it was not given to llama-server.",
        "Look at the drive, and at who else holds the API key: it can write files by name "
        "(docs/llama.md).",
        lambda f, m: m.get("verified") is False,
    ),
    Row(
        "slots-not-restored",
        "The keeper of the slots did not restore in time.",
        "Look at its log (kvhost logs --service slots).",
        lambda f, m: m.get("done") is True and f.evidence.restored is not True,
    ),
    Row(
        "restored-not-reused",
        "The slot was restored, and the prompt was computed all the same.",
        "llama.cpp does so with models whose layers cannot go back to an earlier token "
        "(llama.cpp#26676, #25913): another model, or runner = 'vllm'.",
        lambda f, m: f.evidence.restored is True and m.get("reused") is False,
    ),
    Row(
        "unseen-prompt-hits",
        "A prompt that was never sent found tokens in a slot.",
        "The figures of this server cannot be trusted; report it with the build.",
        lambda f, m: m.get("control_misses") is False,
    ),
    Row(
        "request-failed",
        "A step of the test failed.",
        "The evidence names it; look at the runner's log (kvhost logs --service runner).",
        lambda f, m: f.failed() is not None and f.evidence.refused is None,
    ),
)
_AFTER = {
    "both": "after a restart of llama-server and of the keeper of its slots",
    "kill": "after both were killed",
}


def _summary(facts: LlamaFacts, judged: Persisted, found: list[Condition], why: str) -> str:
    event = facts.evidence.event
    if judged == "PASS":
        one = facts.request("restored")
        return (
            f"The cache survived: {_AFTER[event]} {one.cache_n if one else 0} of {facts.tokens} "
            "tokens were not computed again, with the same answer; an unseen prompt missed."
        )
    if judged == "FAIL":
        return f"The cache did not do its work ({event}): {why}"
    return f"The test cannot say whether the cache survived: {why}"


def judge_llama(evidence: LlamaEvidence, thresholds: Thresholds | None = None) -> Verdict:
    """The verdict on one run of the test. Pure: no clock, no files, no network."""
    limits, facts = thresholds or Thresholds(), LlamaFacts(evidence)
    found = ask(RULES, facts, limits)
    judged = persisted(RULES, found)
    causes = [] if judged == "PASS" else fitting(TABLE, facts, found)
    open_ = [c.question for c in found if c.weight != "note" and c.met is not True]
    why = causes[0].title if causes else open_[0] if open_ else ""
    times: dict[Role, float | None] = {}
    for role in ("cold", "warm", "restored", "control"):
        one = facts.request(role)
        times[role] = one.ttft_s if one else None
    worth: Literal["yes", "no", "unknown"] = "unknown"
    computed = [s for s in (times["cold"], times["control"]) if s is not None]
    restored = times["restored"]
    if computed and restored is not None:
        worth = "yes" if restored <= limits.worth_ratio * min(computed) else "no"
    return Verdict(
        event=evidence.event,
        persisted=judged,
        worth_it=worth,
        summary=_summary(facts, judged, found, why),
        ttft_cold_s=times["cold"],
        ttft_control_s=times["control"],
        ttft_warm_s=times["warm"],
        ttft_restored_s=restored,
        conditions=found,
        causes=causes,
        thresholds=limits,
    )
