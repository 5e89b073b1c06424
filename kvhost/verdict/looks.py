"""The conditions of the verdict: each looks at one thing in the evidence and says what it found.

A condition that cannot tell, because the figures contradict each other or are missing, is None.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from kvhost.verdict.agrees import contradiction
from kvhost.verdict.evidence import Request
from kvhost.verdict.facts import Facts, odd
from kvhost.verdict.types import Thresholds

Figure = float | int | str | None
Finding = tuple[Figure, str, bool | None]  # figure, threshold in words, met


def at_most(figure: float | None, limit: float) -> bool | None:
    return None if figure is None else figure <= limit


def agrees(facts: Facts, _: Thresholds) -> Finding:
    found = contradiction(facts)
    return found or "none", "no contradiction", found is None


def restarted(name: str) -> Callable[[Facts, Thresholds], Finding]:
    def look(facts: Facts, _: Thresholds) -> Finding:
        service = facts.evidence.services.get(name)
        pids = []
        for side in (service.before, service.after) if service else ():
            proc = side.proc if side else None
            pids.append(str(proc.pid) if proc else "?")
        threshold = "another process" if name in facts.replaced else "the same process"
        figure = " -> ".join(pids) or None
        if service and service.after:
            strange = odd(service.before, service.after)
            if strange is None and facts.rebooted_between(name):
                strange = "another boot"
            figure = f"{figure}: {strange}" if strange else figure
        return figure, threshold, facts.replaced_as_expected(name)

    return look


def prompt_long(facts: Facts, limits: Thresholds) -> Finding:
    return facts.chunks, f">= {limits.min_chunks} whole chunks", facts.chunks >= limits.min_chunks


def same_prompt(facts: Facts, _: Thresholds) -> Finding:
    threshold = "same, control another"
    cold, again = facts.request("cold"), facts.request("restored")
    if cold is None or again is None:
        return None, threshold, None
    whole = facts.evidence.config.prompt_tokens
    answered = [r for r in facts.evidence.requests.values() if not r.error]
    lengths = all(
        r.usage_prompt_tokens in (None, whole if r.prompt_tokens is None else r.prompt_tokens)
        for r in answered
    )
    prompts = {role: r.prompt_digest for role, r in facts.evidence.requests.items()}
    pairs = [("warm", "cold"), ("restored", "cold"), ("moved", "moved_cold")]
    pairs += [("cut", "killed"), ("reference", "killed")]
    same = all(prompts[a] == prompts.get(b) for a, b in pairs if a in prompts)
    others = [prompts[r] for r in ("cold", "half", "half_cold", "moved_cold") if r in prompts]
    apart = len({*others, prompts.get("control")}) == len(others) + 1
    if not (same and apart and lengths):
        return "no", threshold, False
    unsaid = any(r.usage_prompt_tokens is None for r in answered)
    return (None, threshold, None) if unsaid else ("yes", threshold, True)


def counters(facts: Facts, _: Thresholds) -> Finding:
    figure = facts.resets()
    return figure, "0 lost, 0 fell", at_most(figure, 0)


def alone_runner(facts: Facts, _: Thresholds) -> Finding:
    figure = facts.foreign_requests()
    return figure, "0 foreign requests", at_most(figure, 0)


def alone_cache(facts: Facts, _: Thresholds) -> Finding:
    figure = facts.foreign_lookups()
    return figure, "0 foreign look-ups", at_most(figure, 0)


def cold_cold(facts: Facts, _: Thresholds) -> Finding:
    roles = [r for r in ("cold", "moved_cold", "half_cold") if r == "cold" or facts.request(r)]
    found = [any_hits(facts, role) if facts.answered(role) else None for role in roles]
    known = [figure for figure in found if figure is not None]
    if len(known) < len(found):
        return None, "0 cached tokens", None
    return max(known), "0 cached tokens", max(known) == 0


def any_hits(facts: Facts, role: str) -> float | None:
    """The most tokens that anybody says were found for a request; None where one cannot say."""
    request = facts.request(role)
    figures = [
        facts.cache(role, "hit_tokens"),
        facts.vllm(role, "external_hits"),
        facts.vllm(role, "prefix_hits"),
    ]
    if request is None or None in figures:
        return None
    return max([*(f for f in figures if f is not None), request.usage_cached_tokens or 0])


def written(facts: Facts, _: Thresholds) -> Finding:
    written = facts.evidence.written
    if written is None:
        return None, "all files, none temporary", None
    need = written.expected_files
    whole = written.new_files >= need > 0 and not written.temporary_files and not written.timed_out
    return written.new_files, f">= {need} files, 0 temporary", whole


def dropped(facts: Facts, limits: Thresholds) -> Finding:
    cache, written = facts.evidence.page_cache, facts.evidence.written
    threshold = f"<= {limits.max_resident:.0%} of the pages"
    if cache is None or written is None or not cache.pages or cache.files < written.expected_files:
        return None, threshold, None
    share = cache.resident_after / cache.pages
    return f"{cache.resident_after} of {cache.pages}", threshold, share <= limits.max_resident


def untouched(facts: Facts, limits: Thresholds) -> Finding:
    request, written = facts.request("restored"), facts.evidence.written
    need = (
        math.ceil(limits.min_hit * written.expected_files) if written and written.new_files else 0
    )
    threshold = f">= {need} files"
    if request is None or request.before is None or not need:
        return None, threshold, None
    return request.before.own_files, threshold, request.before.own_files >= need


def needed_tokens(facts: Facts, limits: Thresholds) -> float:
    return limits.min_hit * facts.aligned


def from_engine(facts: Facts, limits: Thresholds) -> bool:
    """Whether the engine's own memory explains what the external cache did not serve."""
    own, external = facts.vllm("restored", "prefix_hits"), facts.vllm("restored", "external_hits")
    return bool(own) and (own or 0) + (external or 0) >= needed_tokens(facts, limits)


def l2_hits(facts: Facts, limits: Thresholds) -> Finding:
    need = needed_tokens(facts, limits)
    threshold = f">= {need:.0f} of {facts.aligned} tokens"
    figure = facts.cache("restored", "hit_l2_tokens")
    if figure is None or figure >= need:
        return figure, threshold, None if figure is None else True
    external = facts.vllm("restored", "external_hits")
    elsewhere = (external or 0) >= need or from_engine(facts, limits)
    return figure, threshold, None if elsewhere else False


def l1_zero(facts: Facts, _: Thresholds) -> Finding:
    figure = facts.cache("restored", "hit_l1_tokens")
    return figure, "0 tokens", at_most(figure, 0)


def external_hits(facts: Facts, limits: Thresholds) -> Finding:
    need = needed_tokens(facts, limits)
    threshold = f">= {need:.0f} of {facts.aligned} tokens"
    figure = facts.vllm("restored", "external_hits")
    if figure is None or (figure < need and from_engine(facts, limits)):
        return figure, threshold, None
    return figure, threshold, figure >= need


def engine_zero(facts: Facts, _: Thresholds) -> Finding:
    figure = facts.vllm("restored", "prefix_hits")
    return figure, "0 tokens", at_most(figure, 0)


def cached_agrees(facts: Facts, _: Thresholds) -> Finding:
    request = facts.request("restored")
    figure = request.usage_cached_tokens if request else None
    own, external = facts.vllm("restored", "prefix_hits"), facts.vllm("restored", "external_hits")
    if figure is None or own is None or external is None:
        return figure, "as counted", None
    return figure, f"{own + external:.0f} as counted", figure == own + external


def restored_answered(facts: Facts, _: Thresholds) -> Finding:
    done = facts.answered("restored")
    if done is False and facts.answered("control") is not True:
        return "no", "an answer", None  # the server answers nothing: no matter of the cache
    return None if done is None else "yes" if done else "no", "an answer", done


def same_answer(facts: Facts, limits: Thresholds) -> Finding:
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
    gap = first_token_gap(before, after)
    if not facts.evidence.config.exact_numerics and gap is not None and gap <= limits.max_gap:
        return figure, f"or first token <= {limits.max_gap} off", True
    steady = warm is None or warm.output_tokens in (None, before.output_tokens)
    return figure, threshold, False if steady else None


def first_token_gap(before: Request, after: Request) -> float | None:
    """How much less or more likely the first token of the one answer is in the other, in nats.

    Infinite where it is not even among the likeliest; None where no likelihoods are known.
    """
    old, new = before.first_logprobs, after.first_logprobs
    if not old or not new:
        return None
    token = max(old, key=lambda one: old[one])
    return abs(old[token] - new[token]) if token in new else math.inf


def first_token(facts: Facts, limits: Thresholds) -> Finding:
    threshold = f"<= {limits.max_gap} nats off"
    before, warm, after = (facts.request(role) for role in ("cold", "warm", "restored"))
    gap = first_token_gap(before, after) if before and after else None
    if gap is None:
        return None, threshold, None
    figure = "not among the likeliest" if math.isinf(gap) else f"{gap:.4f}"
    if gap <= limits.max_gap:
        return figure, threshold, True
    again = first_token_gap(before, warm) if before and warm else None
    steady = again is None or again <= limits.max_gap
    return figure, threshold, False if steady else None


def no_rewriting(facts: Facts, limits: Thresholds) -> Finding:
    """As many new files as min_hit allows chunks to be missing, and no changed one."""
    config, request = facts.evidence.config, facts.request("restored")
    missing = facts.chunks - math.ceil(limits.min_hit * facts.chunks)
    threshold = f"<= {missing * config.files_per_chunk} new, 0 changed"
    if request is None or request.files is None:
        return None, threshold, None
    new, changed = request.files.new, request.files.changed
    kept = new <= missing * config.files_per_chunk and changed == 0
    return f"{new} new, {changed} changed", threshold, kept


def control_answered(facts: Facts, _: Thresholds) -> Finding:
    done = facts.answered("control")
    return None if done is None else "yes" if done else "no", "an answer", done


def asked(facts: Facts, _: Thresholds) -> Finding:
    """A miss says nothing where the cache was not asked for the whole prompt; nor does a hit."""
    threshold = "every whole chunk"
    roles = ["restored", "control", *(r for r in ("half", "moved") if facts.request(r))]
    missing: list[float] = []
    for role in roles:
        for rise in (facts.vllm(role, "external_queries"), facts.cache(role, "requested_tokens")):
            if rise is None:
                return None, threshold, None
            missing.append(facts.aligned_of(role) - rise)
    figure = "every one" if max(missing) <= 0 else f"{max(missing):.0f} tokens not asked for"
    return figure, threshold, max(missing) <= 0


def control_misses(facts: Facts, _: Thresholds) -> Finding:
    figure = any_hits(facts, "control")
    return figure, "0 cached tokens", at_most(figure, 0)


def half_hits(facts: Facts, _: Thresholds) -> Finding:
    """As many tokens as the shared chunks have: fewer and it was not kept, more and it is wrong."""
    shared = facts.aligned_of("half_cold") // facts.evidence.config.chunk_size // 2
    need = shared * facts.evidence.config.chunk_size
    threshold = f"{need} tokens, no more"
    cold = facts.request("half_cold")
    found = facts.cache("half", "hit_tokens"), facts.vllm("half", "external_hits")
    if cold is None or cold.written is None or not facts.answered("half") or None in found:
        return None, threshold, None
    figure = " / ".join(f"{tokens:.0f}" for tokens in found if tokens is not None)
    if set(found) == {float(need)}:
        return figure, threshold, True
    more = any((tokens or 0) > need for tokens in found)
    return figure, threshold, False if more or not cold.written.timed_out else None


def moved_misses(facts: Facts, _: Thresholds) -> Finding:
    """Where the files are elsewhere the same prompt is not found: the hits come from the files."""
    moved, cold = facts.evidence.moved, facts.request("moved_cold")
    threshold = "0 cached tokens"
    figure = any_hits(facts, "moved") if facts.answered("moved") else None
    whole = moved and cold and cold.written and moved.moved >= cold.written.expected_files > 0
    return (figure, threshold, at_most(figure, 0)) if whole else (None, threshold, None)


def foreign_unread(facts: Facts, _: Thresholds) -> Finding:
    moved = facts.evidence.moved
    figure = moved.resident_after if moved and moved.pages else None
    return figure, "0 pages read", at_most(figure, 0)


def rebooted(facts: Facts, _: Thresholds) -> Finding:
    done = facts.rebooted()
    return None if done is None else "yes" if done else "no", "another boot", done


def registered(facts: Facts, _: Thresholds) -> Finding:
    done = facts.evidence.registered
    return None if done is None else "yes" if done else "no", "an engine", done


def cache_hits(facts: Facts, limits: Thresholds) -> Finding:
    """The cache server was not restarted: its memory may answer as well as its files."""
    need = needed_tokens(facts, limits)
    l1, l2 = (facts.cache("restored", f"hit_{tier}_tokens") for tier in ("l1", "l2"))
    threshold = f">= {need:.0f} of {facts.aligned} tokens"
    if l1 is None or l2 is None:
        return None, threshold, None
    figure = f"{l1:.0f} L1, {l2:.0f} L2"
    if l1 + l2 >= need:
        return figure, threshold, True
    elsewhere = (facts.vllm("restored", "external_hits") or 0) >= need or from_engine(facts, limits)
    return figure, threshold, None if elsewhere else False


def killed_midway(facts: Facts, _: Thresholds) -> Finding:
    killed, threshold = facts.evidence.killed, "some files, not all"
    if killed is None or killed.kept is None:
        return None, threshold, None
    figure = f"{killed.kept} of {killed.expected_files}"
    return figure, threshold, 0 < killed.kept < killed.expected_files


def cut_hits(facts: Facts, _: Thresholds) -> Finding:
    """Whole chunks at the beginning that were complete come from L2, and no others."""
    killed, config = facts.evidence.killed, facts.evidence.config
    l2, external = facts.cache("cut", "hit_l2_tokens"), facts.vllm("cut", "external_hits")
    if killed is None or killed.kept is None or l2 is None or external is None:
        return None, "what was complete", None
    most = killed.kept // config.files_per_chunk * config.chunk_size
    threshold, figure = f"<= {most} tokens", max(l2, external)
    if figure > most:
        return figure, threshold, False
    # the chunks are not written in order: without the first one nothing can be found
    return figure, threshold, True if l2 == external > 0 else None


def cut_answer(facts: Facts, limits: Thresholds) -> Finding:
    """The answer of KV from L2 and computed KV is that of the same prompt computed anew."""
    after, computed = facts.request("cut"), facts.request("reference")
    threshold = "as computed anew"
    hits = any_hits(facts, "reference")
    if not after or not computed or not after.output_tokens or not computed.output_tokens:
        return None, threshold, None
    pairs = zip(after.output_tokens, computed.output_tokens, strict=False)
    same = sum(a == b for a, b in pairs)
    figure = f"{same} of {len(computed.output_tokens)}"
    if hits != 0:
        return figure, threshold, None
    gap = first_token_gap(computed, after)
    close = gap is not None and gap <= limits.max_gap
    if after.output_tokens == computed.output_tokens:
        return figure, threshold, True
    return figure, threshold, not facts.evidence.config.exact_numerics and close


def reads_seen(facts: Facts, limits: Thresholds) -> Finding:
    written = facts.evidence.written
    by_process, by_drive = facts.reads()
    need = limits.min_hit * (written.new_bytes if written else 0)
    threshold = f">= {need / 2**20:.0f} MiB by either"
    if (by_process is None and by_drive is None) or not need:
        return "not observed", threshold, None
    figure = " / ".join("?" if b is None else f"{b / 2**20:.0f}" for b in (by_process, by_drive))
    seen = max(by_process or 0, by_drive or 0) >= need
    return f"{figure} MiB" if seen else f"not observed ({figure} MiB)", threshold, seen
