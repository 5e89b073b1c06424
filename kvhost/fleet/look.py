"""What `kvhost inventory add` saw of a host, and what follows from it for fleet.yaml. Pure."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

from pydantic import BaseModel, ConfigDict

from kvhost.plan.host import nvidia
from kvhost.plan.pod import OWN_DISK
from kvhost.plan.types import size
from kvhost.report import HostReport

#: mounts below these are the system's, or of the container's runtime
_SYSTEM = ("/etc", "/proc", "/sys", "/dev", "/run", "/usr", "/lib", "/bin", "/sbin", "/boot",
           "/tmp", "/opt/nvidia", "/var/lib/docker", "/snap")  # fmt: skip
_NO_FILES = (*OWN_DISK, "proc", "sysfs", "devpts", "mqueue", "cgroup", "cgroup2", "devtmpfs",
             "nsfs", "squashfs", "fusectl", "debugfs", "tracefs", "bpf", "pstore", "autofs",
             "fuse.lxcfs", "efivarfs", "securityfs", "hugetlbfs", "configfs")  # fmt: skip
NO_TRANSFER = (
    "its sshd has no sftp, and there is no scp: on the host, apt-get install openssh-sftp-server. "
    "(A provider's proxy has neither: take the line for SSH over a TCP port of the machine.)"
)


class Seen(BaseModel):
    """`transfer`: sftp, scp, or none of them. `report`: of onhost/report.py."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    transfer: str
    report: HostReport


def volumes(report: HostReport) -> list[str]:
    """Where a volume may be mounted: not the container's own disk, and not the system's."""
    found = []
    for mount in report.mounts.data or []:
        point = mount.mount_point
        system = any(point == top or point.startswith(f"{top}/") for top in _SYSTEM)
        if point != "/" and not system and mount.fs not in _NO_FILES and "ro" not in mount.options:
            found.append(point)
    return sorted(set(found))


def container(report: HostReport) -> bool:
    """A container without systemd: what its provider calls a pod, or an instance."""
    pid1 = report.pid1.data
    if pid1 is None or pid1.systemd:
        return False
    # a first process that writes over its environment (sshd does) tells no kind
    layered = any(m.mount_point == "/" and m.fs in OWN_DISK for m in report.mounts.data or [])
    return pid1.container is not None or layered


def complete(entry: MutableMapping[str, Any], seen: Seen) -> None:
    """Writes into the entry what the look says and nobody has said before."""
    users = seen.report.users.data
    if users and users.uid != 0 and users.sudo:
        entry.setdefault("sudo", True)
    if seen.transfer == "scp":
        entry.setdefault("transfer", "scp")
    if container(seen.report) and "role" not in entry and len(volumes(seen.report)) == 1:
        entry["role"], entry["volume"] = "pod", volumes(seen.report)[0]


def problems(entry: MutableMapping[str, Any], seen: Seen) -> Iterator[str]:
    """Why the host is of no use as it is."""
    users = seen.report.users.data
    if seen.transfer == "none":
        yield NO_TRANSFER
    if users and users.uid != 0 and not users.sudo and "sudo_password" not in entry:
        yield (
            f"user {users.name} is not root, and sudo asks for a password or is not there: "
            "--sudo-password-env NAME, or NOPASSWD, or a line with root@"
        )


def lines(name: str, seen: Seen) -> list[str]:
    """What was seen, for people."""
    report = seen.report
    os, pid1, arch = report.os.data, report.pid1.data, report.arch.data
    memory, users = report.memory.data, report.users.data
    kind = (
        "systemd"
        if pid1 and pid1.systemd
        else f"no systemd (PID 1 is {pid1.comm})"
        if pid1
        else "?"
    )
    if pid1 and pid1.container:
        kind += f", a container ({pid1.container})"
    gpu = nvidia(report.gpu.data) if report.gpu.data else None
    driver = report.gpu.data.nvidia.driver if report.gpu.data else None
    rows = [
        ("system", f"{os.pretty if os else '?'}, {arch.machine if arch else '?'}, {kind}"),
        ("memory", size(memory.total) if memory else "?"),
        ("GPU", f"{gpu}; driver: {driver or 'none loaded'}" if gpu else "none seen"),
        ("login", _login(users.name if users else None, users.sudo if users else None)),
        ("files by", seen.transfer),
    ]
    drives = report.drives.data.drives if report.drives.data else []
    for drive in drives:
        if drive.device:
            what = f"{drive.device.model or 'no model'}, {size(drive.device.size_bytes)}"
            rows.append(("drive", f"{drive.device.path}, {what}, {drive.device.transport}"))
    if not drives:
        rows.append(("drives", report.drives.why or "none seen"))
    if container(report):
        found = ", ".join(volumes(report)) or "none: all that is written is lost when it is stopped"
        rows.append(("volumes", found))
    return [f"{name}  {key:<9} {value}" for key, value in rows]


def _login(user: str | None, sudo: bool | None) -> str:
    if sudo is None:
        return f"{user}"
    return f"{user}, sudo {'without a password' if sudo else 'asks for a password, or is missing'}"
