"""Numbers derived from evidence of a server of others. None wherever a part is missing."""

from __future__ import annotations

import itertools

from kvhost.verdict.foreign_evidence import ForeignEvidence, ForeignRequest, ForeignSnapshot


class ForeignFacts:
    """``chunks``: whole chunks of the prompt, ``aligned`` their tokens, by the length that the
    server counted; None where it did not."""

    #: Steps whose failure is judged by what they would have given.
    RESULTS = ("warm request", "the same request again", "control: an unseen prompt")
    LIVES = (("cold", "warm"), ("restored", "control"))

    def __init__(self, evidence: ForeignEvidence) -> None:
        self.evidence = evidence
        cold, size = self.request("cold"), evidence.config.chunk_size
        counted = cold.usage_prompt_tokens if cold else None
        self.chunks = counted // size if counted is not None and size else None
        self.aligned = self.chunks * size if self.chunks is not None else None

    def request(self, role: str) -> ForeignRequest | None:
        return self.evidence.requests.get(role)

    def ttft(self, role: str) -> float | None:
        request = self.request(role)
        return request.ttft_s if request else None

    def answered(self, role: str) -> bool | None:
        """Whether a request got its whole answer; None when it was not sent, or not finished."""
        request = self.request(role)
        if request is None or (request.error is None and request.http_status is None):
            return None
        return request.error is None and request.http_status == 200

    def _growth(self, role: str, page: str, field: str) -> float | None:
        request = self.request(role)
        if request is None or not (request.before and request.after):
            return None
        before, after = getattr(request.before, page), getattr(request.after, page)
        if before is None or after is None or getattr(after, field) is None:
            return None
        return float(getattr(after, field) - (getattr(before, field) or 0))

    def vllm(self, role: str, field: str) -> float | None:
        """Growth of a vLLM counter over a request."""
        return self._growth(role, "vllm", field)

    def cache(self, role: str, field: str) -> float | None:
        """Growth of a counter of the cache server over a request; it is not on the page before its
        first event, so None is 0 where a look-up was counted and no hit."""
        lookups = self._growth(role, "cache", "lookups")
        if lookups is None:  # no look-up at all: another server, unless vLLM did not ask
            return 0.0 if self._page(role) and self.vllm(role, "external_queries") == 0 else None
        if lookups == 0 and self.vllm(role, "external_queries") != 0:
            return None
        found = self._growth(role, "cache", field)
        return found if found is not None else 0.0

    def _page(self, role: str) -> bool:
        request = self.request(role)
        return bool(request and request.after and request.after.cache)

    def lives(self) -> list[list[ForeignSnapshot]]:
        """Snapshots in order, apart for before and after the restart."""
        found = []
        for roles in self.LIVES:
            requests = [self.request(role) for role in roles]
            found.append([s for r in requests if r for s in (r.before, r.after) if s])
        return found

    def restart_signs(self) -> dict[str, bool]:
        """Signs that exist, each whether it says that another process answers: the process that
        listens, the start time on the metrics page, the counters that begin anew."""
        before, after = self.lives()
        if not before or not after:
            return {}
        old, new = before[-1], after[0]
        signs: dict[str, bool] = {}
        if old.runner is not None and new.runner is not None:
            signs["process"] = (
                old.runner.pid != new.runner.pid
                and old.runner.start_ticks != new.runner.start_ticks
            )
        if old.vllm is None or new.vllm is None:
            return signs
        if old.vllm.start_time is not None and new.vllm.start_time is not None:
            signs["start time"] = new.vllm.start_time > old.vllm.start_time
        was, now = old.vllm.requests_finished, new.vllm.requests_finished
        if was is not None and now is not None:
            signs["counters"] = now < was
        return signs

    @staticmethod
    def provable(signs: dict[str, bool]) -> bool:
        """Counters alone prove nothing: something else than a restart may have set them back."""
        return "process" in signs or "start time" in signs

    def resets(self) -> int | None:
        """Counters that fell and processes that changed where none should; None: not readable."""
        problems = 0
        for shots in self.lives():
            if not shots or any(shot.vllm is None for shot in shots):
                return None
            if self.evidence.cache_metrics and any(shot.cache is None for shot in shots):
                return None
            for earlier, later in itertools.pairwise(shots):
                problems += earlier.runner != later.runner
                for page in ("vllm", "cache"):
                    old, new = getattr(earlier, page), getattr(later, page)
                    if old is None or new is None:
                        continue
                    problems += old.start_time != new.start_time
                    for field in type(old).model_fields:
                        if field in ("running", "waiting", "l2_adapters", "start_time"):
                            continue
                        was, now = getattr(old, field) or 0, getattr(new, field)
                        if now is None and getattr(old, field) is not None:
                            return None
                        problems += (now or 0) < was
        return problems

    def foreign_requests(self) -> float | None:
        """Requests during the test that were not the test's, finished or running."""
        total = 0.0
        for shots in self.lives():
            extra: list[float] = []
            for shot in shots:
                page = shot.vllm
                if page is None or None in (page.requests_finished, page.running, page.waiting):
                    return None
                extra.append(float(page.requests_finished or 0) - shot.sent)
                total += float(page.running or 0) + float(page.waiting or 0)
            if not extra:
                return None
            total += abs(extra[-1] - extra[0])
        return total

    def read_share(self) -> float | None:
        """Part of the cold request's pages that are in the page cache after the restored request,
        though dropped before the restart: they were read. What process or drive read in all is no
        measure: others read, too. None: it cannot be seen."""
        request = self.request("restored")
        pages = request.after.own_pages if request and request.after else None
        return pages.resident / pages.pages if pages is not None and pages.pages else None
