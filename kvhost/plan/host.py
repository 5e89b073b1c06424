"""What a report means for a plan: readings of it that more than one decision needs."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from kvhost.plan.types import PlanInputs, size
from kvhost.report import Built, Gpu, HostReport, Listener, Namespace, Part, Python, RunLock
from kvhost.settings import Settings

STALE_AFTER_S = 30 * 60
SUPPORTED = "Debian 12 or later, Ubuntu 22.04 or later, or a derivative of them"


def choose_python(settings: Settings, report: HostReport, covered: Sequence[str]) -> Python | None:
    """The Python that the engine's environment is made from, None when there is none.

    With `python` = auto the newest that a lock covers and the service's user can run. Raises
    nothing; an unreadable part gives None.
    """
    usable = [p for p in report.pythons.data or [] if p.usable_by_service and minor(p) in covered]
    if settings.python != "auto":
        usable = [p for p in usable if p.path == settings.python]
    return max(usable, key=lambda p: [int(n) for n in minor(p).split(".")], default=None)


def minor(python: Python) -> str:
    """ "3.11" of 3.11.2; "0" when it did not say."""
    return ".".join((python.version or "0").split(".")[:2])


def installed(part: Part[list[Built]], digest: str) -> Built | None:
    """The finished directory of this digest: named by (the start of) it, or marked with it."""
    for row in part.data or []:
        tail = row.name.rpartition("-")[2]
        named = len(tail) >= 12 and digest.startswith(tail)
        marked = row.marker is not None and digest in row.marker.values()
        if row.complete and (named or marked):
            return row
    return None


def own_pids(report: HostReport) -> frozenset[int]:
    """Processes of kvhost's running services."""
    services = (report.kvhost.data and report.kvhost.data.services.data) or []
    return frozenset(pid for service in services if service.alive for pid in service.pids)


def alive(report: HostReport, name: str) -> bool:
    services = (report.kvhost.data and report.kvhost.data.services.data) or []
    return any(service.alive and service.name == name for service in services)


def own_memory(report: HostReport) -> int:
    """Bytes that stopping kvhost's services would free.

    Shared memory is counted once: both services map the same pool.
    """
    services = (report.kvhost.data and report.kvhost.data.services.data) or []
    running = [service for service in services if service.alive]
    shared = max((service.shmem_bytes for service in running), default=0)
    return sum(service.anon_bytes for service in running) + shared


def own_shm(report: HostReport) -> int:
    """Bytes of /dev/shm in files of the service's user, named as the services name theirs."""
    user = report.users.data and report.users.data.service_user
    files = report.shm.data.files if report.shm.data else []
    return sum(file.bytes for file in files if user and file.uid == user.uid)


def memory_for_us(report: HostReport) -> tuple[int, str]:
    """Bytes that the services can have, and where that figure comes from."""
    memory = report.memory.data
    if memory is None:
        return 0, "unreadable"
    held = own_memory(report)
    free = memory.available + held
    if memory.cgroup_limit is not None:
        room = memory.cgroup_limit - (memory.cgroup_used or 0) + held
        room = min(room, memory.cgroup_limit)
        if room < free:
            return room, f"of a cgroup limit of {size(memory.cgroup_limit)}"
    return free, f"of {size(memory.total)}"


def nvidia(gpu: Gpu) -> str | None:
    """The NVIDIA GPUs in words, None without one."""
    found = gpu.nvidia
    if found.smi and found.smi.exit == 0 and found.smi.lines:
        return "; ".join(found.smi.lines)
    if found.pci:
        return "NVIDIA at PCI " + ", ".join(device.address for device in found.pci)
    return ", ".join(found.nodes) or None


def on_address(listeners: Sequence[Listener], host: str, port: int) -> list[Listener]:
    """Listeners that keep a server from listening on host (an IP address or localhost) and port."""
    wanted = _plain("127.0.0.1" if host == "localhost" else host)
    return [
        row
        for row in listeners
        if row.port == port
        and (
            wanted.is_unspecified
            or _plain(row.address).is_unspecified
            or _plain(row.address) == wanted
        )
    ]


def _plain(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    parsed = ipaddress.ip_address(address)
    return (parsed.version == 6 and parsed.ipv4_mapped) or parsed


def lock_owner(lock: RunLock) -> str:
    """user@controller:pid, for people."""
    content = lock.content
    return f"{content.get('user')}@{content.get('controller')}:{content.get('pid')}"


def lock_is_free(settings: Settings, lock: RunLock, facts: PlanInputs) -> bool:
    """Whether a run lock may be taken over: stale, or given up by its run id."""
    given_up = settings.break_lock and settings.break_lock == lock.content.get("run_id")
    return bool(given_up) or facts.lock_is_stale is True or lock.age_s > STALE_AFTER_S


def last_namespace(report: HostReport) -> Namespace | None:
    """The namespace that was written to last."""
    tier = report.kvhost.data and report.kvhost.data.tier.data
    used = [n for n in tier.namespaces if n.newest_mtime] if tier else []
    return max(used, key=lambda n: n.newest_mtime or 0.0, default=None)
