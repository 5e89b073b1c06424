"""A healthy host and the changes to it that the tests of the plan make."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from kvhost.plan.make import (
    Action,
    ModelNeed,
    Plan,
    PlanInputs,
    make_plan,
)
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
    third_party=None,
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
    row = {"path": path, "real_path": path, "ancestor": "/var/lib", "exists": False,
           "directory": True,
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


def account(
    uid: int = 999, shell: str = "/usr/sbin/nologin", home: str = "/srv/kv/home"
) -> dict[str, object]:
    """The service's user as a report has it."""
    return {"name": "kvhost", "uid": uid, "gid": uid, "home": home, "shell": shell}


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
                      "verified": absent(),
                      "envs": absent(), "tools": absent(), "models": absent(), "tier": absent(),
                      "services": absent(), "run_lock": absent(), "files": ok({}),
                      "units": ok([])}),
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
               "weights": absent(), **more})  # fmt: skip


def parts(other: dict[str, Any]) -> tuple[PlanInputs, dict[str, Any]]:
    """What a row changes elsewhere: fields of PlanInputs, the rest are settings."""
    fields = {k: v for k, v in other.items() if k in PlanInputs.__dataclass_fields__}
    return replace(FACTS, **fields), {k: v for k, v in other.items() if k not in fields}


def running(*names: str, dead: str | None = None) -> dict[str, Any]:
    """Services that run, and one that has died."""
    rows = [service(name, pid) for pid, name in enumerate(names)]
    return ok(rows + ([service(dead, 99, alive=False)] if dead else []))


#: what a receipt keeps of the healthy host itself
SYSTEM = {"kernel": "6.1", "driver": None, "tier": {"mount_point": "/", "fs": "ext4"}}


def installed_host() -> dict[str, Any]:
    """Everything is there and runs."""
    name = f"ns-{CONFIG[:24]}"
    return {
        "users.service_user": account(shell="/bin/false"),
        f"{BASE}.exists": True,
        f"{TIER}.exists": True,
        "kvhost.base": ok({"owner": "kvhost", "entries": ["state"]}),
        "kvhost.tools": ok([built(TOOLS)]),
        "kvhost.envs": ok([built(LOCK[:24])]),
        "kvhost.current": ok({"target": f"/var/lib/kvhost/envs/{LOCK[:24]}", "resolves": True}),
        "kvhost.models": ok([built(BUILTIN[:16])]),
        "kvhost.tier": ok({"namespaces": [namespace(name, GIB)], "foreign": []}),
        "kvhost.services": ok([service(n, i) for i, n in enumerate(("runner", "cache", "pruner"))]),
        "kvhost.receipt": ok({"settings": FACTS.settings_digest, "system": SYSTEM}),
        "kvhost.verified": ok({"persisted": "PASS"}),
    }  # fmt: skip


def action(got: Plan, words: str) -> Action:
    (found,) = [a for a in got.actions if words in a.what]
    return found


ON_SITE = "run as root and read /proc/x"


def fixes(changes: dict[str, Any], other: dict[str, Any] | None = None) -> str:
    facts, settings = parts(other or {})
    return plan(changes, facts, **settings).refusals[0].fix
