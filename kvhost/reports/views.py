"""What the pages and tables show of reports: plain values, taken from a Report in one place."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from kvhost.basics import host_folder
from kvhost.llama.evidence import LlamaEvidence, LlamaRequest
from kvhost.ollama.facts import OllamaEvidence
from kvhost.reports.kept import Report, Result, list_reports, load_report, standing
from kvhost.reports.since import Since, since
from kvhost.verdict.evidence import Event, Evidence
from kvhost.verdict.facts import Facts
from kvhost.verdict.foreign_evidence import ForeignEvidence
from kvhost.verdict.foreign_facts import ForeignFacts
from kvhost.verdict.types import Cause, Condition, Persisted

#: Where the tokens of a prompt came from, in the order of the bars.
SOURCES: dict[str, str] = {
    "computed": "computed anew",
    "engine": "engine's own memory",
    "l1": "cache, memory (L1)",
    "l2": "cache, files (L2)",
    "outside": "from outside of vLLM",
    "slot": "slot, from its file",
}
Tokens = dict[str, float]
Standing = Literal["PASS", "FAIL", "INCONCLUSIVE", "NO_BY_DESIGN", "NONE"]


@dataclass(frozen=True)
class EventView:
    """One event of a report. seconds: the whole test; ttft, tokens: by role, then by source."""

    name: str
    title: str
    persisted: Persisted
    worth_it: str
    summary: str
    seconds: float
    ttft: dict[str, float | None]
    tokens: dict[str, Tokens]
    conditions: list[Condition]
    causes: list[Cause]


@dataclass(frozen=True)
class HostView:
    """A host with its reports, oldest first. ``unreadable``: files that are no reports; ``since``:
    what happened to the host after the one that would stand."""

    host: str
    folder: str
    reports: list[Report]
    unreadable: list[Path]
    since: Since | None = None

    @property
    def latest(self) -> Report | None:
        return self.reports[-1] if self.reports else None

    @property
    def latest_unreadable(self) -> bool:
        """Whether a newer file than the newest report cannot be read: no verdict stands then."""
        newest = max((path.stem for path in self.unreadable), default="")
        return bool(newest) and (self.latest is None or newest > self.latest.time)

    @property
    def stands(self) -> Report | None:
        """The report whose verdict stands: the newest that was not left out (reports.standing)."""
        return self._standing()[0]

    @property
    def left_out(self) -> Report | None:
        """The newest report, if its test was left out and an earlier verdict stands."""
        return self._standing()[1]

    def _standing(self) -> tuple[Report | None, Report | None]:
        found: list[tuple[str, Report | None]] = [(one.time, one) for one in self.reports]
        newest = self.reports[-1].time if self.reports else ""
        found += [(path.stem, None) for path in self.unreadable if path.stem < newest]
        return standing(one for _, one in sorted(found, key=lambda pair: pair[0], reverse=True))

    @property
    def standing(self) -> Standing:
        """The verdict that stands; NONE where the newest file cannot be read, or the host is not
        what it was when it was tested."""
        report = self.stands
        none = report is None or self.latest_unreadable or self.since is not None
        return "NONE" if none or report is None else report.persisted


EVENT_TITLES: dict[Event | Literal["command", "none"], str] = {
    "runner": "restart of the runner",
    "cache": "restart of the cache server",
    "both": "restart of both services",
    "kill": "kill -9 in the middle of a write",
    "reboot": "reboot of the host",
    "other": "a second runner that shares the tier",
    "command": "restart by a command, of a server of others",
    "none": "no restart: this runner keeps no KV on disk",
}
#: The requests that the charts show, in this order; further ones of a test are in its conditions.
ROLES = ("cold", "warm", "restored", "control")


def tokens_by_source(facts: Facts | ForeignFacts, role: str) -> Tokens:
    """Tokens of a prompt by where they came from; empty where vLLM's counters do not tell.

    The cache server's split into L1 and L2 is used for what vLLM took from outside, never for
    what it only looked up.
    """
    parts = [facts.vllm(role, f"from_{name}") for name in ("compute", "device", "external")]
    if None in parts:
        return {}
    computed, engine, external = (part or 0.0 for part in parts)
    found = {"computed": computed, "engine": engine}
    l1, l2 = (facts.cache(role, f"hit_{tier}_tokens") for tier in ("l1", "l2"))
    if l1 is not None and l2 is not None and l1 + l2 >= external:
        found["l2"] = min(l2, external)
        found["l1"] = external - found["l2"]
    else:
        found["outside"] = external
    return {source: found[source] for source in SOURCES if found.get(source)}


def tokens_of_slot(request: LlamaRequest) -> Tokens:
    """The same of llama-server: after its restart a slot holds what came from its file."""
    if request.prompt_n is None or request.cache_n is None:
        return {}
    there = "slot" if request.role in ("restored", "control") else "engine"
    found = {"computed": float(request.prompt_n), there: float(request.cache_n)}
    return {source: found[source] for source in SOURCES if found.get(source)}


def _tokens(evidence: Evidence | ForeignEvidence) -> dict[str, Tokens]:
    facts = Facts(evidence) if isinstance(evidence, Evidence) else ForeignFacts(evidence)
    return {role: tokens_by_source(facts, role) for role in ROLES if facts.request(role)}


def event_view(result: Result) -> EventView:
    """One event of a report."""
    verdict, evidence = result.verdict, result.evidence
    tokens: dict[str, Tokens] = {}
    if isinstance(evidence, LlamaEvidence):
        tokens = {role: tokens_of_slot(one) for role, one in evidence.requests.items()}
    elif not isinstance(evidence, OllamaEvidence):
        tokens = _tokens(evidence)
    return EventView(
        name=verdict.event,
        title=EVENT_TITLES[verdict.event],
        persisted=verdict.persisted,
        worth_it=verdict.worth_it,
        summary=verdict.summary,
        seconds=max(0.0, evidence.finished_unix - evidence.started_unix),
        ttft={
            "cold": verdict.ttft_cold_s,
            "warm": verdict.ttft_warm_s,
            "restored": verdict.ttft_restored_s,
            "control": verdict.ttft_control_s,
        },
        tokens=tokens,
        conditions=verdict.conditions,
        causes=verdict.causes,
    )


def event_views(report: Report) -> list[EventView]:
    """The events of a report, in the order in which they were tried."""
    return [event_view(result) for result in report.results]


def load_hosts(folder: Path, host: str | None = None) -> list[HostView]:
    """Every host that has a report in ``folder``, or only ``host``; sorted by name.

    What cannot be read is listed with its host, never left out in silence.
    """
    found: dict[str, HostView] = {}
    for path in list_reports(folder, host):
        name = path.parent.name
        view = found.setdefault(name, HostView(name, name, [], []))
        try:
            report = load_report(path)
        except (OSError, ValueError):
            view.unreadable.append(path)
            continue
        if host_folder(report.host) != name:  # moved here by hand from another host
            view.unreadable.append(path)
            continue
        view.reports.append(report)
    named = []
    for name, view in found.items():
        stands = view.stands
        told = stands.host if stands else name
        after = since(folder, stands) if stands else None
        named.append(HostView(told, name, view.reports, view.unreadable, after))
    return sorted(named, key=lambda view: view.host)


class FleetHost(BaseModel):
    """``persisted``: the verdict that stands, of the report of ``time``; NONE where the newest file
    is not readable, or the host was removed, its drive released, or it was changed after the
    newest report, at ``removed``, ``released`` and ``changed`` (provisioned again, where it was
    removed or its drive released). ``left_out``: time of a newer report,
    whose test was left out."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str
    persisted: Standing
    time: str | None
    left_out: str | None
    removed: str | None
    changed: str | None
    released: str | None
    reports: list[Report]
    unreadable: list[str]


class Fleet(BaseModel):
    """What `kvhost report --json` prints: every host with its reports, oldest first."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_: Literal["kvhost/fleet/1"] = Field(default="kvhost/fleet/1", alias="schema")
    hosts: list[FleetHost]


def fleet(views: Sequence[HostView]) -> Fleet:
    return Fleet(
        hosts=[
            FleetHost(
                host=view.host,
                persisted=view.standing,
                time=view.stands.time if view.stands and view.standing != "NONE" else None,
                left_out=view.left_out.time if view.left_out else None,
                removed=view.since.removed if view.since else None,
                changed=view.since.changed if view.since else None,
                released=view.since.released if view.since else None,
                reports=view.reports,
                unreadable=[path.name for path in view.unreadable],
            )
            for view in views
        ]
    )


def fleet_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of `kvhost report --json`; a report has a schema of its own."""
    schema = Fleet.model_json_schema(by_alias=True, mode="serialization")
    defs = schema["$defs"]
    defs["FleetHost"]["properties"]["reports"]["items"] = {"$ref": "verdict-2.json"}
    schema["$defs"] = {"FleetHost": defs["FleetHost"]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


if __name__ == "__main__":  # python -m kvhost.reports.views > docs/schema/fleet-1.json
    json.dump(fleet_schema(), sys.stdout, indent=1, sort_keys=True)
    sys.stdout.write("\n")
