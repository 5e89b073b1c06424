#!/usr/bin/env python3
"""Say what a host is and holds, as one JSON object on one line of stdout.

Read only: nothing is written, started or stopped. Every part is {"status", "why", "data"}:
"ok" with data; "absent" when what was asked for is known not to be there; "unreadable" when it
could not be found out, with the reason. A part that fails or hangs never stops the others.
No environment variable is printed. Sizes are bytes, times seconds since the epoch by the host's
clock. What REPORT_SCRIPTS of kvhost/onhost/__init__.py names must lie beside this file:
report_held.py is run for the parts about what the host holds (users, packages, ports, kvhost,
adoptable), report_gpu.py for the driver's, and with --drives report_drives.py and what it imports.
Exit 0 when the object was printed.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import pwd
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from kvhost.onhost.forked import Running, said
    from kvhost.onhost.model_look import config_of, weights_of
    from kvhost.onhost.report_machine import cpus, gpu, memory, mounts, os_release, pid1, shm
    from kvhost.onhost.report_parts import Absent, Data, gather, is_dir, part, run, st
else:  # they lie beside this file
    from forked import Running, said
    from model_look import config_of, weights_of
    from report_machine import cpus, gpu, memory, mounts, os_release, pid1, shm
    from report_parts import Absent, Data, gather, is_dir, part, run, st

SCHEMA = 1
PYTHONS = ("python3.13", "python3.12", "python3.11", "python3")
NOBODY = 65534
HELD = ("users", "packages", "ports", "kvhost", "adoptable")


def allows(found: os.stat_result, uid: int, gids: list[int], what: int) -> bool:
    """Whether a mode lets this user read (4), write (2) or pass through (1)."""
    shift = 6 if found.st_uid == uid else 3 if found.st_gid in gids else 0
    return bool(found.st_mode >> shift & what)


def blocked_by(path: Path, uid: int, gids: list[int]) -> str | None:
    """The first existing directory above ``path`` that this user may not pass through."""
    if uid == 0:
        return None
    for way in (path, Path(os.path.realpath(path))):
        for directory in reversed(way.parents):
            found = st(directory)
            if found is None:
                break
            if not allows(found, uid, gids, 1):
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


def model(path: str | None, uid: int, gids: list[int]) -> Data:
    """A model directory: its files, whether the service's user may read them, its config.json, what
    its weights are."""
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
        if uid and not allows(found, uid, gids, 4):
            closed.append(p.name)
    return {
        "path": path,
        "files": rows,
        "closed": closed,
        "blocked_by": blocked_by(top / "config.json", uid, gids),
        "config": part(lambda: config_of(str(top / "config.json"))),
        "weights": part(lambda: weights_of(path)),
    }


def model_file(path: Path, uid: int, gids: list[int]) -> Data:
    """The same of a .gguf file, with all parts of a model that is split; what gguf.py reads of it
    stands in config's place."""
    found = st(path)
    if found is None or not stat.S_ISREG(found.st_mode):
        raise Absent(f"{path} is not a file")

    def told() -> Data:
        got = subprocess.run(
            [sys.executable, "-I", str(Path(__file__).with_name("gguf.py")), str(path)],
            stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=20,
        )  # fmt: skip
        if got.returncode:
            raise ValueError(got.stderr.decode(errors="replace").strip()[-300:])
        return dict(json.loads(got.stdout))

    config = part(told)
    # of what is not whole only the file itself is known
    files = (config["data"] or {}).get("files", [{"name": path.name, "bytes": found.st_size}])
    kinds = {one["name"]: st(path.with_name(one["name"])) for one in files}
    closed = [name for name, kind in kinds.items() if kind and not allows(kind, uid, gids, 4)]
    return {
        "path": str(path),
        "files": files,
        "closed": closed if uid else [],
        "blocked_by": blocked_by(path, uid, gids),
        "config": config,
        "weights": part(absent_weights),
    }


def absent_weights() -> Data:
    raise Absent("a .gguf file: its header tells")


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
