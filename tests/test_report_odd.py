"""Reports of other machines, from files as their kernels write them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from kvhost.onhost import report
from tests.report_tools import CANARY, beside, mount, put, root

__all__ = ["root"]  # fixtures
machine, parts = beside("report_machine"), beside("report_parts")
processes = beside("report_processes").processes


def test_mounts_decode_escapes_and_hide_passwords(root: Path) -> None:
    text = mount(r"/mnt/a\040b\134c\011d", source="http://me:" + CANARY + "@nas/x")
    text += mount("/o", fs="overlay", super="rw,lowerdir=/a:/b,noexec")
    put(root / "proc/self/mountinfo", text)
    one, two = machine.mounts()
    assert one["mount_point"] == "/mnt/a b\\c\td"
    assert one["source"] == "http://***@nas/x"
    assert two["super_options"] == ["rw", "noexec"]


def test_of_two_mounts_at_one_point_the_later_counts(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = mount("/", dev="0:9") + mount(str(root), dev="0:9") + mount(str(root), "xfs", dev="0:9",
        options="ro,noexec")  # fmt: skip
    put(root / "proc/self/mountinfo", text + mount("/elsewhere/deeper/than/all/the/others"))
    got = report.disk(str(root / "new"), 65534, [65534])
    assert (got["fs"], got["read_only"], got["noexec"]) == ("xfs", True, True)


def test_a_mount_hidden_by_a_later_one_above_it_does_not_count(root: Path) -> None:
    st = (root / ".").stat()
    dev = f"{os.major(st.st_dev)}:{os.minor(st.st_dev)}"
    hidden = mount(str(root), "nfs4", dev="0:77")
    put(root / "proc/self/mountinfo", hidden + mount(str(root.parent), "xfs", dev=dev))
    assert report.disk(str(root / "new"), 65534, [65534])["fs"] == "xfs"


def cgroup2(root: Path, *limits: tuple[str, str, int]) -> None:
    put(root / "proc/meminfo", "MemTotal: 8000 kB\nMemAvailable: 6000 kB\n")
    put(root / "proc/self/cgroup", "0::/a/b\n")
    put(root / "proc/self/mountinfo", mount("/sys/fs/cgroup", "cgroup2"))
    for where, limit, used in limits:
        top = root / "sys/fs/cgroup" / where
        put(top / "memory.max", f"{limit}\n")
        put(top / "memory.current", f"{used}\n")
        put(top / "memory.stat", "anon 1\ninactive_file 100\n")


@pytest.mark.parametrize(
    "limits, found",
    [
        ([], (None, None)),
        ([("a/b", "max", 500)], (None, None)),
        ([("a/b", "2000", 600)], (2000, 500)),
        ([("a/b", "2000", 600), ("a", "1000", 900)], (1000, 800)),  # a parent is tighter
        ([("", "2000", 600)], (2000, 500)),  # a container's own root
    ],
)
def test_cgroup_v2_limit(root: Path, limits: list[tuple[str, str, int]], found: Any) -> None:
    cgroup2(root, *limits)
    got = machine.memory()
    assert (got["cgroup_limit"], got["cgroup_used"]) == found
    assert (got["total"], got["available"]) == (8000 << 10, 6000 << 10)


@pytest.mark.parametrize("limit, found", [("4096", 4096), ("9223372036854771712", None)])
def test_cgroup_v1_limit(root: Path, limit: str, found: int | None) -> None:
    put(root / "proc/meminfo", "MemTotal: 8000 kB\nMemAvailable: 6000 kB\n")
    put(root / "proc/self/cgroup", "5:cpu,cpuacct:/\n4:memory:/docker/abc\n")
    text = mount("/sys/fs/cgroup/cpu", "cgroup", super="rw,cpu,cpuacct")
    put(root / "proc/self/mountinfo",
        text + mount("/sys/fs/cgroup/memory", "cgroup", super="rw,memory"))  # fmt: skip
    top = root / "sys/fs/cgroup/memory"  # in a container its own cgroup is mounted at the top
    put(top / "memory.limit_in_bytes", limit)
    put(top / "memory.usage_in_bytes", "3000")
    put(top / "memory.stat", "total_inactive_file 1000\n")
    got = machine.memory()
    assert (got["cgroup_limit"], got["cgroup_used"]) == (found, found and 2000)
    put(root / "sys/fs/cgroup/cpu/cpu.cfs_quota_us", "150000\n")
    put(root / "sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n")
    put(root / "proc/cpuinfo", "flags\t\t: fpu avx2 sse\nmodel name\t: A CPU\n")
    cpu = machine.cpus()
    assert (cpu["quota"], cpu["flags"], cpu["model"]) == (1.5, ["avx2"], "A CPU")


@pytest.mark.parametrize(
    "name, file, text",
    [
        ("os_release", "etc/os-release", 'NAME="no id"\n'),
        ("memory", "proc/meminfo", "MemTotal: 1 kB\n"),  # before Linux 3.14: no MemAvailable
        ("cpus", "proc/cpuinfo", "processor: 0\n"),
        ("mounts", "proc/self/mountinfo", ""),
        ("pid1", "proc/2/comm", "x"),
        ("gpu", "sys/x", ""),  # no /sys/bus
    ],
)
def test_half_a_kernel_is_unreadable(root: Path, name: str, file: str, text: str) -> None:
    put(root / file, text)
    got = parts.part(getattr(machine, name))
    assert got["status"] == "unreadable"
    assert got["data"] is None
    assert len(got["why"]) > 10


def test_shm_that_is_not_mounted_is_absent(root: Path) -> None:
    put(root / "proc/self/mountinfo", mount("/dev"))
    assert parts.part(machine.shm)["status"] == "absent"


def test_shm_leftovers_of_engines_are_listed(root: Path) -> None:
    put(root / "proc/self/mountinfo", mount("/dev/shm", "tmpfs"))
    put(root / "dev/shm/lmcache_kv_1", "x" * 9000)
    put(root / "dev/shm/others", "x")
    rows = machine.shm()["files"]
    assert [(row["name"], row["uid"]) for row in rows] == [("lmcache_kv_1", os.geteuid())]
    assert rows[0]["bytes"] >= 9000


@pytest.mark.parametrize(
    "comm, booted, systemd", [("systemd", True, True), ("systemd", False, False),
                              ("bash", True, False)]
)  # fmt: skip
def test_systemd_means_that_it_runs_the_system(
    root: Path, comm: str, booted: bool, systemd: bool
) -> None:
    put(root / "proc/1/comm", comm + "\n")
    if booted:
        (root / "run/systemd/system").mkdir(parents=True)
    assert machine.pid1()["systemd"] is systemd


def test_kind_of_container(root: Path) -> None:
    put(root / "proc/1/comm", "bash\n")
    put(root / "proc/1/environ", f"A=1\0HF_TOKEN={CANARY}\0")
    assert machine.pid1()["container"] is None
    put(root / ".dockerenv", "")
    assert machine.pid1()["container"] == "docker"
    put(root / "proc/1/environ", f"HF_TOKEN={CANARY}\0container=lxc\0")
    assert machine.pid1() == {"comm": "bash", "systemd": False, "container": "lxc"}


def test_gpus_are_display_and_compute_devices(root: Path) -> None:
    assert not (root / "sys").exists()
    (root / "sys/bus/platform").mkdir(parents=True)
    assert machine.gpu()["nvidia"]["pci"] == []  # a machine without PCI
    devices = {
        "0000:01:00.0": ("0x10de", "0x030000", "0x2684"),
        "0000:01:00.1": ("0x10de", "0x040300", "0x22ba"),  # its sound device
        "0000:02:00.0": ("0x1002", "0x120000", "0x74a1"),
        "0000:03:00.0": ("0x8086", "0x030000", "0x4680"),
    }
    for address, values in devices.items():
        for name, value in zip(("vendor", "class", "device"), values, strict=True):
            put(root / "sys/bus/pci/devices" / address / name, value + "\n")
    put(root / "proc/driver/nvidia/version", "NVRM version: 580.95.05\nGCC\n")
    put(root / "dev/nvidia0", "")
    got = machine.gpu()
    assert [d["address"] for d in got["nvidia"]["pci"]] == ["0000:01:00.0"]
    assert [d["address"] for d in got["amd"]["pci"]] == ["0000:02:00.0"]
    assert got["nvidia"]["driver"] == "NVRM version: 580.95.05"
    assert len(got["nvidia"]["nodes"]) == 1


def test_nvidia_smi_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = put(tmp_path / "nvidia-smi", "#!/bin/sh\necho Driver/library version mismatch\nexit 18\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    smi_said = machine.gpu()["nvidia"]["smi"]
    assert smi_said == {"exit": 18, "lines": ["Driver/library version mismatch"]}


def test_hidden_processes_are_not_no_processes(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(root / "proc/self/mountinfo", mount("/proc", "proc", super="rw,hidepid=invisible"))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(OSError, match="hidepid=invisible"):
        processes()
    stat = "7 (a) b) S 1 " + " ".join("0" * 17) + " 4242 0"
    for name, text in (("stat", stat), ("cmdline", "vllm\0serve\0"), ("comm", "a) b\n")):
        put(root / "proc/7" / name, text)
    monkeypatch.setattr(os, "geteuid", lambda: 0)  # root sees all
    row = processes()[7]
    assert (row["ppid"], row["ticks"], row["state"]) == (1, 4242, "S")
    assert (row["argv"], row["comm"]) == (["vllm", "serve"], "a) b")
    processes.cache_clear()
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    put(root / "proc/self/mountinfo", mount("/proc", "proc", super="rw,hidepid=0"))
    assert list(processes()) == [7]
