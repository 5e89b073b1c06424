"""Numbers derived from evidence, for the judge. None wherever a part is missing: never a guess."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from kvhost.verdict.evidence import Event, Evidence, Identity, Process, Request, Snapshot

BEFORE = ("cold", "moved_cold", "half_cold", "warm", "killed")
AFTER = ("moved", "half", "restored", "cut", "reference", "control")
#: Which services another process must serve after the event; the others must be the same ones.
REPLACED: dict[Event, frozenset[str]] = {
    "runner": frozenset({"runner"}),
    "cache": frozenset({"cache"}),
    "both": frozenset({"runner", "cache"}),
    "kill": frozenset({"runner", "cache"}),
    "other": frozenset({"runner", "cache"}),
    "reboot": frozenset({"runner", "cache"}),
}
PAGES = {"runner": "vllm", "cache": "cache"}


class Facts:
    """Evidence with the differences that the conditions ask for.

    ``chunks`` is the number of whole chunks of the test's prompt, ``aligned`` their tokens.
    """

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence
        config = evidence.config
        self.chunks = config.prompt_tokens // config.chunk_size if config.chunk_size else 0
        self.aligned = self.chunks * config.chunk_size
        self.native = config.native
        self.replaced = REPLACED[evidence.event] - ({"cache"} if config.native else set())

    def aligned_of(self, role: str) -> int:
        """Tokens of the whole chunks of a request's prompt."""
        request = self.request(role)
        if request is None or request.prompt_tokens is None:
            return self.aligned
        size = self.evidence.config.chunk_size
        return request.prompt_tokens // size * size if size else 0

    def request(self, role: str) -> Request | None:
        return self.evidence.requests.get(role)

    def answered(self, role: str) -> bool | None:
        """Whether a request got its whole answer; None when it was not sent, or not finished."""
        request = self.request(role)
        if request is None or (request.error is None and request.http_status is None):
            return None
        return request.error is None

    def vllm(self, role: str, field: str) -> float | None:
        """Growth of a vLLM counter over a request."""
        request = self.request(role)
        if request is None or not (request.before and request.after):
            return None
        before, after = request.before.vllm, request.after.vllm
        if before is None or after is None or getattr(after, field) is None:
            return None
        return float(getattr(after, field) - (getattr(before, field) or 0))

    def asked(self, role: str) -> bool | None:
        """Whether vLLM asked an external cache for at least a chunk of tokens."""
        tokens = self.vllm(role, "external_queries")
        return None if tokens is None else tokens >= self.evidence.config.chunk_size

    def cache(self, role: str, field: str) -> float | None:
        """Growth of a counter of the cache server over a request.

        A counter that is not on the page is 0 only where vLLM says that it asked no external
        cache for a chunk; a server that counted no look-up although vLLM asked is another server.
        """
        request = self.request(role)
        if request is None or not (request.before and request.after):
            return None
        before, after = request.before.cache, request.after.cache
        if before is None or after is None or after.l2_adapters is None:
            return None
        lookups = (after.lookups or 0) - (before.lookups or 0)
        if lookups == 0 and self.asked(role) is not False:
            return None
        if getattr(after, field) is None:
            return 0.0 if lookups == 0 else None
        return float(getattr(after, field) - (getattr(before, field) or 0))

    def phase(self, roles: tuple[str, ...]) -> list[Request]:
        """The requests of these roles in the order in which they were sent."""
        found = [r for r in map(self.request, roles) if r and r.before]
        return sorted(found, key=lambda r: r.before.unix if r.before else 0)

    def lives(self, name: str) -> list[list[Request]]:
        """The requests that each process of a service had: before and after, or all in one."""
        phases = [self.phase(BEFORE), self.phase(AFTER)]
        return phases if name in self.replaced else [phases[0] + phases[1]]

    def shots(self) -> list[Snapshot]:
        """All snapshots, in order."""
        return [shot for r in self.phase(BEFORE) + self.phase(AFTER) for shot in _sides(r)]

    def foreign_requests(self) -> float | None:
        """Requests during the test that were not kvhost's own, finished or running."""
        total = 0.0
        for number, life in enumerate(self.lives("runner")):
            extra: list[float] = []
            for shot in (shot for request in life for shot in _sides(request)):
                page, own = shot.vllm, shot.own_requests
                if page is None or own is None:
                    return None
                if None in (page.requests_finished, page.running, page.waiting):
                    return None
                extra.append(float(page.requests_finished or 0) - own)
                total += float(page.running or 0) + float(page.waiting or 0)
            if not extra:
                return None
            # the new process served nobody before; the old one only counts from the first look
            total += abs(extra[-1] - (extra[0] if number == 0 else 0))
        return total

    def foreign_lookups(self) -> float | None:
        """Look-ups at the cache server beyond one for each of the test's requests."""
        total = 0.0
        for life in self.lives("cache"):
            last: float | None = None
            if not life:
                return None
            for request in life:
                counts = []
                for shot in _sides(request):
                    if shot.cache is None:
                        return None
                    counts.append(shot.cache.lookups or 0)
                if last is not None:
                    total += max(0, counts[0] - last)
                total += max(0, counts[-1] - counts[0] - 1)
                last = counts[-1]
        return total

    def resets(self) -> int | None:
        """Counters that fell and processes that changed where none should; None: not readable."""
        problems = 0
        for name, service in self.evidence.services.items():
            for roles, side in ((BEFORE, service.before), (AFTER, service.after)):
                for shot in (shot for request in self.phase(roles) for shot in _sides(request)):
                    seen: Process | None = getattr(shot.processes, name)
                    if side is None or seen is None:
                        return None
                    problems += seen != side.proc
            for life in self.lives(name):
                shots = [shot for request in life for shot in _sides(request)]
                pages = [getattr(shot, PAGES[name]) for shot in shots]
                if not pages or None in pages:
                    return None
                for old, new in itertools.pairwise(pages):
                    for field in type(old).model_fields:
                        if field in ("running", "waiting", "l2_adapters"):
                            continue
                        was, now = getattr(old, field) or 0, getattr(new, field)
                        if now is None and getattr(old, field) is not None:
                            return None
                        problems += (now or 0) < was
        return problems

    def boots(self) -> tuple[str, str]:
        """The boot before the event and the one after it."""
        resumed = self.evidence.resumed
        return self.evidence.boot_id, resumed.boot_id_after if resumed else self.evidence.boot_id

    def rebooted(self) -> bool | None:
        """Another boot, or in a container another first process."""
        resumed = self.evidence.resumed
        if resumed is None:
            return None
        return (resumed.boot_id, resumed.pid1_ticks) != (
            resumed.boot_id_after,
            resumed.pid1_ticks_after,
        )

    def replaced_as_expected(self, name: str) -> bool | None:
        """Whether another process serves now, where the event wants it, and else the same one."""
        service = self.evidence.services.get(name)
        if service is None or service.after is None:
            return None
        old, new = service.before, service.after
        if old.proc is None or new.proc is None:
            return None
        if old.proc != old.record or new.proc != new.record:
            return None  # the record speaks of another process
        if self.evidence.event != "reboot" and old.proc.boot_id != new.proc.boot_id:
            return False
        if name not in self.replaced:
            another: bool = old.proc == new.proc
        elif self.evidence.event == "reboot":  # numbers and times begin anew
            another = old.proc != new.proc
        else:
            another = old.proc.pid != new.proc.pid and old.proc.start_ticks != new.proc.start_ticks
        return another and old.listens and new.listens

    def is_another(self, name: str) -> bool:
        """Whether the service's process after the event is known to be another than before."""
        service = self.evidence.services.get(name)
        old = service.before.proc if service else None
        new = service.after.proc if service and service.after else None
        if old is None or new is None:
            return False
        if old.boot_id != new.boot_id:
            return True
        return old.pid != new.pid and old.start_ticks != new.start_ticks

    def off_port(self, name: str) -> bool:
        """Whether the service was seen not to listen on its port, before the event or after."""
        service = self.evidence.services.get(name)
        sides = (service.before, service.after) if service else ()
        return any(side is not None and side.listens is False for side in sides)

    def rebooted_between(self, name: str) -> bool:
        """Whether the machine was started anew although the event was another."""
        service = self.evidence.services.get(name)
        old = service.before.proc if service else None
        new = service.after.proc if service and service.after else None
        if old is None or new is None or self.evidence.event == "reboot":
            return False
        return old.boot_id != new.boot_id

    def reads(self) -> tuple[int | None, int | None]:
        """Bytes read during the restored request: by the cache process, from the drive."""
        request = self.request("restored")
        if request is None or not (request.before and request.after):
            return None, None
        before, after = request.before, request.after
        by_process, by_drive = None, None
        if before.cache_reads and after.cache_reads:
            by_process = after.cache_reads.rchar - before.cache_reads.rchar
        if before.device_read_bytes is not None and after.device_read_bytes is not None:
            by_drive = after.device_read_bytes - before.device_read_bytes
        return by_process, by_drive


def odd(old: Identity, new: Identity) -> str | None:
    """What is wrong with who serves, though the numbers of its processes do not show it."""
    for side, when in ((old, "before"), (new, "now")):
        if side.proc is not None and side.proc != side.record:
            return f"its record {when} names another process"
    for side, when in ((old, "before"), (new, "now")):
        if side.listens is False:
            return f"not on its port {when}"
    return None


def _sides(request: Request) -> Iterator[Snapshot]:
    yield from (shot for shot in (request.before, request.after) if shot)
