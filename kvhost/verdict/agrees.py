"""Whether evidence agrees with itself: contradictions that no run of evidence.py can record.

Each check names one contradiction in words, or gives None. A part that is missing is no
contradiction where another condition of the judge asks for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

from kvhost.verdict.evidence import Event, Process
from kvhost.verdict.facts import AFTER, BEFORE, Facts

Check = Callable[[Facts], str | None]
# as evidence.py names its steps
NEEDED: dict[Event, tuple[str, ...]] = {
    "runner": ("restart the runner",),
    "cache": ("restart the cache server", "the runner registers again"),
    "both": ("restart the cache server", "restart the runner"),
    "kill": ("kill -9 both services in a write, start them",),
    "other": ("start a second pair of services",),
    "reboot": ("flush the test's files to the drive", "the services come back by themselves"),
}
KILLED_NATIVE = ("kill -9 the runner in a write, start it",)
REQUESTS = {
    "cold": "cold request, until it is written",
    "moved_cold": "cold request of a control: moved",
    "half_cold": "cold request of a control: half",
    "warm": "warm request",
    "moved": "control: files moved to another namespace",
    "half": "control: the first half of a prompt",
    "restored": "the same request again",
    "cut": "the killed request again",
    "reference": "the killed request, computed anew",
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
    event = facts.evidence.event
    needed = KILLED_NATIVE if facts.native and event == "kill" else NEEDED[event]
    for name in ("identify the services", "is the server in use", *needed):
        if not _step(facts, name):
            return f"step not done: {name}"
    return None


def _steps_fit(facts: Facts) -> str | None:
    """A request without an error is a step that succeeded, and the other way round.

    A failed request after the restart is the cache's failure, no contradiction.
    """
    needed = ("cold", "restored", "control", *(["warm"] if facts.evidence.config.warm else []))
    done = {
        name: (request := facts.request(role)) is not None and request.error is None
        for role, name in REQUESTS.items()
        if facts.request(role) or _step(facts, name) is not None or role in needed
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
        if request.error is not None and role in BEFORE and role != "killed":
            return f"the {role} request failed"
    return None


def _restart(facts: Facts) -> str | None:
    for name, service in facts.evidence.services.items():
        code = service.restart.exit_code if service.restart else None
        if code != 0 and name in facts.replaced:
            return f"restart of the {name}: exit {'unknown' if code is None else code}"
        old, new = service.before.proc, service.after.proc if service.after else None
        anew = facts.evidence.event == "reboot"
        if old and new and new.start_ticks < old.start_ticks and not anew:
            return f"the new {name} started before the old one"
    return None


def _boot(facts: Facts) -> str | None:
    """Every process is of the boot of its time: there is another one after a reboot only."""
    before, after = facts.boots()
    seen: list[tuple[Process | None, str]] = []
    for service in facts.evidence.services.values():
        for side, boot in ((service.before, before), (service.after, after)):
            seen += [(side.record, boot), (side.proc, boot)] if side else []
    for roles, boot in ((BEFORE, before), (AFTER, after)):
        for request in facts.phase(roles):
            for shot in (request.before, request.after):
                who = (shot.processes.cache, shot.processes.runner) if shot else ()
                seen += [(process, boot) for process in who]
    if any(who is not None and who.boot_id != boot for who, boot in seen):
        return "more than one boot"
    return None


def _order(facts: Facts) -> str | None:
    shots = [shot.unix for shot in facts.shots()]
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
    for shot in facts.shots():
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
    for role, request in facts.evidence.requests.items():
        limit = request.prompt_tokens or facts.evidence.config.prompt_tokens
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
