"""Whether evidence agrees with itself: contradictions that no run of evidence.py can record.

Each check names one contradiction in words, or gives None. A part that is missing is no
contradiction where another condition of the judge asks for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

from kvhost.evidence_model import Process
from kvhost.verdict_facts import Facts

Check = Callable[[Facts], str | None]
# as evidence.py names its steps
NEEDED = (
    "identify the services",
    "is the server in use",
    "restart the cache server",
    "restart the runner",
)
REQUESTS = {
    "cold": "cold request, until it is written",
    "warm": "warm request",
    "restored": "the same request again",
    "control": "control: an unseen prompt",
}
DROP = "drop the test's files from the page cache"


def _stopped(facts: Facts) -> str | None:
    evidence = facts.evidence
    if evidence.refused is not None:
        return "the test was refused"
    return None if evidence.interrupted is None else f"interrupted by {evidence.interrupted}"


def _step(facts: Facts, name: str) -> bool | None:
    """Whether a step succeeded; None when it is not recorded."""
    found = [step.ok and step.error is None for step in facts.evidence.steps if step.name == name]
    return all(found) if found else None


def _steps(facts: Facts) -> str | None:
    for name in NEEDED:
        if not _step(facts, name):
            return f"step not done: {name}"
    return None


def _steps_fit(facts: Facts) -> str | None:
    """A request without an error is a step that succeeded, and the other way round.

    A failed request after the restart is the cache's failure, no contradiction.
    """
    done = {
        name: (request := facts.request(role)) is not None and request.error is None
        for role, name in REQUESTS.items()
        if role != "warm" or facts.evidence.config.warm or facts.request("warm")
    }
    done[DROP] = facts.evidence.page_cache is not None
    for name, result in done.items():
        if result is not bool(_step(facts, name)):
            return f"step and its result differ: {name}"
    return None


def _http(facts: Facts) -> str | None:
    for role, request in facts.evidence.requests.items():
        if request.role != role:
            return f"the {role} request says it is {request.role}"
        if request.error is None and request.http_status not in (200, None):
            return f"the {role} request: HTTP {request.http_status}, but no error"
        if request.error is not None and role in ("cold", "warm"):
            return f"the {role} request failed"
    return None


def _restart(facts: Facts) -> str | None:
    for name, service in facts.evidence.services.items():
        code = service.restart.exit_code if service.restart else None
        if code != 0:
            return f"restart of the {name}: exit {'unknown' if code is None else code}"
        old, new = service.before.proc, service.after.proc if service.after else None
        if old and new and new.start_ticks < old.start_ticks:
            return f"the new {name} started before the old one"
    return None


def _boot(facts: Facts) -> str | None:
    seen: list[Process | None] = []
    for service in facts.evidence.services.values():
        for side in (service.before, service.after):
            seen += [side.record, side.proc] if side else []
    for _, shots in facts.lives():
        for shot in shots:
            seen += [shot.processes.cache, shot.processes.runner]
    same = all(who is None or who.boot_id == facts.evidence.boot_id for who in seen)
    return None if same else "more than one boot"


def _order(facts: Facts) -> str | None:
    shots = [shot.unix for _, found in facts.lives() for shot in found]
    times = [facts.evidence.started_unix, *shots, facts.evidence.finished_unix]
    return "times run backwards" if any(b < a for a, b in itertools.pairwise(times)) else None


def _chunk_size(facts: Facts) -> str | None:
    return None if facts.evidence.config.chunk_size > 0 else "chunk_size is 0"


def _expected(facts: Facts) -> str | None:
    written = facts.evidence.written
    need = facts.chunks * facts.evidence.config.files_per_chunk
    if written is None or written.expected_files == need:
        return None
    return f"{written.expected_files} files expected, {need} by the prompt"


def _bytes(facts: Facts) -> str | None:
    """``sizes`` are the different sizes of the new files."""
    written = facts.evidence.written
    if written is None or (written.new_files == 0 and written.new_bytes == 0):
        return None
    least, most = min(written.sizes, default=0), max(written.sizes, default=0)
    if 0 < least * written.new_files <= written.new_bytes <= most * written.new_files:
        return None
    return f"{written.new_bytes} bytes in {written.new_files} new files"


def _own_files(facts: Facts) -> str | None:
    """Own files are among those that the cold request wrote, and among all that are there."""
    written = facts.evidence.written
    for _, shots in facts.lives():
        for shot in shots:
            if written is not None and shot.own_files > written.new_files:
                return f"{shot.own_files} own files, {written.new_files} written"
            if shot.own_files > shot.files:
                return f"{shot.own_files} own files of {shot.files}"
    return None


def _pages(facts: Facts) -> str | None:
    cache, request = facts.evidence.page_cache, facts.request("restored")
    if cache is None:
        return None
    resident = max(cache.resident_before, cache.resident_after)
    if resident > cache.pages:
        return f"{resident} of {cache.pages} pages resident"
    own = request.before.own_files if request and request.before else 0
    if cache.pages < cache.files or cache.files < own:
        return f"{cache.pages} pages of {cache.files} files, {own} own"
    return None


def _hits(facts: Facts) -> str | None:
    """No request finds more than its prompt, and nothing is found in an L2 that is not there."""
    limit = facts.evidence.config.prompt_tokens
    for role, request in facts.evidence.requests.items():
        found = {
            "the cache": facts.cache(role, "hit_tokens"),
            "L1 and L2": _sum(facts.cache(role, f"hit_{tier}_tokens") for tier in ("l1", "l2")),
            "vLLM": _sum(facts.vllm(role, f"{side}_hits") for side in ("prefix", "external")),
            "the response": request.usage_cached_tokens,
        }
        for who, tokens in found.items():
            if tokens is not None and tokens > limit:
                return f"{role}: {tokens:.0f} hits of {limit} tokens, says {who}"
        page = request.after.cache if request.after else None
        if page and page.l2_adapters == 0 and facts.cache(role, "hit_l2_tokens"):
            return f"{role}: hits in L2 without an L2"
    return None


def _sum(figures: Iterable[float | None]) -> float:
    return sum(figure or 0.0 for figure in figures)


CHECKS: tuple[Check, ...] = (
    _stopped,
    _steps,
    _steps_fit,
    _http,
    _restart,
    _boot,
    _order,
    _chunk_size,
    _expected,
    _bytes,
    _own_files,
    _pages,
    _hits,
)


def contradiction(facts: Facts) -> str | None:
    """The first contradiction in words; None: the evidence agrees with itself."""
    return next(filter(None, (check(facts) for check in CHECKS)), None)
