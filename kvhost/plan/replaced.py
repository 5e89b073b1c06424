"""What it means that another runner takes the place of the one that a host has. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvhost.plan.host import installed, last_namespace
from kvhost.plan.types import PlanInputs, size
from kvhost.report import HostReport, Part
from kvhost.settings import Settings

TITLES = {"vllm": "vLLM", "llama_server": "llama-server", "ollama": "Ollama"}


def runner_before(report: HostReport) -> str | None:
    """The runner that the host's receipt is of; None where there is none, or it does not say."""
    kvhost = report.kvhost.data
    receipt: Any = kvhost.receipt.data if kvhost else None
    try:
        found = receipt.get("runner") or receipt["namespace"]["fields"].get("runner", "vllm")
    except (AttributeError, KeyError, TypeError):
        return None
    return found if isinstance(found, str) and found in TITLES else None


def replaced(settings: Settings, report: HostReport) -> str | None:
    """The runner that goes in this run; None where none does."""
    before = runner_before(report)
    return before if before != settings.runner else None


def replaced_notes(settings: Settings, report: HostReport, facts: PlanInputs) -> Iterator[str]:
    """Who replaces whom, and what becomes of environment, cache and verdict of before."""
    before = replaced(settings, report)
    if before is None:
        return
    old, new = TITLES[before], TITLES[settings.runner]
    goes = "whose services stop"
    if f"{settings.paths.etc}/ollama.conf" in _files(report):
        goes = "whose unit loses kvhost's drop-in and goes on as it was"
    yield f"Another runner: {new} replaces {old}, {goes}."
    yield _cache(settings, report, before)
    yield _verdict(settings, report, before)
    yield from _environment(settings, report, facts, before)


def _files(report: HostReport) -> Mapping[str, Any]:
    return (report.kvhost.data and report.kvhost.data.files.data) or {}


def _cache(settings: Settings, report: HostReport, before: str) -> str:
    old, new = TITLES[before], TITLES[settings.runner]
    last = last_namespace(report)
    if before == "ollama":
        there = "" if last is None else f", beside what an earlier runner left in {last.name}"
        return f"{old} kept no KV on disk: the cache of {new} begins with nothing of it{there}."
    what = f"The cache of {old}" + (f", {last.name}, {size(last.bytes)}," if last else "")
    if settings.runner == "ollama":
        return (
            f"{what} stays on disk, and nothing reads or prunes it any more; kvhost purge with the "
            "settings of before gives the space back."
        )
    return (
        f"{what} stays, for the way back, and is not read by {new}; it counts for the limit, and "
        "the pruner takes of it first."
    )


def _verdict(settings: Settings, report: HostReport, before: str) -> str:
    verified: Part[Any] | None = report.kvhost.data.verified if report.kvhost.data else None
    known = verified.data if verified and isinstance(verified.data, dict) else {}
    said, time = known.get("persisted"), known.get("time")
    when = f" of {time}" if time else ""
    what = f"The verdict{when}, {said}," if said else "A verdict of before"
    new = TITLES[settings.runner]
    then = "its own follows" if settings.verify != "never" else "it gets none (verify = never)"
    if settings.runner == "ollama" and settings.verify != "never":
        then = "nothing of it persists, by design"
    return f"{what} is of {TITLES[before]} and says nothing of {new}: {then}."


def _environment(
    settings: Settings, report: HostReport, facts: PlanInputs, before: str
) -> Iterator[str]:
    kvhost = report.kvhost.data
    good = kvhost.good.data if kvhost else None
    if not isinstance(good, dict) or kvhost is None:
        return
    passed = f"{good['env']}, which passed at {good.get('time')},"
    if settings.runner == "ollama":
        yield f"{passed} stays on disk; only a run with its settings goes back to it."
        return
    there = installed(kvhost.envs, facts.lock_digest)
    more = "" if there else f", {size(facts.env_disk_bytes)} more on disk"
    yield (
        f"The way back: {passed} stays until the new environment has passed, and one turn "
        f"longer{more}. A verdict that is not PASS, or services that do not answer, go back to it, "
        "to its configuration and to its cache"
        + (", and not to Ollama." if before == "ollama" else ".")
    )
