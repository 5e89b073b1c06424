"""What is not refused, and where the limits lie."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvhost.plan.make import (
    choose_python,
    make_plan,
)
from kvhost.settings import Settings
from tests.plan_cases import (
    BASE,
    FACTS,
    GIB,
    LOCK,
    PCI,
    TIER,
    built,
    changed,
    listener,
    lock,
    ok,
    plan,
    python,
    service,
)


@pytest.mark.parametrize(
    "changes",
    [
        {"users.uid": 1000, "users.sudo": True},
        {"os.id": "ubuntu", "os.version_id": "22.04"},
        {"os.version_id": None},  # Debian testing
        {"os.id": "linuxmint", "os.version_id": "21", "os.id_like": ["ubuntu", "debian"]},
        {"memory.cgroup_limit": 7 * GIB, "memory.cgroup_used": GIB // 2},
        {"ports.listening": [listener(address="192.168.1.5"), listener(port=8001)]},
        {"ports.listening": [listener()], "kvhost.services": ok([service("runner", 77)])},
        {f"{TIER}.noexec": True},
        {f"{BASE}.blocked_by": "/var/lib/kvhost", f"{TIER}.blocked_by": "/var/lib/kvhost/tier"},
        {f"{BASE}.inodes": 0, f"{BASE}.inodes_free": 0},  # btrfs counts none
        {"kvhost.base": ok({"owner": "kvhost", "entries": ["state"]})},
        {"kvhost.base": ok({"owner": "nobody", "entries": []})},
        {"kvhost.run_lock": lock(1801)},
        {"gpu.amd.pci": PCI},
        {"gpu.nvidia.smi": {"exit": 9, "lines": ["no devices"]}},
        {"gpu.nvidia.smi": {"exit": 0, "lines": []}},
        {f"{BASE}.inodes_free": 60_000},
        {"shm.files": [{"name": "lmcache_x", "bytes": GIB, "uid": 1}]},  # no service user yet
        {f"{BASE}.avail": GIB, f"{TIER}.mount_point": "/mnt", f"{BASE}.inodes_free": 9,
         "kvhost.envs": ok([built(LOCK[:16])])},
        {f"{BASE}.avail": GIB, f"{TIER}.mount_point": "/mnt",
         "kvhost.envs": ok([built("cpu", marker={"lock": LOCK})])},
    ],
)  # fmt: skip
def test_these_are_fine(changes: dict[str, Any]) -> None:
    assert plan(changes).refusals == ()


def test_a_derivative_needs_a_python() -> None:
    changes = {"os.id": "devuan", "os.id_like": ["debian"], "pythons": ok([])}
    got = plan(changes).refusals
    assert [r.code for r in got] == ["unsupported_os", "no_python"]
    assert "with Python 3.11 or 3.12 or 3.13" in got[0].needed
    assert "devuan 12, like debian, and no such Python" in got[0].found


def test_an_unfinished_environment_needs_its_space_again() -> None:
    changes = {f"{BASE}.avail": GIB, f"{TIER}.mount_point": "/mnt"}
    left = ok([built(LOCK[:16], complete=False), built("34" * 8), built(LOCK[:8])])
    assert [r.code for r in plan({**changes, "kvhost.envs": left}).refusals] == ["disk_too_small"]


def test_what_our_own_services_hold_is_ours_to_use() -> None:
    account = {"name": "kvhost", "uid": 990, "gid": 990, "home": "/srv/kv/home",
               "shell": "/bin/false"}  # fmt: skip
    pool = {"name": "lmcache_l1_pool_kvhost", "bytes": GIB, "uid": 990}
    tight = {"memory.available": 2 * GIB, "shm.free": GIB // 8, "shm.files": [pool],
             "users.service_user": account}  # fmt: skip
    rows = [service("runner", 1, anon_bytes=3 * GIB, shmem_bytes=GIB),
            service("cache", 2, anon_bytes=GIB // 2, shmem_bytes=GIB)]  # fmt: skip
    held = {**tight, "kvhost.services": ok(rows)}
    assert plan(held).refusals == ()
    # the pool is one, though both map it
    assert [r.code for r in plan({**held, "memory.available": 2 * GIB - 1}).refusals] == [
        "ram_too_small"
    ]
    dead = [{**row, "alive": False, "pids": []} for row in rows]
    assert [r.code for r in plan({**tight, "kvhost.services": ok(dead)}).refusals] == [
        "ram_too_small"
    ]
    group = {"memory.cgroup_limit": 8 * GIB, "memory.cgroup_used": 6 * GIB}
    assert plan({**held, **group}).refusals == ()  # 4.5 of the 6 used are ours
    small = {"memory.cgroup_limit": 6 * GIB, "memory.cgroup_used": 0}  # never more than the limit
    assert [r.code for r in plan({**held, **small}).refusals] == ["ram_too_small"]
    foreign = {**held, "shm.files": [{**pool, "uid": 991}, {**pool, "bytes": 9, "name": "lmcache"}]}
    (refusal,) = plan(foreign).refusals
    assert refusal.code == "shm_too_small"
    assert refusal.found.endswith("already there: lmcache_l1_pool_kvhost 1 GiB")


@pytest.mark.parametrize(
    "age, stale, break_lock, free",
    [
        (1800, None, None, False),
        (1801, None, None, True),
        (60, True, None, True),
        (60, False, None, False),
        (60, None, "r1", True),
        (60, None, "r2", False),
        (1801, False, None, True),
    ],
)
def test_when_a_run_lock_is_taken_over(
    age: float, stale: bool | None, break_lock: str | None, free: bool
) -> None:
    facts = replace(FACTS, lock_is_stale=stale)
    got = plan({"kvhost.run_lock": lock(age)}, facts, break_lock=break_lock)
    assert (got.refusals == ()) == free
    assert any("Takes over the run lock of ann@laptop:4711" in n for n in got.notes) == free


def test_a_lock_without_a_run_id_is_not_free() -> None:
    nameless = ok({"content": {}, "age_s": 1.0})
    assert [r.code for r in plan({"kvhost.run_lock": nameless}).refusals] == ["run_in_progress"]


def test_listening_everywhere_meets_every_address() -> None:
    rows = {"ports.listening": [listener(address="192.168.1.5")]}
    report, facts = changed(rows), FACTS
    settings = Settings.model_construct(**{**Settings().model_dump(), "api_host": "0.0.0.0"})
    assert [r.code for r in make_plan(settings, report, facts).refusals] == ["port_taken"]


def test_the_newest_python_is_chosen_and_one_asked_for_is_kept() -> None:
    rows = [
        python(),
        python("/usr/bin/python3.13", "3.13.1"),
        python("/usr/bin/python3.9", "3.9.1"),
    ]
    rows.append({**python("/x/python3.13", "3.13.9"), "usable_by_service": False})
    report = changed({"pythons": ok(rows)})

    def chosen(covered: tuple[str, ...] = FACTS.lock_pythons, **settings: Any) -> str | None:
        found = choose_python(Settings(**settings), report, covered)
        return found.path if found else None

    assert chosen() == "/usr/bin/python3.13"
    assert chosen(("3.11",)) == "/usr/bin/python3.11"
    assert chosen(python="/usr/bin/python3.11") == "/usr/bin/python3.11"
    assert chosen(python="/usr/bin/python3.9") is None
    assert chosen(("3.12",)) is None
