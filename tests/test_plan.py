"""Every refusal of the plan, each from the smallest change to a healthy host."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvhost.plan import memory as plan_memory
from kvhost.plan import refusals as plan_refusals
from kvhost.plan import storage as plan_storage
from kvhost.plan.make import (
    ModelNeed,
    refused,
)
from tests.plan_cases import (
    BASE,
    FACTS,
    GIB,
    ON_SITE,
    TIER,
    absent,
    account,
    fixes,
    listener,
    lock,
    model_dir,
    namespace,
    ok,
    parts,
    plan,
    python,
    service,
)

# code, what changes on the host, what changes elsewhere, words that needed and found must have
REFUSALS: list[tuple[str, dict[str, Any], dict[str, Any], str, str]] = [
    ("not_root", {"users.uid": 1000, "users.sudo": False, "users.name": "ann"}, {},
     "uid 0", "ann (uid 1000)"),
    ("foreign_account", {"users.service_user": account(shell="/bin/bash")}, {},
     "shell nologin", "shell /bin/bash"),
    ("foreign_account", {"users.service_user": account(uid=1000)}, {}, "below 1000", "uid 1000"),
    ("foreign_account", {"users.service_user": account(uid=0)}, {}, "kvhost's own", "uid 0"),
    ("foreign_account", {"users.service_user": account(home="/var/www")}, {}, "kvhost's own",
     "home /var/www"),
    ("run_in_progress", {"kvhost.run_lock": lock()}, {}, "30 min",
     "r1 of ann@laptop:4711, alive 60 s"),
    ("unit_taken", {"pid1.systemd": True, "kvhost.units": ok([
        {"path": "/etc/systemd/system/kvhost-cache.service", "ours": False}])}, {},
     "kvhost wrote for /var/lib/kvhost", "another's unit, a link, or masked"),
    ("unit_taken", {"pid1.systemd": True, "kvhost.units": ok([
        {"path": "/etc/systemd/system/kvhost-cache.service", "ours": False,
         "installation": "/srv/kv"}])}, {},
     "one installation", "base_dir /srv/kv there, /var/lib/kvhost here"),
    ("unsupported_os", {"os.version_id": "11"}, {}, "Debian 12", "debian 11"),
    ("unsupported_os", {"os.id": "ubuntu", "os.version_id": "20.04"}, {}, "22.04", "ubuntu 20.04"),
    ("unsupported_os", {"os.id": "fedora", "os.version_id": "42"}, {}, "Debian 12", "fedora 42"),
    ("wrong_arch", {"arch.machine": "aarch64"}, {}, "x86_64", "aarch64"),
    ("no_avx2", {"cpus.flags": []}, {}, "AVX2", "A CPU"),
    ("ram_too_small", {"memory.available": int(6.5 * GIB) - 1}, {},
     "6.5 GiB: weights 1 GiB, engine_kv_gib 1 GiB, l1_gib 1 GiB, processes 3.5 GiB",
     "6.5 GiB free for kvhost, of 8 GiB"),
    ("ram_too_small", {"memory.cgroup_limit": 6 * GIB, "memory.cgroup_used": 0}, {},
     "6.5 GiB", "6 GiB free for kvhost, of a cgroup limit of 6 GiB"),
    ("ram_too_small", {"memory.cgroup_limit": 8 * GIB, "memory.cgroup_used": 2 * GIB}, {},
     "6.5 GiB", "6 GiB free for kvhost, of a cgroup limit of 8 GiB"),
    ("shm_too_small", {"shm.free": int(1.125 * GIB) - 1}, {},
     "1.1 GiB: l1_gib 1 GiB and 128 MiB", "1.1 GiB free of 2 GiB"),
    ("shm_too_small", {"shm": absent()}, {}, "1.1 GiB", "it does not exist"),
    ("port_taken", {"ports.listening": [listener()]}, {},
     "127.0.0.1:8000 free", "process 77 (nginx) of uid 33 listens on 127.0.0.1:8000"),
    ("port_taken", {"ports.listening": [listener(address="::", port=5555)]}, {},
     "127.0.0.1:5555 free", "process 77 (nginx) of uid 33 listens on :::5555"),
    ("port_taken", {"ports.listening": [listener(address="::ffff:127.0.0.1", port=8085)]}, {},
     "127.0.0.1:8085", "nginx"),
    ("port_taken", {"ports.listening": [listener(pid=None, comm=None)]}, {},
     "127.0.0.1:8000", "a process not seen from here of uid 33"),
    ("port_taken",
     {"ports.listening": [listener()], "kvhost.services": ok([service("runner", 78)])}, {},
     "kvhost's own", "process 77"),
    ("not_a_directory", {f"{BASE}.directory": False, f"{BASE}.ancestor": "/var/lib/kvhost"}, {},
     "directories", "/var/lib/kvhost is not"),
    ("read_only", {f"{BASE}.read_only": True}, {}, "rw", "ext4 at /, ro"),
    ("read_only", {f"{TIER}.read_only": True}, {}, "rw", "ext4 at /, ro"),
    ("noexec", {f"{BASE}.noexec": True}, {}, "noexec", "ext4 at /, noexec"),
    ("lost_at_reboot", {f"{BASE}.fs": "tmpfs"}, {}, "survives", "tmpfs at /, 100 GiB"),
    ("lost_at_reboot", {f"{TIER}.fs": "ramfs"}, {}, "survives", "ramfs at /, 100 GiB"),
    ("through_a_link", {f"{TIER}.real_path": "/etc/kv"}, {}, "without links", "leads to /etc/kv"),
    ("not_passable", {f"{BASE}.blocked_by": "/srv"}, {}, "open (x)", "/srv is not"),
    ("not_passable", {f"{TIER}.blocked_by": "/var/lib/kvhost-old"}, {},
     "open (x)", "/var/lib/kvhost-old"),
    ("path_taken", {"kvhost.base": ok({"owner": "foreign", "entries": ["cat.jpg"]})}, {},
     "kvhost's own", "1 or more entries: cat.jpg"),
    ("path_taken", {"kvhost.tier": ok({"namespaces": [], "foreign": ["photos"]})}, {},
     "holds kvhost's namespaces", "photos"),
    ("disk_too_small", {f"{BASE}.avail": 2 * GIB, f"{TIER}.mount_point": "/mnt"}, {},
     "2.1 GiB: the engine's environment 2 GiB, the model 55 MiB", "2 GiB of 100 GiB"),
    ("disk_too_small", {f"{TIER}.avail": 22 * GIB - 1, f"{TIER}.mount_point": "/mnt"}, {},
     "22 GiB: cache_limit_gib 20 GiB, free_floor_gib 2 GiB", "22 GiB of 100 GiB"),
    ("disk_too_small", {f"{BASE}.avail": 23 * GIB, f"{TIER}.avail": 23 * GIB}, {},
     "24.1 GiB: the engine's environment 2 GiB, the model 55 MiB, cache_limit_gib", "23 GiB"),
    ("disk_too_small", {f"{TIER}.avail": 11 * GIB, f"{TIER}.mount_point": "/mnt",
     "kvhost.tier": ok({"namespaces": [namespace("ns-1", 10 * GIB)], "foreign": []})}, {},
     "22 GiB", "21 GiB of 100 GiB, 10 GiB of it the cache's own files"),
    ("too_few_inodes", {f"{BASE}.inodes_free": 59_999}, {}, "60000", "59999 free of 10000000"),
    ("no_python", {"pythons": ok([])}, {},
     "3.11, 3.12, 3.13", "no Python 3.11 to 3.13 in /usr/bin"),
    ("no_python", {"pythons.0.version": "3.10.12"}, {},
     "3.11, 3.12, 3.13", "python3.11 is 3.10.12"),
    ("no_python", {"pythons.0.usable_by_service": False, "pythons.0.blocked_by": "/root"}, {},
     "which kvhost can run", "is 3.11.2, closed to kvhost by /root"),
    ("no_python", {"pythons.0.error": "exits 127", "pythons.0.usable_by_service": False}, {},
     "which kvhost can run", "/usr/bin/python3.11 exists, but exits 127"),
    ("no_python", {}, {"python": "/opt/python3.12"}, "3.12", "/usr/bin/python3.11 is 3.11.2"),
    ("no_python", {}, {"lock_pythons": ("3.12",)}, "Python 3.12", "/usr/bin/python3.11 is 3.11.2"),
    ("no_model", {}, {"model_source": "/m"}, "config.json and safetensors at /m", "does not exist"),
    ("no_model", {"model": model_dir(files=[])}, {"model_source": "/m"}, "at /m", "0 files"),
    ("model_closed", {"model": model_dir(closed=["a.safetensors"])}, {"model_source": "/m"},
     "readable (r)", "1 file without that right: a.safetensors"),
    ("model_closed", {"model": model_dir(blocked_by="/data2")}, {"model_source": "/m"},
     "passable (x)", "/data2 is not passable"),
    ("context_too_long", {}, {"max_model_len": 40961}, "40960 tokens", "40961 tokens"),
    ("kv_too_small", {}, {"model": ModelNeed(GIB, 32769, 40960)},
     "1 GiB: 32768 tokens of 32 KiB each", "engine_kv_gib = 1 GiB"),
    ("heads_not_divisible", {"memory.available": 64 * GIB},
     {"model": ModelNeed(GIB, 8192, 40960, heads=6), "tensor_parallel_size": 4},
     "divides 6 heads", "tensor_parallel_size = 4"),
]  # fmt: skip


def test_a_healthy_host_is_not_refused() -> None:
    got = plan()
    assert got.refusals == ()
    assert not refused(got)


@pytest.mark.parametrize("code, host, other, needed, found", REFUSALS)
def test_each_refusal(
    code: str, host: dict[str, Any], other: dict[str, Any], needed: str, found: str
) -> None:
    facts, settings = parts(other)
    got = plan(host, facts, **settings)
    assert [refusal.code for refusal in got.refusals] == [code]
    assert refused(got)
    (refusal,) = got.refusals
    assert needed in refusal.needed
    assert found in refusal.found
    assert refusal.what
    assert refusal.fix


def test_every_refusal_in_the_code_is_in_the_table() -> None:
    written = set()
    for module in (plan_memory, plan_refusals, plan_storage):
        for call in ast.walk(ast.parse(Path(str(module.__file__)).read_text())):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
                place = {"Refusal": 1, "no": 0}.get(call.func.id)
                code = call.args[place] if place is not None else None
                if isinstance(code, ast.Constant):
                    written.add(code.value)
    assert written == {row[0] for row in REFUSALS}


@pytest.mark.parametrize(
    "part",
    ["os", "arch", "memory", "shm", "cpus", "disks", "users", "pythons", "gpu", "ports", "kvhost",
     BASE, TIER, "kvhost.base", "kvhost.run_lock", "kvhost.services", "kvhost.tier",
     "kvhost.envs", "kvhost.models", "pid1"],
)  # fmt: skip
def test_what_a_decision_needs_and_cannot_be_read_is_refused(part: str) -> None:
    got = plan({part: {"status": "unreadable", "why": ON_SITE, "data": None}})
    assert {refusal.code for refusal in got.refusals} == {"unreadable"}
    assert {refusal.found for refusal in got.refusals} == {ON_SITE}


@pytest.mark.parametrize(
    "part, note",
    [
        ("mounts", ""),
        ("packages", ""),
        ("model", ""),
        ("kvhost.current", ""),
        ("kvhost.files", ""),
        ("kvhost.receipt", f"The receipt of the last run is unreadable: {ON_SITE}."),
        ("adoptable", f"What could be adopted here is not known: {ON_SITE}."),
    ],
)
def test_what_no_decision_needs_is_not_refused(part: str, note: str) -> None:
    got = plan({part: {"status": "unreadable", "why": ON_SITE, "data": None}})
    assert got.refusals == ()
    assert [n for n in got.notes if ON_SITE in n] == [note] * bool(note)


def test_an_unreadable_gpu_matters_only_to_auto() -> None:
    unreadable = {"gpu": {"status": "unreadable", "why": ON_SITE, "data": None}}
    assert plan(unreadable, accelerator="cpu").refusals == ()


def test_an_unreadable_model_directory_matters_only_when_it_is_the_model() -> None:
    unreadable = {"model": {"status": "unreadable", "why": ON_SITE, "data": None}}
    assert [r.code for r in plan(unreadable, model_source="/m").refusals] == ["unreadable"]


def test_all_refusals_come_at_once() -> None:
    got = plan({"users.uid": 1, "cpus.flags": [], "pythons": ok([])}, max_model_len=50000)
    assert [r.code for r in got.refusals] == [
        "not_root",
        "no_avx2",
        "no_python",
        "context_too_long",
    ]


def test_every_python_that_was_seen_is_named_with_what_keeps_it_out() -> None:
    rows = [
        {**python("/a/python3.11"), "usable_by_service": False, "error": "exits 1"},
        python("/b/python3.10", "3.10.1"),
        {**python("/c/python3.12", "3.12.1"), "usable_by_service": False},
        {**python("/d/python3.9", "3.9.1"), "usable_by_service": False},
    ]
    (refusal,) = plan({"pythons": ok(rows)}).refusals
    assert refusal.found == (
        "/a/python3.11 exists, but exits 1; /b/python3.10 is 3.10.1; "
        "/c/python3.12 is 3.12.1, closed to kvhost; /d/python3.9 is 3.9.1"
    )
    assert "at /e/python3.11 (setting python)" in plan(python="/e/python3.11").refusals[0].what


def test_on_another_architecture_avx2_is_not_asked_for() -> None:
    arm = {"arch.machine": "aarch64", "cpus.flags": ["asimd"]}
    assert plan(arm, replace(FACTS, lock_arch="aarch64")).refusals == ()
    assert [r.code for r in plan(arm).refusals] == ["wrong_arch"]
    unread = {"cpus": {"status": "unreadable", "why": ON_SITE, "data": None}}
    assert plan({**arm, **unread}, replace(FACTS, lock_arch="aarch64")).refusals == ()


def test_the_stage_of_a_refusal_is_where_it_belongs() -> None:
    unread = {"status": "unreadable", "why": ON_SITE, "data": None}
    for part, stage in (("kvhost.envs", "engine"), ("kvhost.models", "model")):
        assert [r.stage for r in plan({part: unread}).refusals] == [stage]


def test_a_base_dir_that_is_a_file_is_refused_once() -> None:
    unread = {"status": "unreadable", "why": "is not a directory", "data": None}
    file = {f"{BASE}.directory": False, "kvhost.base": unread}
    assert [r.code for r in plan(file).refusals] == ["not_a_directory"]
    assert [r.code for r in plan({f"{BASE}.directory": False}).refusals] == ["not_a_directory"]


def test_a_cache_limit_is_offered_only_where_it_would_help() -> None:
    apart = {f"{TIER}.mount_point": "/mnt"}
    assert "cache_limit_gib" not in fixes({**apart, f"{TIER}.avail": 3 * GIB - 1})
    assert "cache_limit_gib to 1," in fixes({**apart, f"{TIER}.avail": 3 * GIB})
    assert "cache_limit_gib" not in fixes({**apart, f"{BASE}.avail": 2 * GIB})


def test_fixes_name_values_that_work() -> None:
    small = {f"{TIER}.avail": 21 * GIB, f"{TIER}.mount_point": "/mnt"}
    assert "cache_limit_gib to 19" in fixes(small)
    assert plan(small, cache_limit_gib=19.0).refusals == ()
    need = ModelNeed(GIB, 65536, 40960)
    words = fixes({}, {"model": need})
    assert "engine_kv_gib = 2, or max_model_len = 16384, or kv_cache_dtype = 'fp8'" in words
    assert "fp8" not in fixes({}, {"model": need, "kv_cache_dtype": "fp8"})
    facts = replace(FACTS, model=need)
    assert plan({}, facts, max_model_len=16384).refusals == ()
    assert plan({"memory.available": 8 * GIB}, facts, engine_kv_gib=2).refusals == ()
    assert fixes({}, {"max_model_len": 40961}) == "max_model_len = 40960"
    here = {"model_source": "/m"}
    assert fixes({"model": model_dir(blocked_by="/data2")}, here) == "chmod o+x /data2"
    assert fixes({"model": model_dir(closed=["a"])}, here) == "chmod o+r /m/*"
    mint = {"os.id": "mint", "os.id_like": ["debian"], "pythons": ok([])}
    assert fixes(mint) == "install such a Python"
    assert fixes({"os.id": "fedora"}) == "use a supported system"
    assert "break_lock = 'r1'" in fixes({"kvhost.run_lock": lock()})


def test_a_torn_run_lock_is_refused_until_a_person_gives_it_up() -> None:
    torn = {"kvhost.run_lock": {"status": "unreadable", "why": "no JSON", "data": None}}
    (refusal,) = plan(torn).refusals
    assert refusal.code == "unreadable"
    assert "break_lock = 'unreadable'" in refusal.fix
    assert plan(torn, break_lock="unreadable").refusals == ()
