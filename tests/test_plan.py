"""The plan: every refusal, note and action, each from the smallest change to a healthy host."""

from __future__ import annotations

import ast
import copy
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvhost import plan_refusals, plan_storage
from kvhost.plan import (
    Action,
    ModelNeed,
    Plan,
    PlanInputs,
    Refusal,
    choose_python,
    make_plan,
    plan_to_json,
    refused,
)
from kvhost.plan_types import size
from kvhost.plan_view import render_plans
from kvhost.report import HostReport
from kvhost.settings import Settings

GIB = 1 << 30
LOCK, TOOLS, BUILTIN, CONFIG = "ab" * 32, "cd" * 32, "12" * 32, "34" * 32
FACTS = PlanInputs(
    lock_name="cpu-x86_64-py3.11",
    lock_digest=LOCK,
    lock_pythons=("3.11", "3.12", "3.13"),
    lock_arch="x86_64",
    download_bytes=470 << 20,
    env_disk_bytes=2 * GIB,
    third_party_build=False,
    tools_digest=TOOLS,
    settings_digest="ef" * 32,
    model=ModelNeed(weights_bytes=GIB, kv_bytes_per_token=8192, max_context=40960),
    builtin_digest=BUILTIN,
    builtin_bytes=55 << 20,
    engine_config_digest=CONFIG,
    engine_config={"chunk_size": 512, "dtype": "bfloat16"},
    rendered={},
)


def ok(data: Any) -> dict[str, Any]:
    return {"status": "ok", "why": None, "data": data}


def absent() -> dict[str, Any]:
    return {"status": "absent", "why": "it does not exist", "data": None}


def disk(path: str) -> dict[str, Any]:
    row = {"path": path, "ancestor": "/var/lib", "exists": False, "directory": True,
           "mount_point": "/", "fs": "ext4", "read_only": False, "noexec": False,
           "total": 100 * GIB, "free": 60 * GIB, "avail": 50 * GIB, "inodes": 10**7,
           "inodes_free": 10**6, "blocked_by": None}  # fmt: skip
    return {"path": path, "disk": ok(row)}


def python(path: str = "/usr/bin/python3.11", version: str = "3.11.2") -> dict[str, Any]:
    return {"path": path, "version": version, "usable_by_service": True, "blocked_by": None,
            "ensurepip": True, "venv": True, "error": None}  # fmt: skip


def listener(**more: Any) -> dict[str, Any]:
    return {"address": "127.0.0.1", "port": 8000, "uid": 33, "pid": 77, "comm": "nginx", **more}


def built(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "complete": True, "marker": {}, "why": None, "bytes": None, **more}


def namespace(name: str, count: int, mtime: float = 1.0, meta: Any = None) -> dict[str, Any]:
    return {"name": name, "metadata": ok(meta) if meta else absent(), "files": 1, "bytes": count,
            "newest_mtime": mtime}  # fmt: skip


def service(name: str, pid: int, **more: Any) -> dict[str, Any]:
    return {"name": name, "record": {"pid": pid}, "alive": True, "pids": [pid], "anon_bytes": 0,
            "shmem_bytes": 0, **more}  # fmt: skip


def lock(age_s: float = 60.0) -> dict[str, Any]:
    content = {"run_id": "r1", "user": "ann", "controller": "laptop", "controller_id": "m1",
               "pid": 4711, "started_unix": 1.0, "refreshed_unix": 2.0}  # fmt: skip
    return ok({"content": content, "age_s": age_s})


def healthy() -> dict[str, Any]:
    """A Debian 12 host on which nothing is installed, with just enough of everything."""
    base = "/var/lib/kvhost"
    return {
        "kvhost_report": 1,
        "time_unix": 1.0,
        "os": ok({"id": "debian", "version_id": "12", "id_like": [], "pretty": "Debian 12"}),
        "arch": ok({"machine": "x86_64", "kernel": "6.1"}),
        "pid1": ok({"comm": "bash", "systemd": False, "container": "docker"}),
        "memory": ok({"total": 8 * GIB, "available": int(6.5 * GIB), "cgroup_limit": None,
                      "cgroup_used": None}),
        "shm": ok({"size": 2 * GIB, "free": int(1.125 * GIB), "files": []}),
        "cpus": ok({"count": 2, "quota": None, "flags": ["avx2"], "model": "A CPU"}),
        "mounts": ok([]),
        "disks": ok([disk(base), disk(f"{base}/tier")]),
        "users": ok({"name": "root", "uid": 0, "gid": 0, "sudo": None, "service_user": None,
                     "login_users": []}),
        "pythons": ok([python()]),
        "gpu": ok({"nvidia": {"pci": [], "nodes": [], "driver": None, "smi": None},
                   "amd": {"pci": []}}),
        "ports": ok({"wanted": [], "listening": [listener(port=22)]}),
        "packages": ok({"libnuma1": "installed"}),
        "kvhost": ok({"base": absent(), "receipt": absent(), "current": absent(),
                      "envs": absent(), "tools": absent(), "models": absent(), "tier": absent(),
                      "services": absent(), "run_lock": absent(), "files": ok({})}),
        "model": absent(),
        "adoptable": ok({"processes": [], "hf_caches": [], "units": []}),
    }  # fmt: skip


def changed(changes: dict[str, Any]) -> HostReport:
    """The healthy report with values at dotted paths replaced; "data" of parts is implied."""
    report = healthy()
    for path, value in changes.items():
        *way, last = path.split(".")
        at: Any = report
        for step in way:
            at = at[int(step)] if isinstance(at, list) else at[step]
            at = at["data"] if isinstance(at, dict) and "data" in at else at
        at[int(last) if isinstance(at, list) else last] = copy.deepcopy(value)
    return HostReport.model_validate(report)


def plan(changes: dict[str, Any] | None = None, facts: PlanInputs = FACTS, **settings: Any) -> Plan:
    return make_plan(Settings(**settings), changed(changes or {}), facts)


TIER = "disks.1.disk"
BASE = "disks.0.disk"
PCI = [{"address": "0000:01:00.0", "device_class": "0x030000", "device": "0x2684"}]
NVIDIA = {"nvidia": {"pci": PCI, "nodes": [], "driver": None, "smi": None}, "amd": {"pci": []}}


def model_dir(**more: Any) -> dict[str, Any]:
    files = [{"name": "config.json", "bytes": 1}]
    return ok({"path": "/m", "files": files, "closed": [], "blocked_by": None, "config": ok({}),
               **more})  # fmt: skip


# code, what changes on the host, what changes elsewhere, words that needed and found must have
REFUSALS: list[tuple[str, dict[str, Any], dict[str, Any], str, str]] = [
    ("not_root", {"users.uid": 1000, "users.sudo": False, "users.name": "ann"}, {},
     "uid 0", "ann (uid 1000)"),
    ("run_in_progress", {"kvhost.run_lock": lock()}, {}, "30 min",
     "r1 of ann@laptop:4711, alive 60 s"),
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
    ("not_passable", {f"{BASE}.blocked_by": "/srv"}, {}, "open (x)", "/srv is not"),
    ("not_passable", {f"{TIER}.blocked_by": "/var/lib/kvhost-old"}, {},
     "open (x)", "/var/lib/kvhost-old"),
    ("path_taken", {"kvhost.base": ok({"owner": "foreign", "entries": ["cat.jpg"]})}, {},
     "kvhost's own", "1 or more entries: cat.jpg"),
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
    ("cuda_not_in_this_version", {}, {"accelerator": "cuda"}, "cpu", "no NVIDIA GPU"),
    ("cuda_not_in_this_version", {"gpu": ok(NVIDIA)}, {"accelerator": "cuda"}, "cpu",
     "0000:01:00.0"),
    ("gpu_would_idle", {"gpu": ok(NVIDIA)}, {}, "without an NVIDIA GPU", "0000:01:00.0"),
    ("gpu_would_idle", {"gpu.nvidia.nodes": ["/dev/nvidia0"]}, {}, "without", "/dev/nvidia0"),
    ("gpu_would_idle", {"gpu.nvidia.smi": {"exit": 0, "lines": ["RTX 5090, 32 GiB"]}}, {},
     "without", "RTX 5090, 32 GiB"),
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
     "readable (r)", "1 files are not: a.safetensors"),
    ("model_closed", {"model": model_dir(blocked_by="/data2")}, {"model_source": "/m"},
     "passable (x)", "/data2 is not passable"),
    ("context_too_long", {}, {"max_model_len": 40961}, "40960 tokens", "40961 tokens"),
    ("kv_too_small", {}, {"model": ModelNeed(GIB, 32769, 40960)},
     "1 GiB: 32768 tokens of 32 KiB each", "engine_kv_gib = 1 GiB"),
]  # fmt: skip


def parts(other: dict[str, Any]) -> tuple[PlanInputs, dict[str, Any]]:
    """What a row changes elsewhere: fields of PlanInputs, the rest are settings."""
    fields = {k: v for k, v in other.items() if k in PlanInputs.__dataclass_fields__}
    return replace(FACTS, **fields), {k: v for k, v in other.items() if k not in fields}


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
    for module in (plan_refusals, plan_storage):
        for call in ast.walk(ast.parse(Path(str(module.__file__)).read_text())):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
                place = {"Refusal": 1, "no": 0}.get(call.func.id)
                code = call.args[place] if place is not None else None
                if isinstance(code, ast.Constant):
                    written.add(code.value)
    assert written == {row[0] for row in REFUSALS}


ON_SITE = "run as root and read /proc/x"


@pytest.mark.parametrize(
    "part",
    ["os", "arch", "memory", "shm", "cpus", "disks", "users", "pythons", "gpu", "ports", "kvhost",
     BASE, TIER, "kvhost.base", "kvhost.run_lock", "kvhost.services", "kvhost.tier",
     "kvhost.envs", "kvhost.models"],
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
        ("pid1", f"What PID 1 is could not be read: {ON_SITE}."),
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


def fixes(changes: dict[str, Any], other: dict[str, Any] | None = None) -> str:
    facts, settings = parts(other or {})
    return plan(changes, facts, **settings).refusals[0].fix


def test_fixes_name_values_that_work() -> None:
    small = {f"{TIER}.avail": 21 * GIB, f"{TIER}.mount_point": "/mnt"}
    assert "cache_limit_gib to 19" in fixes(small)
    assert plan(small, cache_limit_gib=19.0).refusals == ()
    need = ModelNeed(GIB, 65536, 40960)
    assert "engine_kv_gib = 2, or max_model_len = 16384" in fixes({}, {"model": need})
    facts = replace(FACTS, model=need)
    assert plan({}, facts, max_model_len=16384).refusals == ()
    assert plan({"memory.available": 8 * GIB}, facts, engine_kv_gib=2).refusals == ()
    assert fixes({}, {"max_model_len": 40961}) == "max_model_len = 40960"
    assert "break_lock = 'ann@laptop:4711'" in fixes({"kvhost.run_lock": lock()})


# --- what is not refused


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
    account = {"name": "kvhost", "uid": 990, "gid": 990, "home": "/", "shell": "/bin/false"}
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
    foreign = {**held, "shm.files": [{**pool, "uid": 991}]}
    (refusal,) = plan(foreign).refusals
    assert refusal.code == "shm_too_small"
    assert "already there: lmcache_l1_pool_kvhost 1 GiB" in refusal.found


@pytest.mark.parametrize(
    "age, stale, break_lock, free",
    [
        (1800, None, None, False),
        (1801, None, None, True),
        (60, True, None, True),
        (60, False, None, False),
        (60, None, "ann@laptop:4711", True),
        (60, None, "r1", True),
        (60, None, "bob@laptop:4711", False),
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


# --- actions


def installed_host() -> dict[str, Any]:
    """Everything is there and runs."""
    name = f"ns-{CONFIG[:24]}"
    return {
        "users.service_user": {"name": "kvhost", "uid": 990, "gid": 990, "home": "/",
                               "shell": "/bin/false"},
        f"{BASE}.exists": True,
        f"{TIER}.exists": True,
        "kvhost.base": ok({"owner": "kvhost", "entries": ["state"]}),
        "kvhost.tools": ok([built(TOOLS)]),
        "kvhost.envs": ok([built(LOCK[:24])]),
        "kvhost.current": ok({"target": f"/var/lib/kvhost/envs/{LOCK[:24]}", "resolves": True}),
        "kvhost.models": ok([built(BUILTIN[:16])]),
        "kvhost.tier": ok({"namespaces": [namespace(name, GIB)], "foreign": []}),
        "kvhost.services": ok([service("runner", 1), service("cache", 2)]),
    }  # fmt: skip


def action(got: Plan, words: str) -> Action:
    (found,) = [a for a in got.actions if words in a.what]
    return found


def test_nothing_changes_on_an_installed_host() -> None:
    got = plan(installed_host())
    assert {a.state for a in got.actions} == {"keep"}
    assert {a.cost for a in got.actions} == {None}
    assert got.refusals == ()
    assert got.notes == ()


def test_everything_changes_on_a_bare_host_and_in_order() -> None:
    got = plan({"packages.libnuma1": "absent"})
    stages = [a.stage for a in got.actions]
    order = ["host", "storage", "accelerator", "engine", "model", "cache", "runner", "verify"]
    assert list(dict.fromkeys(stages)) == order
    assert {a.what for a in got.actions if a.state != "change"} == {
        "the CPU engine, no accelerator", "scripts and configuration"
    }  # fmt: skip
    engine = action(got, "engine cpu-x86_64-py3.11 for Python 3.11 (/usr/bin/python3.11)")
    assert engine.cost == "downloads 470 MiB, 2 GiB on disk"
    assert action(got, "built-in model").cost == "55 MiB on disk"
    assert action(got, "packages libnuma1").state == "change"
    assert (
        "This run downloads 470 MiB and takes 2.1 GiB of disk; the cache may grow to 20 GiB."
        in (got.notes)
    )


@pytest.mark.parametrize(
    "changes, what, cost",
    [
        ({"kvhost.tools": ok([built("34" * 32)])}, "tools", None),
        ({"users.service_user": None}, "user kvhost", None),
        ({f"{TIER}.exists": False}, "(tier_dir)", None),
        ({"packages.libnuma1": "absent"}, "packages", None),
        ({"kvhost.current.target": "/var/lib/kvhost/envs/other"}, "switch",
         "restarts the cache server and the runner"),
        ({"kvhost.current.resolves": False}, "switch", "restarts the cache server and the runner"),
        ({"kvhost.models": absent()}, "model", "55 MiB on disk"),
        ({"kvhost.services": ok([service("cache", 2)])}, "the runner", "starts the runner"),
        ({"kvhost.services": ok([service("runner", 2)])}, "the cache", "starts the cache server"),
    ],
)  # fmt: skip
def test_each_drift_is_a_change_of_its_own(
    changes: dict[str, Any], what: str, cost: str | None
) -> None:
    got = plan({**installed_host(), **changes})
    found = action(got, what)
    assert (found.state, found.cost) == ("change", cost)
    others = {a.stage for a in got.actions if a.state == "change" and a is not found}
    renewed = found.stage == "engine"  # a new engine restarts both services
    assert others == {"verify"} | ({"cache", "runner"} if renewed else set())


@pytest.mark.parametrize(
    "file, stage, cost",
    [
        ("etc/cache.json", "cache", "restarts the cache server"),
        ("etc/runner.json", "runner", "restarts the runner"),
        ("bin/launch.py", "host", None),
    ],
)
@pytest.mark.parametrize("on_host", ["same", "other", "missing"])
def test_files_that_differ_restart_what_reads_them(
    file: str, stage: str, cost: str | None, on_host: str
) -> None:
    path = f"/var/lib/kvhost/{file}"
    row = {"uid": 0, "mode": "0644", "sha256": "1" if on_host == "same" else "2"}
    files = {} if on_host == "missing" else {path: row}
    facts = replace(FACTS, rendered={path: "1"})
    got = plan({**installed_host(), "kvhost.files": ok(files)}, facts)
    found = [(a.stage, a.cost) for a in got.actions if a.state == "change" and file in a.what]
    assert found == ([] if on_host == "same" else [(stage, cost)])


def test_a_new_namespace_says_what_it_abandons_and_why() -> None:
    old = {"chunk_size": 256, "dtype": "bfloat16", "gone": 1}
    rows = [namespace("ns-old", 5 * GIB, 1.0), namespace("ns-last", 41 * GIB, 2.0, old)]
    tier = ok({"namespaces": rows, "foreign": []})
    got = plan({**installed_host(), "kvhost.tier": tier}, cache_limit_gib=60.0)
    assert action(got, "namespace ns-3434").cost == (
        "abandons 41 GiB of cache: new namespace (chunk_size 256 → 512)"
    )
    rows[1]["metadata"] = ok({"bytes": 1, "engine_config": old})
    got = plan({**installed_host(), "kvhost.tier": tier}, cache_limit_gib=60.0)
    assert "(chunk_size 256 → 512)" in str(action(got, "namespace ns-3434").cost)
    rows[1]["metadata"] = absent()
    got = plan({**installed_host(), "kvhost.tier": tier}, cache_limit_gib=60.0)
    assert str(action(got, "namespace ns-3434").cost).endswith("new namespace")


def test_what_is_not_known_is_unknown() -> None:
    unreadable = {"status": "unreadable", "why": ON_SITE, "data": None}
    changes = {f"kvhost.{name}": unreadable for name in ("current", "files", "envs", "tools")}
    got = plan({**installed_host(), **changes})
    unknown = [a.what for a in got.actions if a.state == "unknown"]
    assert len(unknown) == 7
    assert action(got, "restart-persistence").state == "unknown"
    not_resolved = replace(FACTS, engine_config_digest=None, rendered=None)
    got = plan(installed_host(), not_resolved)
    assert [a.stage for a in got.actions if a.state == "unknown"] == [
        "cache", "cache", "runner", "verify"
    ]  # fmt: skip


@pytest.mark.parametrize(
    "verify, host, state",
    [("auto", {}, "change"), ("auto", None, "keep"), ("always", None, "change"),
     ("never", {}, "keep")],
)  # fmt: skip
def test_when_the_verdict_is_taken(verify: str, host: dict[str, Any] | None, state: str) -> None:
    got = plan(installed_host() if host is None else host, verify=verify)
    assert got.actions[-1].stage == "verify"
    assert got.actions[-1].state == state


def test_a_model_of_the_hub() -> None:
    hub: dict[str, Any] = {"model_source": "org/name", "model_revision": "a1" * 20}
    got = plan({}, **hub)
    assert action(got, "model org/name").cost == "downloads 1 GiB"
    assert any("downloads 1.5 GiB and takes 3 GiB" in note for note in got.notes)
    unknown = plan({}, replace(FACTS, model=None), **hub)
    assert "size not known yet" in str(action(unknown, "model org/name").cost)
    there = {"kvhost.models": ok([built("org--name-" + "a1" * 20)])}
    assert action(plan(there, **hub), "model org/name").state == "keep"
    tight = {f"{BASE}.avail": int(2.5 * GIB), f"{TIER}.mount_point": "/mnt"}
    (refusal,) = plan(tight, **hub).refusals
    assert "the model 1 GiB" in refusal.needed
    assert plan({**tight, **there}, **hub).refusals == ()


# --- notes


@pytest.mark.parametrize(
    "host, other, words",
    [
        ({}, {"third_party_build": True}, "third party's build, not one of vLLM's"),
        ({"pid1.systemd": True}, {}, "not started at boot"),
        ({f"{TIER}.fs": "overlay"}, {}, "lost with the container"),
        ({"users.login_users": ["ann", "bob"]}, {}, "2 other users of this host (ann, bob)"),
        ({}, {"model": None}, "memory was checked without its weights"),
        ({"gpu": ok(NVIDIA)}, {"accelerator": "cpu"}, "not be used: NVIDIA at PCI 0000:01:00.0"),
        ({"gpu.amd.pci": PCI}, {}, "not be used: AMD at PCI 0000:01:00.0"),
        ({"kvhost.tier": ok({"namespaces": [], "foreign": ["cat.jpg"]})}, {}, "untouched: cat.jpg"),
        ({"adoptable.units": ["ollama.service"]}, {}, "systemd unit ollama.service"),
        ({"adoptable.processes": [{"pid": 9, "comm": "vllm", "argv": ["vllm", "serve"], "uid": 1}]},
         {}, "process 9 (vllm) of uid 1: vllm serve"),
        ({"adoptable.hf_caches": [{"user": "ann", "path": "/h", "models":
          ok([{"name": "org/m", "bytes": GIB}])}]}, {}, "cache of ann, /h: org/m (1 GiB)"),
        ({"adoptable.hf_caches": [{"user": "ann", "path": "/h", "models":
          {"status": "unreadable", "why": "closed", "data": None}}]}, {}, "unreadable: closed"),
    ],
)  # fmt: skip
def test_each_note(host: dict[str, Any], other: dict[str, Any], words: str) -> None:
    base = plan(installed_host())
    assert base.notes == ()
    facts, settings = parts(other)
    notes = plan({**installed_host(), **host}, facts, **settings).notes
    assert len(notes) == 1
    assert words in notes[0]


# --- as JSON, as a table


def test_json_has_everything_and_is_json() -> None:
    got = plan({"cpus.flags": []})
    data = json.loads(json.dumps(plan_to_json(got)))
    assert data["refused"] is True
    assert [Action(**row) for row in data["actions"]] == list(got.actions)
    assert [Refusal(**row) for row in data["refusals"]] == list(got.refusals)
    assert data["notes"] == list(got.notes)
    assert plan_to_json(plan())["refused"] is False


def shown(plans: dict[str, Plan]) -> str:
    out = io.StringIO()
    Console(file=out, width=80, force_terminal=False).print(render_plans(plans))
    return out.getvalue()


def flat(text: str) -> str:
    return " ".join(text.split())


def test_the_table_fits_80_columns_and_loses_nothing() -> None:
    long = "/srv/" + "x" * 200
    bad = plan({"cpus.flags": [], f"{BASE}.blocked_by": long}, max_model_len=50000)
    text = shown({"web[1]": bad, "good": plan(installed_host())})
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80
    for item in (*bad.refusals, *bad.actions):
        for value in (v for k, v in vars(item).items() if v and k not in ("stage", "state")):
            assert "".join(str(value).split()) in "".join(text.split())
    for note in bad.notes:
        assert "".join(note.split()) in "".join(text.split())
    assert "web[1]: refused, 3 reasons" in text
    assert "good: no change" in text
    assert "2 hosts, 1 refused (web[1]): nothing is changed on any" in flat(text)


def test_what_a_host_says_cannot_steer_the_terminal() -> None:
    argv = ["vllm", "\x1b[2J\x07[red]x[/red]"]
    row = {"pid": 9, "comm": "vllm", "argv": argv, "uid": 1}
    text = shown({"a": plan({"adoptable.processes": [row]})})
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "[red]x[/red]" in text


@pytest.mark.parametrize(
    "count, text",
    [(0, "0 bytes"), (1023, "1023 bytes"), (1024, "1 KiB"), (41 * GIB, "41 GiB"),
     (int(2.2 * GIB), "2.2 GiB"), (470 << 20, "470 MiB"), (3 << 40, "3 TiB")],
)  # fmt: skip
def test_sizes_are_read_easily(count: int, text: str) -> None:
    assert size(count) == text
