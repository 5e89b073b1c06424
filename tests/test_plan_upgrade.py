"""What the plan says of an upgrade, and that a failure is not repeated silently."""

from __future__ import annotations

from typing import Any

import pytest

from tests.plan_cases import FACTS, GIB, LOCK, absent, action, built, installed_host, ok, plan

ENVS = "/var/lib/kvhost/envs"
NEW, OLD, OLDER = LOCK[:16], "0" * 16, "1" * 16
SAID = {
    "lock": LOCK,
    "settings": FACTS.settings_digest,
    "time": "2026-01-01T00:00:00Z",
    "why": "the test was not passed",
    "env": f"{ENVS}/{NEW}",
    "back_to": f"{ENVS}/{OLD}",
    "state": "rolled back",
}


def env(name: str, size: int = GIB) -> dict[str, Any]:
    return built(name, marker={"bytes": size})


def manifest(name: str) -> dict[str, Any]:
    return ok({"env": f"{ENVS}/{name}", "time": "2026-01-01T000000Z"})


def host(*names: str, **kvhost: Any) -> dict[str, Any]:
    """An installed host with these environments; the last good one is OLD unless said."""
    changes = {
        **installed_host(),
        "kvhost.envs": ok([env(name) for name in names]),
        "kvhost.good": manifest(OLD),
        "kvhost.previous": absent(),
        "kvhost.failed": absent(),
    }
    return {**changes, **{f"kvhost.{key}": value for key, value in kvhost.items()}}


def gone(changes: dict[str, Any]) -> set[str]:
    """Environments that the plan says will be cleared away."""
    rows = [a for a in plan(changes).actions if "used no more" in a.what]
    return {name for row in rows for name in row.what.rpartition(": ")[2].split(", ")}


ROWS: list[tuple[str, dict[str, Any], set[str]]] = [
    ("nothing has passed yet", host(NEW, OLD, good=absent()), set()),
    ("an upgrade keeps the old one", host(NEW, OLD), set()),
    ("also before it is built", host(OLD), set()),
    ("what was before the old one goes", host(NEW, OLD, OLDER, previous=manifest(OLDER)), {OLDER}),
    ("without an upgrade the previous one stays",
     host(NEW, OLD, OLDER, good=manifest(NEW), previous=manifest(OLD)), {OLDER}),
    ("the failed one stays without an upgrade",
     host(NEW, OLD, good=manifest(NEW), failed=ok({**SAID, "env": f"{ENVS}/{OLD}"})), set()),
    ("the failed one goes when another passes",
     host(NEW, OLD, OLDER, failed=ok({**SAID, "lock": "x", "env": f"{ENVS}/{OLDER}"})), {OLDER}),
]  # fmt: skip


@pytest.mark.parametrize("what, changes, expected", ROWS, ids=[row[0] for row in ROWS])
def test_what_a_pass_would_clear_away(
    what: str, changes: dict[str, Any], expected: set[str]
) -> None:
    assert gone(changes) == expected


def test_the_space_is_told() -> None:
    changes = host(NEW, OLD, OLDER, previous=manifest(OLDER))
    assert action(plan(changes), "used no more").cost == "removes them and uv's cache, 1 GiB"


def test_an_upgrade_says_what_stays_and_what_it_goes_back_to() -> None:
    (note,) = [note for note in plan(host(OLD)).notes if "An upgrade" in note]
    assert f"{ENVS}/{OLD}" in note
    assert "2 GiB more on disk" in note
    assert not [note for note in plan(host(NEW, good=manifest(NEW))).notes if "upgrade" in note]


def codes(changes: dict[str, Any], **settings: Any) -> list[str]:
    return [refusal.code for refusal in plan(changes, **settings).refusals]


def test_the_same_again_is_refused_with_what_failed_and_when() -> None:
    (refusal,) = plan(host(NEW, OLD, failed=ok(SAID))).refusals
    assert refusal.code == "failed_before"
    for word in (SAID["time"], SAID["why"], SAID["env"], SAID["back_to"]):
        assert word in refusal.found


@pytest.mark.parametrize(
    "failed", [{"lock": "another"}, {"settings": "others"}, {"state": "rolling back"}]
)
def test_another_lock_or_other_settings_are_another_try(failed: dict[str, str]) -> None:
    assert codes(host(NEW, OLD, failed=ok({**SAID, **failed}))) == []


def test_asked_to_it_is_tried_again() -> None:
    assert codes(host(NEW, OLD, failed=ok(SAID)), retry_failed=True) == []


def test_what_failed_and_cannot_be_read_is_not_taken_for_nothing() -> None:
    torn = {"status": "unreadable", "why": "not JSON", "data": None}
    assert codes(host(NEW, OLD, failed=torn)) == ["unreadable"]
