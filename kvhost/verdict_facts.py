"""Numbers derived from evidence, for the judge. None wherever a part is missing: never a guess."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from kvhost.evidence_model import Evidence, Process, Request, Snapshot


class Facts:
    """Evidence with the differences that the conditions ask for.

    ``chunks`` is the number of whole chunks of a prompt, ``aligned`` their tokens.
    """

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence
        config = evidence.config
        self.chunks = config.prompt_tokens // config.chunk_size if config.chunk_size else 0
        self.aligned = self.chunks * config.chunk_size

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

    def lives(self) -> Iterator[tuple[str, list[Snapshot]]]:
        """Snapshots in order, apart for the processes before and after the restart."""
        for life, roles in (("before", ("cold", "warm")), ("after", ("restored", "control"))):
            found = [self.request(role) for role in roles]
            shots = [shot for r in found if r for shot in (r.before, r.after) if shot]
            yield life, shots

    def foreign_requests(self) -> float | None:
        """Requests during the test that were not kvhost's own, finished or running."""
        total = 0.0
        for life, shots in self.lives():
            extra: list[float] = []
            for shot in shots:
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
            total += abs(extra[-1] - (extra[0] if life == "before" else 0))
        return total

    def foreign_lookups(self) -> float | None:
        """Look-ups at the cache server beyond one for each of the test's requests."""
        total = 0.0
        for _, shots in self.lives():
            if not shots or any(shot.cache is None for shot in shots):
                return None
            counts = [shot.cache.lookups or 0 for shot in shots if shot.cache]
            for index, (earlier, later) in enumerate(itertools.pairwise(counts)):
                within = index % 2 == 0  # snapshots come in pairs around a request
                total += max(0, later - earlier - (1 if within else 0))
        return total

    def resets(self) -> int | None:
        """Counters that fell and processes that changed where none should; None: not readable."""
        problems = 0
        for life, shots in self.lives():
            if not shots:
                return None
            for shot in shots:
                for name, service in self.evidence.services.items():
                    side = service.before if life == "before" else service.after
                    seen: Process | None = getattr(shot.processes, name)
                    if shot.vllm is None or shot.cache is None or side is None or seen is None:
                        return None
                    problems += seen != side.proc
            for earlier, later in itertools.pairwise(shots):
                for page in ("vllm", "cache"):
                    old, new = getattr(earlier, page), getattr(later, page)
                    for field in type(old).model_fields:
                        if field in ("running", "waiting", "l2_adapters"):
                            continue
                        was, now = getattr(old, field) or 0, getattr(new, field)
                        if now is None and getattr(old, field) is not None:
                            return None
                        problems += (now or 0) < was
        return problems

    def restarted(self, name: str) -> bool | None:
        """Whether another process of the same boot serves now: number and start time differ."""
        service = self.evidence.services.get(name)
        if service is None or service.after is None:
            return None
        old, new = service.before, service.after
        if old.proc is None or new.proc is None:
            return None
        if old.proc != old.record or new.proc != new.record:
            return None  # the record speaks of another process
        return (
            old.proc.pid != new.proc.pid
            and old.proc.start_ticks != new.proc.start_ticks
            and old.proc.boot_id == new.proc.boot_id
            and old.listens
            and new.listens
        )

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
