"""Parts of a host's report, for report.py: its system, memory, CPUs, mounts and PCI devices.

What the kernel says of the machine, or of the container that this is.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvhost.onhost.report_parts import Absent, Data, host, is_dir, read, run, st
else:  # it lies beside this file
    from report_parts import Absent, Data, host, is_dir, read, run, st

CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16")
SHM_NAMES = ("lmcache", "kvhost", "vllm")


def os_release() -> Data:
    """Fields of os-release(5); /usr/lib/os-release when /etc has none."""
    path = host("etc/os-release")
    text = (path if st(path) else host("usr/lib/os-release")).read_text()
    pairs = [line.split("=", 1) for line in text.splitlines() if re.match(r"[A-Z_]+=", line)]
    got = {key: value.strip().strip("\"'") for key, value in pairs}
    if not got.get("ID"):
        raise ValueError("os-release names no ID")
    return {
        "id": got["ID"],
        "version_id": got.get("VERSION_ID"),
        "id_like": got.get("ID_LIKE", "").split(),
        "pretty": got.get("PRETTY_NAME", got["ID"]),
    }


def pid1() -> Data:
    comm = read("proc/1/comm").strip()
    kind = None
    if st(host("run/.containerenv")):
        kind = "podman"
    elif st(host(".dockerenv")):
        kind = "docker"
    try:  # only the one variable that says what kind of container this is
        found = re.search(r"(?:^|\0)container=([\w-]+)", read("proc/1/environ"))
        kind = found.group(1) if found else kind
    except OSError:
        kind = kind or ("unknown" if os.geteuid() else None)
    # sd_booted(3): /run/systemd/system exists; systemctl may be installed without it
    systemd = comm == "systemd" and is_dir(host("run/systemd/system"))
    return {"comm": comm, "systemd": systemd, "container": kind}


@functools.lru_cache(maxsize=1)
def mounts() -> list[Data]:
    """/proc/self/mountinfo (proc_pid_mountinfo(5)) in mount order; octal escapes decoded.

    Super options with values are left out: they can be long (overlay) or private.
    """

    def plain(text: str) -> str:
        return re.sub(r"\\([0-7]{3})", lambda m: chr(int(m.group(1), 8)), text)

    rows = []
    for line in read("proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        one, two = left.split(" "), right.split(" ")
        rows.append({
            "mount_point": plain(one[4]),
            "fs": two[0],
            "dev": one[2],
            "source": re.sub(r"(://)[^/@]+(?=@)", r"\1***", plain(two[1])),
            "options": one[5].split(","),
            "super_options": [o for o in two[2].split(",") if "=" not in o or "hidepid" in o],
        })  # fmt: skip
    if not rows:
        raise ValueError("/proc/self/mountinfo is empty")
    return rows


def cgroup_dirs(controller: str) -> Iterator[tuple[int, Path]]:
    """(version, directory) of this process's cgroup and its parents, as far as they are seen."""
    if st(host("proc/self/cgroup")) is None:
        return
    for line in read("proc/self/cgroup").splitlines():
        _, names, inside = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        kind = "cgroup" if names else "cgroup2"
        for m in mounts():
            if m["fs"] != kind or (names and controller not in m["super_options"]):
                continue
            top, below = host(m["mount_point"].lstrip("/")), inside.strip("/").split("/")
            for depth in range(len(below), -1, -1):
                path = top.joinpath(*[p for p in below[:depth] if p])
                if ".." not in below and is_dir(path):
                    yield (1 if names else 2), path


def memory() -> Data:
    """MemTotal, MemAvailable and the tightest memory cgroup around this process."""
    rows = [line.split() for line in read("proc/meminfo").splitlines()]
    info = {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if len(row) > 1}
    tight: Data | None = None
    for version, path in cgroup_dirs("memory"):
        names = ("memory.max", "memory.current", "inactive_file")
        if version == 1:
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        if st(path / names[0]) is None:
            continue
        limit = (path / names[0]).read_text().strip()
        if limit == "max" or int(limit) >= 1 << 60:  # v1 writes "no limit" as a huge number
            continue
        stats = dict(line.split() for line in (path / "memory.stat").read_text().splitlines())
        used = int((path / names[1]).read_text()) - int(stats.get(names[2], 0))
        if tight is None or int(limit) - used < tight["cgroup_limit"] - tight["cgroup_used"]:
            tight = {"cgroup_limit": int(limit), "cgroup_used": max(used, 0)}
    none: Data = {"cgroup_limit": None, "cgroup_used": None}
    return {"total": info["MemTotal"], "available": info["MemAvailable"], **(tight or none)}


def shm() -> Data:
    if not any(m["mount_point"] == "/dev/shm" for m in mounts()):
        raise Absent("/dev/shm is not mounted")
    vfs = os.statvfs(host("dev/shm"))
    files = []
    for path in sorted(host("dev/shm").iterdir()):
        found = st(path, follow=False)
        if found and path.name.startswith(SHM_NAMES):
            size = found.st_blocks * 512
            files.append({"name": path.name, "bytes": size, "uid": found.st_uid})
    size, free = vfs.f_blocks * vfs.f_frsize, vfs.f_bavail * vfs.f_frsize
    return {"size": size, "free": free, "files": files}


def cpus() -> Data:
    flags: set[str] = set()
    model = None
    for line in read("proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            flags = set(value.split())
        elif key.strip() == "model name":
            model = value.strip()
    if not flags:
        raise ValueError("/proc/cpuinfo lists no CPU flags")
    quotas = []
    for version, path in cgroup_dirs("cpu"):
        if version == 2 and st(path / "cpu.max"):
            quotas.append((path / "cpu.max").read_text().split())
        elif version == 1 and st(path / "cpu.cfs_quota_us"):
            words = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            quotas.append([(path / word).read_text().strip() for word in words])
    set_quotas = [int(q) / int(p) for q, p in quotas if q not in ("max", "-1")]
    return {
        "count": len(os.sched_getaffinity(0)),
        "quota": min(set_quotas, default=None),
        "flags": [flag for flag in CPU_FLAGS if flag in flags],
        "model": model,
    }


def gpu() -> Data:
    if not is_dir(host("sys/bus")):
        raise OSError("/sys is not mounted, so PCI devices cannot be listed")
    pci: dict[str, list[Data]] = {"0x10de": [], "0x1002": []}
    devices = host("sys/bus/pci/devices")
    for device in sorted(devices.iterdir()) if is_dir(devices) else []:
        vendor, kind, model = [
            (device / n).read_text().strip() for n in ("vendor", "class", "device")
        ]
        # 03: display controllers; 12: processing accelerators
        if vendor in pci and kind.startswith(("0x03", "0x12")):
            pci[vendor].append({"address": device.name, "device_class": kind, "device": model})
    version = host("proc/driver/nvidia/version")
    smi: Data | None = None
    if program := shutil.which("nvidia-smi"):
        query = "--query-gpu=name,memory.total,driver_version"
        try:
            code, out = run([program, query, "--format=csv,noheader"])
            smi = {"exit": code, "lines": out.splitlines()[:16]}
        except (OSError, subprocess.SubprocessError) as why:
            smi = {"exit": None, "lines": [f"{type(why).__name__}: {why}"]}
    nvidia = {
        "pci": pci["0x10de"],
        "nodes": sorted(str(p) for p in host("dev").glob("nvidia[0-9]*")),
        "driver": version.read_text().splitlines()[0] if st(version) else None,
        "smi": smi,
    }
    return {"nvidia": nvidia, "amd": {"pci": pci["0x1002"]}}
