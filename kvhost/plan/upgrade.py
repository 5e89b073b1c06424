"""What an upgrade costs, what it clears away, and what failed before. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvhost.onhost.kept import kept
from kvhost.plan.host import installed
from kvhost.plan.replaced import replaced
from kvhost.plan.types import Action, PlanInputs, Refusal, size, unreadable
from kvhost.report import Built, HostReport, Kvhost
from kvhost.settings import Settings


def failed_before(settings: Settings, report: HostReport, facts: PlanInputs) -> Iterator[Refusal]:
    """The same lock with the same settings was gone back from: not again without being asked."""
    kvhost = report.kvhost.data
    if kvhost is None or settings.retry_failed:
        return
    if kvhost.failed.status == "unreadable":
        yield unreadable("engine", "what failed in an earlier run", kvhost.failed.why)
    failed = kvhost.failed.data
    if not isinstance(failed, dict) or failed.get("state") == "rolling back":
        return  # one that was broken off is completed first
    now = (facts.lock_digest, facts.settings_digest)
    if (failed.get("lock"), failed.get("settings")) == now:
        yield Refusal(
            "engine",
            "failed_before",
            f"the engine of this lock ({facts.lock_name}) failed here with these settings",
            "another lock or other settings, or to be asked to try again",
            f"at {failed.get('time')}: {failed.get('why')}; gone back to {failed.get('back_to')}, "
            f"the failed one is {failed.get('env')}",
            "retry_failed = true to try it again, or go back to the lock that passed",
        )


def upgrade(settings: Settings, report: HostReport, facts: PlanInputs) -> list[Action]:
    """What is removed once a new environment has passed: nothing when nothing is."""
    kvhost = report.kvhost.data
    if kvhost is None or not isinstance(kvhost.good.data, dict):
        return []
    gone = after_a_pass(kvhost, facts)
    if not gone:
        return []
    names = ", ".join(row.name for row in gone)
    freed = sum(env_bytes(row) or facts.env_disk_bytes for row in gone)
    what = f"environments used no more, once the verdict is PASS: {names}"
    cost = f"removes them and uv's cache, {size(freed)}"
    return [Action("verify", what, "change", cost)]


def after_a_pass(kvhost: Kvhost, facts: PlanInputs) -> list[Built]:
    """The environments that a PASS of this run would have cleared away."""
    envs, good = kvhost.envs.data or [], kvhost.good.data
    there = installed(kvhost.envs, facts.lock_digest)
    wanted = there.name if there else facts.lock_digest[:16]
    again = wanted in kept(good, current=None)
    # another one that passes takes the place of the last good one, which becomes the previous;
    # what had failed is no longer kept then
    others: tuple[Any, ...] = (kvhost.previous.data, kvhost.failed.data) if again else ()
    names = kept(good, *others, current=None, wanted=wanted)
    return [row for row in envs if row.name not in names]


def upgrade_notes(settings: Settings, report: HostReport, facts: PlanInputs) -> Iterator[str]:
    """What switching to another environment means, where one is in use already; of another runner
    replaced_notes() tells. And which ways back cannot be read."""
    yield from _unreadable_ways(report)
    if replaced(settings, report) is not None:
        return
    kvhost = report.kvhost.data
    good = kvhost.good.data if kvhost else None
    if not isinstance(good, dict) or kvhost is None:
        return
    there = installed(kvhost.envs, facts.lock_digest)
    if (there.name if there else facts.lock_digest[:16]) in kept(good, current=None):
        return
    more = "" if there else f", {size(facts.env_disk_bytes)} more on disk"
    yield (
        f"An upgrade: {good['env']}, which passed at {good.get('time')}, stays until the new "
        f"environment has passed, and one turn longer{more}. A verdict that is not PASS, or "
        "services that do not answer, go back to it, to its configuration and to its cache."
    )


def _unreadable_ways(report: HostReport) -> Iterator[str]:
    own = report.kvhost.data
    if own is not None and own.good.status == "unreadable":
        yield f"What passed last is unreadable, and there is no way back to it: {own.good.why}."
    if own is not None and own.previous.status == "unreadable":
        yield f"What passed before the last is unreadable: {own.previous.why}."


def env_bytes(row: Built) -> int | None:
    value = (row.marker or {}).get("bytes")
    return value if isinstance(value, int) else None
