#!/usr/bin/env python3
"""Say what a host is and holds, as one JSON object on one line of stdout.

Read only: nothing is written, started or stopped. Every part is {"status", "why", "data"}:
"ok" with data; "absent" when what was asked for is known not to be there; "unreadable" when it
could not be found out, with the reason. A part that fails or hangs never stops the others.
No environment variable is printed. Sizes are bytes, times seconds since the epoch by the host's
clock. forked.py and report_held.py must lie beside this file: the second is run for the parts about
what the host holds (users, packages, ports, kvhost, adoptable), and with --drives report_drives.py
and what it imports. Exit 0 when the object was printed.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import pwd
import re
import shutil
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from kvhost.onhost.forked import Running, said
else:  # it lies beside this file
    from forked import Running, said

SCHEMA = 1
ROOT = Path("/")  # tests put a directory with its own proc, sys and etc here
PYTHONS = ("python3.13", "python3.12", "python3.11", "python3")
CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16")
SHM_NAMES = ("lmcache", "kvhost", "vllm")
NOBODY = 65534
HELD = ("users", "packages", "ports", "kvhost", "adoptable")
Data = dict[str, Any]


class Absent(Exception):
    """What was asked for is known not to be there."""


def st(path: Path, follow: bool = True) -> os.stat_result | None:
    """stat(), None only when nothing is there: no permission and link loops are errors."""
    try:
        return path.stat() if follow else path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None


def is_dir(path: Path) -> bool:
    found = st(path)
    return found is not None and stat.S_ISDIR(found.st_mode)


def host(*parts: str) -> Path:
    return ROOT.joinpath(*parts)


def read(*parts: str) -> str:
    return host(*parts).read_text(errors="replace")


def part(read_it: Callable[[], Any]) -> Data:
    """One part of the report; whatever goes wrong in it becomes its reason."""
    try:
        return {"status": "ok", "why": None, "data": read_it()}
    except Absent as why:
        return {"status": "absent", "why": str(why), "data": None}
    except Exception as why:  # the reason is handed on; the other parts must still be read
        return {"status": "unreadable", "why": f"{type(why).__name__}: {why}", "data": None}


def run(argv: list[str], uid: int | None = None, gids: list[int] | None = None) -> tuple[int, str]:
    """Exit code and stdout of a program, as another user when ``uid`` is given (root only)."""
    more: Data = {} if uid is None else {"user": uid}
    if uid is not None and gids:
        more.update(group=gids[0], extra_groups=gids)
    got: subprocess.CompletedProcess[Any] = subprocess.run(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        timeout=15, cwd="/", check=False, **more,
    )  # fmt: skip
    return got.returncode, bytes(got.stdout).decode(errors="replace")


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


def blocked_by(path: Path, uid: int, gids: list[int]) -> str | None:
    """The first existing directory above ``path`` that this user may not pass through."""
    if uid == 0:
        return None
    for way in (path, Path(os.path.realpath(path))):
        for directory in reversed(way.parents):
            found = st(directory)
            if found is None:
                break
            bit = 0o100 if found.st_uid == uid else 0o010 if found.st_gid in gids else 0o001
            if not found.st_mode & bit:
                try:  # the mode says no, but an ACL may say yes: ask the kernel as that user
                    if run(["test", "-x", str(directory)], uid, gids)[0] == 0:
                        continue
                except OSError:
                    pass  # not root, or no such uid here: the mode is all there is
                return str(directory)
    return None


def account(name: str) -> tuple[int, list[int]]:
    """uid and groups of the service's user, of nobody while it does not exist."""
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        return NOBODY, [NOBODY]
    groups = os.getgrouplist(name, entry.pw_gid)
    return entry.pw_uid, [entry.pw_gid, *[g for g in groups if g != entry.pw_gid]]


def disk(path: str, uid: int, gids: list[int]) -> Data:
    """The filesystem that ``path`` is on, or would be created on."""
    target = Path(path)
    there = target
    while (found := st(there)) is None:
        if st(there, follow=False) is not None:
            raise ValueError(f"{there} is a symlink to nothing")
        there = there.parent
    real = Path(os.path.realpath(there))
    above = [str(p) for p in (real, *real.parents)]
    dev = f"{os.major(real.stat().st_dev)}:{os.minor(real.stat().st_dev)}"
    on = max(  # of two mounts at one point the later hides the earlier
        (m["dev"] == dev, len(m["mount_point"]), n, m)
        for n, m in enumerate(mounts()) if m["mount_point"] in above
    )[3]  # fmt: skip
    vfs = os.statvfs(real)
    flags = {*on["options"], *on["super_options"]}
    return {
        "path": path, "real_path": os.path.realpath(path), "ancestor": str(there),
        "exists": there == target,
        "directory": stat.S_ISDIR(found.st_mode), "mount_point": on["mount_point"],
        "fs": on["fs"], "read_only": "ro" in flags, "noexec": "noexec" in flags,
        "total": vfs.f_blocks * vfs.f_frsize, "free": vfs.f_bfree * vfs.f_frsize,
        "avail": vfs.f_bavail * vfs.f_frsize, "inodes": vfs.f_files,
        "inodes_free": vfs.f_favail, "blocked_by": blocked_by(target, uid, gids),
    }  # fmt: skip


def runs_as(argv: list[str], uid: int, gids: list[int]) -> bool:
    """Whether a user can run it: tried when we are root, else supposed from the directories."""
    if os.geteuid() != 0 or uid == 0:
        return True
    try:
        return run(argv, uid, gids)[0] == 0
    except PermissionError:
        return False


def pythons(uid: int, gids: list[int], asked: str | None) -> list[Data]:
    """Every Python 3.11-3.13 by its usual names, and the one asked for, tried as that user."""
    places = ["/usr/bin", "/usr/local/bin", *os.environ.get("PATH", "").split(os.pathsep)]
    names = [Path(p) / n for n in PYTHONS for p in places if p.startswith("/")]
    probe = (
        "import importlib.util as u, json, platform, sys; print(json.dumps([platform"
        ".python_version(), [bool(u.find_spec(m)) for m in ('ensurepip', 'venv')]]))"
    )
    found: dict[str, Data] = {}
    for path in [*([Path(asked)] if asked else []), *names]:
        real, is_asked = os.path.realpath(path), str(path) == asked
        if real in found or (not is_asked and st(path) is None):
            continue
        row: Data = {
            "path": str(path), "version": None, "usable_by_service": False,
            "blocked_by": None, "ensurepip": False, "venv": False, "error": None,
        }  # fmt: skip
        argv = [str(path), "-I", "-S", "-c", probe]
        try:
            code, out = run(argv)
            if code:
                raise ValueError(f"exits {code}")
            row["version"], (row["ensurepip"], row["venv"]) = json.loads(out)
            row["blocked_by"] = blocked_by(path, uid, gids)
            row["usable_by_service"] = row["blocked_by"] is None and runs_as(argv, uid, gids)
        except (OSError, ValueError, subprocess.SubprocessError) as why:
            row["error"] = f"{type(why).__name__}: {why}"
        version = str(row["version"] or "")
        if is_asked or row["error"] or version.startswith(("3.11.", "3.12.", "3.13.")):
            found[real] = row
    return list(found.values())


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


def model(path: str | None, uid: int, gids: list[int]) -> Data:
    """A model directory: its files, whether the service's user may read them, its config.json."""
    if not path:
        raise Absent("no model path was asked for")
    top = Path(path)
    if path.endswith(".gguf"):
        return model_file(top, uid, gids)
    if not is_dir(top):
        raise Absent(f"{path} is not a directory")
    rows, closed = [], []
    for p in sorted(top.iterdir()):
        found = st(p)
        if found is None or not stat.S_ISREG(found.st_mode):
            continue
        rows.append({"name": p.name, "bytes": found.st_size})
        bit = 0o400 if found.st_uid == uid else 0o040 if found.st_gid in gids else 0o004
        if uid and not found.st_mode & bit:
            closed.append(p.name)
    config = part(lambda: json.loads((top / "config.json").read_text()))
    blocked = blocked_by(top / "config.json", uid, gids)
    return {"path": path, "files": rows, "closed": closed, "blocked_by": blocked, "config": config}


def model_file(path: Path, uid: int, gids: list[int]) -> Data:
    """The same of one .gguf file; what gguf.py reads of it stands in config's place."""
    found = st(path)
    if found is None or not stat.S_ISREG(found.st_mode):
        raise Absent(f"{path} is not a file")
    bit = 0o400 if found.st_uid == uid else 0o040 if found.st_gid in gids else 0o004
    closed = [path.name] if uid and not found.st_mode & bit else []

    def told() -> Data:
        got = subprocess.run(
            [sys.executable, "-I", str(Path(__file__).with_name("gguf.py")), str(path)],
            stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=20,
        )  # fmt: skip
        if got.returncode:
            raise ValueError(got.stderr.decode(errors="replace").strip()[-300:])
        return dict(json.loads(got.stdout))

    return {
        "path": str(path),
        "files": [{"name": path.name, "bytes": found.st_size}],
        "closed": closed,
        "blocked_by": blocked_by(path, uid, gids),
        "config": part(told),
    }


def driver(running: Running, until: float) -> Data:
    """The part that report_gpu.py reads."""
    return dict(json.loads(said(running, until)))


def drives(args: argparse.Namespace) -> Data:
    """The part that report_drives.py reads. A drive that hangs is left behind, not waited for."""
    if not args.drives:
        raise Absent("not asked for")
    argv = [sys.executable, "-Es", str(Path(__file__).with_name("report_drives.py"))]
    argv += ["--mount", args.drive_mount] if args.drive_mount else []
    argv += ["--state", f"{args.base_dir}/state"]
    pipe = subprocess.PIPE
    running = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe)
    try:
        out, err = running.communicate(timeout=args.timeout_s - 1)
    except subprocess.TimeoutExpired:
        running.kill()  # and no wait: a process that waits for a dead drive does not end
        raise OSError("drives: one of them does not answer") from None
    if running.returncode:
        last = err.decode(errors="replace").strip().splitlines()[-1:] or ["no output"]
        raise OSError(f"report_drives.py exits {running.returncode}: {last[0]}")
    return dict(json.loads(out))


def shared(place: str | None) -> Data:
    """Whether the store that hosts share KV through answers from here: its port, and without TLS
    that it is no other kind of server's. Nothing here knows its password."""
    if place is None:
        raise Absent("not asked for")
    url = urlsplit(place)
    ask = {"redis": b"*1\r\n$4\r\nPING\r\n", "s3+http": b"HEAD / HTTP/1.0\r\n\r\n"}
    means = {"redis": ("-NOAUTH", "+PONG"), "s3+http": ("HTTP/1.",)}
    port = url.port or {"s3+http": 80, "s3+https": 443}[url.scheme]
    try:
        with socket.create_connection((url.hostname or "", port), 3) as one:
            if url.scheme in ask:
                one.sendall(ask[url.scheme])
                said = one.recv(100).decode(errors="replace").strip()
                if not said.startswith(means[url.scheme]):
                    return {"answers": False, "why": f"it says {said[:80]!r}"}
    except OSError as error:
        return {"answers": False, "why": error.strerror or str(error)}
    return {"answers": True, "why": None}


def gather(parts: dict[str, Callable[[], Any]], timeout_s: float) -> Data:
    """All parts, each in a thread of its own: a mount that hangs costs its part, not the run."""
    late = f"did not answer within {timeout_s:g} s"
    found: Data = {n: {"status": "unreadable", "why": late, "data": None} for n in parts}

    def fill(name: str) -> None:
        found[name] = part(parts[name])

    threads = [threading.Thread(target=fill, args=(name,), daemon=True) for name in parts]
    for thread in threads:
        thread.start()
    end = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return dict(found)


def report(args: argparse.Namespace) -> Data:
    names = ("base_dir", "tier_dir", "service_user", "packages", "ports", "timeout_s")
    rest = [f"--{name.replace('_', '-')}={getattr(args, name)}" for name in names]
    rest += [f"--models-dir={args.models_dir}"] if args.models_dir else []
    here = Path(__file__).parent
    held = Running(["python3", str(here / "report_held.py"), *rest])  # it keeps the limit itself
    gpus = Running(["python3", str(here / "report_gpu.py")])
    end = time.monotonic() + args.timeout_s
    uid, gids = account(args.service_user)
    paths = list(dict.fromkeys([args.base_dir, args.tier_dir, *args.path_free]))
    parts: dict[str, Callable[[], Any]] = {
        "os": os_release,
        "arch": lambda: {"machine": platform.machine(), "kernel": platform.release()},
        "pid1": pid1,
        "memory": memory,
        "shm": shm,
        "cpus": cpus,
        "mounts": mounts,
        "disks": lambda: [
            {"path": p, "disk": part(functools.partial(disk, p, uid, gids))} for p in paths
        ],
        "pythons": lambda: pythons(uid, gids, args.python),
        "gpu": gpu,
        "model": lambda: model(args.model_path, uid, gids),
        "driver": lambda: driver(gpus, end),
        "drives": lambda: drives(args),
        "shared": lambda: shared(args.shared),
    }
    mine = gather(parts, args.timeout_s)
    box = part(lambda: json.loads(said(held, end + 10)))
    other = box["data"] or dict.fromkeys(HELD, box)
    return {"kvhost_report": SCHEMA, "time_unix": time.time(), **mine, **other}


def absolute(text: str) -> str:
    if not text.startswith("/"):
        raise argparse.ArgumentTypeError(f"{text!r} is not an absolute path")
    return os.path.normpath(text)


def main(argv: list[str] | None = None) -> int:
    cli = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    cli.add_argument("--base-dir", required=True, type=absolute, help="kvhost's directory")
    cli.add_argument("--tier-dir", required=True, type=absolute, help="directory of the KV cache")
    cli.add_argument("--service-user", required=True, help="user that the services run as")
    cli.add_argument("--packages", default="", metavar="A,B", help="dpkg names")
    cli.add_argument("--ports", default="", metavar="N,N", help="TCP ports that are wanted")
    cli.add_argument("--python", type=absolute, help="a Python to try besides the usual ones")
    cli.add_argument("--model-path", type=absolute, help="a model directory to look into")
    cli.add_argument("--path-free", type=absolute, action="append", default=[], metavar="PATH",
                     help="one more path whose filesystem is told; may be repeated")  # fmt: skip
    cli.add_argument("--models-dir", type=absolute, metavar="PATH",
                     help="models lie there too, beside those in base_dir")  # fmt: skip
    cli.add_argument("--drives", action="store_true", help="look at the drives too (as root)")
    cli.add_argument("--drive-mount", type=absolute, metavar="PATH", help="where one is mounted")
    cli.add_argument("--shared", metavar="URL", help="is this store there, by its shared_tier")
    cli.add_argument("--timeout-s", type=float, default=30.0, help="seconds for all parts")
    print(json.dumps(report(cli.parse_args(argv)), separators=(",", ":")), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
