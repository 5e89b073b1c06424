"""The report of a host: the real script on this machine, and what it says of odd hosts."""

from __future__ import annotations

import ast
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvhost.onhost import report as machine
from kvhost.onhost import report_held as held
from kvhost.report import HostReport, ReportError, parse_report

SCRIPTS = Path(machine.__file__).parent
CANARY = "canary4f2a9c"
# One that every user can run: the tests' own may be in a closed home directory.
PYTHON = next(
    (p for p in ("/usr/bin/python3", "/usr/local/bin/python3") if Path(p).exists()),
    os.path.realpath(sys.executable),
)
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")


@pytest.fixture
def open_dir() -> Iterator[Path]:
    """A directory that every user may enter (pytest's own are closed to others)."""
    path = Path(tempfile.mkdtemp(prefix="report-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def run_script(base: Path, *more: str, prefix: tuple[str, ...] = (), env: Any = None) -> str:
    script = base.parent / "scripts"
    if not script.exists():
        script.mkdir(mode=0o755)
        for name in ("report.py", "report_held.py"):
            shutil.copy(SCRIPTS / name, script / name)
    argv = [*prefix, PYTHON, str(script / "report.py")]
    argv += ["--base-dir", str(base), "--tier-dir", str(base / "tier")]
    argv += ["--service-user", "kvhost-no-such-user", *more]
    env = env or {**os.environ, "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
    got = subprocess.run(argv, capture_output=True, text=True, env=env, check=False, timeout=60)
    assert got.returncode == 0, got.stderr
    assert got.stderr == ""
    return got.stdout


def real(base: Path, *more: str, **how: Any) -> HostReport:
    return parse_report(run_script(base, *more, **how))


def ok(part: Any) -> Any:
    assert part.status == "ok", part
    return part.data


def put(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


# --- this machine


def test_tells_of_this_machine_what_other_sources_tell(open_dir: Path) -> None:
    base = open_dir / "base"
    got = real(base, "--packages", "dpkg,no-such-package-1")
    release = platform.freedesktop_os_release()
    assert ok(got.os).id == release["ID"]
    assert ok(got.os).version_id == release.get("VERSION_ID")
    assert ok(got.arch).machine == os.uname().machine
    assert ok(got.pid1).comm == Path("/proc/1/comm").read_text().strip()
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert abs(ok(got.memory).total - total) < total / 20
    assert 0 < ok(got.memory).available <= ok(got.memory).total
    assert ok(got.cpus).count == len(os.sched_getaffinity(0))
    assert ok(got.shm).size == shutil.disk_usage("/dev/shm").total
    disk = ok(got.disk(str(base)))
    usage = shutil.disk_usage(open_dir)
    assert (disk.total, disk.exists, disk.ancestor) == (usage.total, False, str(open_dir))
    assert abs(disk.avail - usage.free) < 1 << 30
    findmnt = ["findmnt", "-no", "TARGET,FSTYPE", "-T", str(open_dir)]
    where = subprocess.run(findmnt, capture_output=True, text=True, check=True).stdout.split()
    assert [disk.mount_point, disk.fs] == where
    assert ok(got.users).uid == os.geteuid()
    assert ok(got.users).service_user is None
    assert ok(got.gpu).nvidia.smi is None or shutil.which("nvidia-smi")
    if shutil.which("dpkg-query"):
        assert ok(got.packages) == {"dpkg": "installed", "no-such-package-1": "absent"}
    assert abs(got.time_unix - time.time()) < 60


def test_prints_one_line_and_no_environment(open_dir: Path) -> None:
    text = run_script(open_dir / "base", env={**os.environ, "HF_TOKEN": CANARY})
    assert text.count("\n") == 1
    assert CANARY not in text


@pytest.mark.parametrize("family, address", [(2, "127.0.0.1"), (10, "::1"), (2, "0.0.0.0")])
def test_sees_who_listens(open_dir: Path, family: int, address: str) -> None:
    with socket.socket(family, socket.SOCK_STREAM) as server:
        try:
            server.bind((address, 0))
        except OSError as why:
            pytest.skip(f"no {address} here: {why}")
        port = server.getsockname()[1]
        before = ok(real(open_dir / "base").ports).listening
        assert not [row for row in before if row.port == port]  # bound is not listening
        server.listen()
        rows = [r for r in ok(real(open_dir / "base").ports).listening if r.port == port]
    assert [(r.address, r.pid, r.uid) for r in rows] == [(address, os.getpid(), os.geteuid())]
    assert rows[0].comm == Path("/proc/self/comm").read_text().strip()


def test_finds_the_python_it_is_asked_for(open_dir: Path) -> None:
    here = os.path.realpath(sys.executable)
    rows = ok(real(open_dir / "base", "--python", here).pythons)
    mine = next(row for row in rows if row.path == here)
    assert (mine.version, mine.error) == (platform.python_version(), None)
    none = ok(real(open_dir / "base", "--python", "/no/python3.11").pythons)
    assert none[0].path == "/no/python3.11"
    assert "FileNotFoundError" in none[0].error
    assert not none[0].usable_by_service


@as_root
@pytest.mark.parametrize("mode, usable", [(0o700, False), (0o711, True)])
def test_a_python_behind_a_closed_directory_is_not_usable(
    open_dir: Path, mode: int, usable: bool
) -> None:
    closed = open_dir / "closed"
    closed.mkdir()
    python = closed / "python3.11"
    python.symlink_to(PYTHON)
    closed.chmod(mode)
    row = ok(real(open_dir / "base", "--python", str(python)).pythons)[0]
    assert row.path == str(python)
    assert row.error is None
    assert (row.usable_by_service, row.blocked_by) == (usable, None if usable else str(closed))


@as_root
def test_a_python_whose_file_is_closed_is_tried_as_the_user(open_dir: Path) -> None:
    python = open_dir / "python3.11"
    shutil.copy(PYTHON, python)
    python.chmod(0o700)
    row = ok(real(open_dir / "base", "--python", str(python)).pythons)[0]
    assert (row.error, row.usable_by_service, row.blocked_by) == (None, False, None)


@as_root
def test_names_the_directory_that_keeps_the_user_out(open_dir: Path) -> None:
    (open_dir / "data2").mkdir()
    (open_dir / "data2").chmod(0o700)
    (open_dir / "data2/models").mkdir(mode=0o775)
    path = open_dir / "data2/models/one"
    assert ok(real(open_dir / "base", "--path-free", str(path)).disk(str(path))).blocked_by == str(
        open_dir / "data2"
    )
    (open_dir / "data2").chmod(0o711)
    assert ok(real(open_dir / "base", "--path-free", str(path)).disk(str(path))).blocked_by is None


def test_odd_paths_cost_only_their_own_row(open_dir: Path) -> None:
    (open_dir / "loop").symlink_to(open_dir / "loop")
    (open_dir / "dangling").symlink_to(open_dir / "nowhere")
    put(open_dir / "file", "x")
    paths = [str(open_dir / p) for p in ("loop/a", "dangling", "file/below")]
    got = real(open_dir / "base", *(a for p in paths for a in ("--path-free", p)))
    loop, dangling, below = (got.disk(p) for p in paths)
    assert loop.status == "unreadable"
    assert "Too many levels" in (loop.why or "")
    assert dangling.status == "unreadable"
    assert "symlink to nothing" in (dangling.why or "")
    assert (ok(below).directory, ok(below).ancestor) == (False, str(open_dir / "file"))
    assert ok(got.disk(str(open_dir / "base"))).directory
    assert got.disk("/never/asked").status == "unreadable"


def test_tmpfs_is_seen_as_tmpfs(open_dir: Path) -> None:
    assert ok(real(open_dir / "base", "--path-free", "/dev/shm/x").disk("/dev/shm/x")).fs == "tmpfs"


@as_root
def test_an_unprivileged_user_gets_reasons_not_emptiness(open_dir: Path) -> None:
    base = open_dir / "base"
    put(base / "state/receipt.json", "{}")
    put(base / "state/run.lock", "{}")
    put(base / "tier/ns-ab/chunk", "123")
    for name in ("state", "tier/ns-ab"):
        (base / name).chmod(0o700)
    # the kernel does not see pid 1's environment, so its container is not said to be none
    nobody = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
    got = real(base, prefix=nobody)
    assert (ok(got.users).uid, ok(got.users).sudo) == (65534, False)
    kvhost = ok(got.kvhost)
    for part in (kvhost.base, kvhost.receipt, kvhost.run_lock, kvhost.tier):
        assert part.status == "unreadable", part
        assert "PermissionError" in (part.why or "")
    assert kvhost.envs.status == "absent"
    assert ok(got.pid1).container is not None
    assert ok(got.memory).total > 0
    root = real(base)
    assert ok(ok(root.kvhost).receipt) == {}
    assert [n.files for n in ok(ok(root.kvhost).tier).namespaces] == [1]


def test_without_its_second_half_the_first_is_still_told(open_dir: Path) -> None:
    run_script(open_dir / "base")
    (open_dir / "scripts/report_held.py").unlink()
    got = real(open_dir / "base")
    assert ok(got.memory).total > 0
    for name in machine.HELD:
        part = getattr(got, name)
        assert (part.status, "report_held.py exits 2" in part.why) == ("unreadable", True)


def test_a_part_that_hangs_or_fails_costs_only_itself() -> None:
    def fails() -> None:
        raise KeyError("MemTotal")

    parts: dict[str, Callable[[], Any]]
    parts = {"hangs": lambda: time.sleep(5), "fails": fails, "fine": lambda: 1}
    for module in (machine, held):
        got = module.gather(parts, 0.3)
        assert got["hangs"]["why"] == "did not answer within 0.3 s"
        assert got["hangs"]["status"] == got["fails"]["status"] == "unreadable"
        assert got["fails"]["why"] == "KeyError: 'MemTotal'"
        assert got["fine"] == {"status": "ok", "why": None, "data": 1}


@pytest.mark.parametrize("script", ["report.py", "report_held.py"])
def test_runs_on_python_3_9(script: str) -> None:
    text = (SCRIPTS / script).read_text()
    ast.parse(text, feature_version=(3, 9))
    assert "from __future__ import annotations" in text
    used = {n.names[0].name.split(".")[0] for n in ast.walk(ast.parse(text))
            if isinstance(n, ast.Import)}  # fmt: skip
    assert used <= sys.stdlib_module_names


# --- other machines, from files as the kernel writes them


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty / for the scripts."""
    for module in (machine, held):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    caches = (machine.mounts, held.processes)
    for cached in caches:
        cached.cache_clear()
    yield tmp_path
    for cached in caches:
        cached.cache_clear()


MOUNT = "36 35 {dev} / {at} {options} shared:1 - {fs} {source} {super}\n"


def mount(at: str, fs: str = "ext4", **more: str) -> str:
    row = {"dev": "8:1", "options": "rw,relatime", "source": "none", "super": "rw", **more}
    return MOUNT.format(at=at, fs=fs, **row)


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
    got = machine.disk(str(root / "new"), 65534, [65534])
    assert (got["fs"], got["read_only"], got["noexec"]) == ("xfs", True, True)


def test_a_mount_hidden_by_a_later_one_above_it_does_not_count(root: Path) -> None:
    st = (root / ".").stat()
    dev = f"{os.major(st.st_dev)}:{os.minor(st.st_dev)}"
    hidden = mount(str(root), "nfs4", dev="0:77")
    put(root / "proc/self/mountinfo", hidden + mount(str(root.parent), "xfs", dev=dev))
    assert machine.disk(str(root / "new"), 65534, [65534])["fs"] == "xfs"


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
    got = machine.part(getattr(machine, name))
    assert got["status"] == "unreadable"
    assert got["data"] is None
    assert len(got["why"]) > 10


def test_shm_that_is_not_mounted_is_absent(root: Path) -> None:
    put(root / "proc/self/mountinfo", mount("/dev"))
    assert machine.part(machine.shm)["status"] == "absent"


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
        held.processes()


# --- what is there already


@pytest.mark.parametrize(
    "argv",
    [
        ["vllm", "serve", "m", "--api-key", CANARY],
        ["vllm", "serve", "m", "--api-key", CANARY, CANARY, "--port", "1"],
        ["vllm", "serve", "m", "--api-key", "-" + CANARY],
        ["vllm", "serve", "m", f"--api-key={CANARY}"],
        ["x", "--hf_token", CANARY],
        ["x", f"HF_TOKEN={CANARY}"],
        ["x", f"key={CANARY}"],
        ["x", "--password", CANARY],
        ["x", f"redis://user:{CANARY}@host:6379/0"],
        ["x", f"https://host/?api_key={CANARY}&x=1"],
        ["x", json.dumps({"type": "s3", "secret_key": CANARY, "n": 1})],
        ["x", json.dumps({"auth": CANARY})],
        ["sh", "-c", f"exec vllm serve m --api-key {CANARY} --port 1"],
        ["x", "-H", f"Authorization: Bearer {CANARY}"],
        ["x", "hf_" + CANARY],
    ],
)
def test_secrets_are_masked(argv: list[str]) -> None:
    got = held.masked(argv)
    assert CANARY not in " ".join(got)
    assert "***" in " ".join(got)
    assert got[0] == argv[0]


def test_what_is_no_secret_is_kept() -> None:
    argv = ["vllm", "serve", "/m", "--max-num-batched-tokens", "8192", "--tokenizer", "/t",
            "--port", "8000", '{"kv_connector":"LMCacheMPConnector"}']  # fmt: skip
    assert held.masked(argv) == argv


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts a Python that sleeps, from a script of that path, and ends it afterwards."""
    running: list[subprocess.Popen[bytes]] = []

    def go(script: Path, *more: str) -> subprocess.Popen[bytes]:
        put(script, "import sys, time; print(1, flush=True); time.sleep(60)")
        process = subprocess.Popen(
            [sys.executable, str(script), *more], stdout=subprocess.PIPE, env={"HF_TOKEN": CANARY}
        )
        running.append(process)
        assert process.stdout is not None
        process.stdout.readline()  # it runs
        return process

    yield go
    for process in running:
        process.kill()
        process.wait()
        if process.stdout:
            process.stdout.close()


def test_engines_that_are_not_kvhosts_are_adoptable(
    open_dir: Path, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    base = open_dir / "base"
    foreign = start(open_dir / "vllm", "serve", "m", "--api-key", CANARY)
    ours = start(base / "bin/vllm", "serve", "m")
    other = start(open_dir / "grep", "vllm")
    text = run_script(base)
    assert CANARY not in text
    rows = {p.pid: p for p in ok(parse_report(text).adoptable).processes}
    assert rows[foreign.pid].argv[-4:] == ["serve", "m", "--api-key", "***"]
    assert rows[foreign.pid].uid == os.geteuid()
    assert ours.pid not in rows
    assert other.pid not in rows


def test_foreign_units_are_found(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(root / "etc/systemd/system/ollama.service", "")
    put(root / "usr/lib/systemd/system/ssh.service", "")
    monkeypatch.setattr(held, "processes", dict)
    assert held.adoptable(root / "base", "no-such")["units"] == ["ollama.service"]


def test_hugging_face_models_with_their_bytes(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--name/snapshots/abc"
    blob = put(tmp_path / "models--org--name/blobs/1", "x" * 1000)
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to(blob)  # counted once
    assert held.hf_models(tmp_path) == [{"name": "org/name", "bytes": 1000}]


def record(base: Path, process: subprocess.Popen[bytes], ticks: int = 0, boot: str = "") -> None:
    real_boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    row = {"service": "runner", "pid": process.pid, "boot_id": boot or real_boot,
           "start_ticks": held.proc_stat(process.pid)[2] + ticks}  # fmt: skip
    put(base / "run/runner.json", json.dumps(row))


def test_a_service_is_alive_only_as_the_process_that_was_recorded(
    tmp_path: Path, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    def alive() -> bool:
        held.processes.cache_clear()
        (row,) = held.services(tmp_path)
        assert (row["pids"] != []) == row["alive"]
        assert (row["anon_bytes"] > 0) == row["alive"]
        return bool(row["alive"])

    process = start(tmp_path / "any")
    record(tmp_path, process)
    assert alive()
    record(tmp_path, process, ticks=1)  # the pid was given to another process
    assert not alive()
    record(tmp_path, process, boot="of another boot")
    assert not alive()
    record(tmp_path, process)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie now
    assert not alive()
    process.wait()
    assert not alive()
    held.processes.cache_clear()


def test_a_service_has_its_descendants(tmp_path: Path) -> None:
    shell = subprocess.Popen(["sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE)
    assert shell.stdout is not None
    child = int(shell.stdout.readline())
    try:
        held.processes.cache_clear()
        assert held.family(shell.pid) == [shell.pid, child]
    finally:
        os.kill(child, 9)
        shell.communicate()
        held.processes.cache_clear()


def kvhost(base: Path) -> dict[str, Any]:
    got = held.kvhost(base, base / "tier")
    return {name: (p["status"], p["data"] if p["status"] == "ok" else p["why"])
            for name, p in got.items()}  # fmt: skip


def test_nothing_of_kvhost_is_absent(tmp_path: Path) -> None:
    got = kvhost(tmp_path / "base")
    assert got.pop("files") == ("ok", {})
    assert {status for status, _ in got.values()} == {"absent"}


@pytest.mark.parametrize(
    "files, owner",
    [
        ([], "nobody"),
        (["lost+found/x"], "nobody"),
        (["photos/cat.jpg"], "foreign"),
        (["state/other"], "foreign"),
        (["state/receipt.json", "photos/cat.jpg"], "kvhost"),
        (["state/run.lock"], "kvhost"),
        (["state/.kvhost"], "kvhost"),
    ],
)
def test_whose_base_dir_is(tmp_path: Path, files: list[str], owner: str) -> None:
    for name in files:
        put(tmp_path / name, "")
    assert kvhost(tmp_path)["base"][1]["owner"] == owner


@pytest.mark.parametrize("text", ["", "{", "\x00\xff"])
def test_a_torn_receipt_is_unreadable_and_named(tmp_path: Path, text: str) -> None:
    put(tmp_path / "state/receipt.json", text)
    put(tmp_path / "state/run.lock", text)
    got = kvhost(tmp_path)
    for name, file in (("receipt", "receipt.json"), ("run_lock", "run.lock")):
        status, why = got[name]
        assert status == "unreadable"
        assert f"{tmp_path}/state/{file} is not JSON" in why


def test_a_receipt_that_is_no_regular_file_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    os.mkfifo(tmp_path / "state/receipt.json")
    (tmp_path / "state/run.lock").symlink_to("/etc/hostname")
    got = kvhost(tmp_path)
    assert "not a regular file" in got["receipt"][1]
    assert "not a regular file" in got["run_lock"][1]


def test_the_run_lock_ages_by_the_hosts_clock(tmp_path: Path) -> None:
    lock = put(tmp_path / "state/run.lock", '{"run_id": "r1"}')
    os.utime(lock, (1, time.time() - 100))
    content = kvhost(tmp_path)["run_lock"][1]
    assert content["content"] == {"run_id": "r1"}
    assert 100 <= content["age_s"] < 110


def test_environments_are_finished_by_their_marker(tmp_path: Path) -> None:
    put(tmp_path / "envs/aa/.kvhost-complete.json", '{"lock": "aa"}')
    put(tmp_path / "envs/bb/bin/python", "")
    put(tmp_path / "envs/cc/.kvhost-complete.json", "{")
    rows = kvhost(tmp_path)["envs"][1]
    assert [(r["name"], r["complete"]) for r in rows] == [
        ("aa", True),
        ("bb", False),
        ("cc", False),
    ]
    assert rows[0]["marker"] == {"lock": "aa"}
    assert "does not exist" in rows[1]["why"]
    assert "is not JSON" in rows[2]["why"]


def test_where_current_points(tmp_path: Path) -> None:
    current = tmp_path / "current"
    current.symlink_to("envs/aa")
    assert kvhost(tmp_path)["current"][1] == {"target": "envs/aa", "resolves": False}
    (tmp_path / "envs/aa").mkdir(parents=True)
    assert kvhost(tmp_path)["current"][1] == {"target": "envs/aa", "resolves": True}
    current.unlink()
    current.symlink_to("current")
    assert kvhost(tmp_path)["current"][1] == {"target": "current", "resolves": False}
    current.unlink()
    current.mkdir()
    assert "is not a symlink" in kvhost(tmp_path)["current"][1]


def test_namespaces_are_counted_inside_the_tier_only(tmp_path: Path) -> None:
    tier = tmp_path / "tier"
    put(tier / "ns-aa/one", "x" * 10)
    put(tier / "ns-aa/deep/two", "x" * 20)
    os.utime(tier / "ns-aa/one", (1, 5_000_000_000))
    (tier / "ns-aa/out").symlink_to("/")
    (tier / "ns-aa/loop").symlink_to(tier)
    put(tier / "ns-bb/.kvhost-namespace.json", '{"chunk_size": 256}')
    (tier / "ns-link").symlink_to("/usr")
    put(tier / "photo.jpg", "x")
    (tier / "lost+found").mkdir()
    got = kvhost(tmp_path)["tier"][1]
    one, two = got["namespaces"]
    assert (one["name"], one["files"], one["bytes"]) == ("ns-aa", 2, 30)
    assert one["newest_mtime"] == 5_000_000_000
    assert one["metadata"]["status"] == "absent"
    assert two["metadata"]["data"] == {"chunk_size": 256}
    assert got["foreign"] == ["ns-link", "photo.jpg"]


def test_files_are_told_by_digest_and_secrets_are_not(tmp_path: Path) -> None:
    put(tmp_path / "etc/runner.json", "a").chmod(0o644)
    put(tmp_path / "secrets/api-key", "b").chmod(0o640)
    got = kvhost(tmp_path)["files"][1]
    digest = "ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb"  # of "a"
    uid = os.geteuid()
    assert got == {
        f"{tmp_path}/etc/runner.json": {"uid": uid, "mode": "0644", "sha256": digest},
        f"{tmp_path}/secrets/api-key": {"uid": uid, "mode": "0640", "sha256": None},
    }


def test_a_model_that_the_user_cannot_read(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    put(tmp_path / "config.json", '{"num_hidden_layers": 8}').chmod(0o644)
    put(tmp_path / "model.safetensors", "x" * 50).chmod(0o600)
    got = machine.model(str(tmp_path), 65534, [65534])
    assert got["closed"] == ["model.safetensors"]
    assert got["config"]["data"] == {"num_hidden_layers": 8}
    assert {"name": "model.safetensors", "bytes": 50} in got["files"]
    assert machine.model(str(tmp_path), os.geteuid() or 0, [0])["closed"] == []
    with pytest.raises(machine.Absent, match="not a directory"):
        machine.model(str(tmp_path / "none"), 65534, [])


# --- parse_report


def test_anything_else_than_a_report_is_quoted(open_dir: Path) -> None:
    with pytest.raises(ReportError, match="printed nothing"):
        parse_report(" \n")
    with pytest.raises(ReportError, match="first line that came is: 'sudo: a password is"):
        parse_report("sudo: a password is required\nmore\n")
    with pytest.raises(ReportError, match=r"JSON but not a report.*'\[1\]'"):
        parse_report("[1]")
    data = json.loads(run_script(open_dir / "base"))
    parse_report(json.dumps(data))
    for change, message in (
        ({"os": {"status": "ok", "why": None, "data": None}}, "os.*a part that is ok with data"),
        ({"os": {"status": "absent", "why": None, "data": None}}, "os.*without a reason"),
        ({"os": {"status": "fine", "why": None, "data": None}}, "os.status"),
        ({"kvhost_report": 2}, "kvhost_report"),
        ({"more": 1}, "more"),
    ):
        with pytest.raises(ReportError, match=message):
            parse_report(json.dumps({**data, **change}))
