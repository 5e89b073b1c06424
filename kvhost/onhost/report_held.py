#!/usr/bin/env python3
"""Say who and what is on a host: users, packages, ports, kvhost's own, what could be adopted.

The second half of report.py, which runs it and says what a part is; by hand it prints its parts
alone. Read only. Secrets in command lines are masked, of secret files no digest is given.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import ipaddress
import json
import os
import pwd
import re
import shutil
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path("/")  # tests put a directory with its own proc and etc here
MARKER = ".kvhost-complete.json"  # a finished environment or model
SERVICE = re.compile(r"cache|runner(-[a-z0-9]+)?|slots|pruner")
UNIT = re.compile(rf"kvhost-({SERVICE.pattern})\.service")
UNIT_DIRS = ("etc", "run", "usr/lib", "lib")  # of systemd, the first one counts
NAMESPACE = ".kvhost-namespace.json"  # what a namespace is the digest of
ENGINES = re.compile(r"^(vllm|lmcache|lmcache_server|llama-server|ollama|supervisord)$|^VLLM::")
#: a program or file of an installation of kvhost, in a command line; group 1: its base_dir
OF_KVHOST = re.compile(
    r"(/.+?)/(?:(?:envs|tools)/[^/]+/|current/|bin/[a-z_]+\.py$|etc/(?:supervisord\.conf|vllm)).*"
)
WRITTEN_FOR = re.compile(r"# Written by kvhost for (/.*?)\. ")  # kvhost/services/units.py
UNITS = ("vllm*", "lmcache*", "ollama*", "llama-server*")
_SECRET = r"(?:api[-_]?key|key|token|secret|password|passwd|credentials?|auth)"
SECRET_NAME = re.compile(rf"(?i)(?:^|[-_.]){_SECRET}$")
SECRET_TEXT = (
    (
        re.compile(rf"(?i)((?:^|[\s&?;,'\"{{_.-]){_SECRET}['\"]?\s*[=:]\s*['\"]?)[^\s'\"&,}}]+"),
        r"\1",
    ),
    (re.compile(rf"(?i)(--?(?:[\w-]*[-_])?{_SECRET}\s+)(?!-)\S+"), r"\1"),
    (re.compile(r"(://)[^/@\s]+(?=@)"), r"\1"),
    (re.compile(r"(?i)(\bbearer\s+)\S+"), r"\1"),
    (re.compile(r"\b(hf_|sk-)[A-Za-z0-9_-]{8,}"), r"\1"),
)
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


def json_file(path: Path) -> Any:
    """The JSON in a file of at most 4 MiB, no link. Raises Absent, OSError, ValueError."""
    found = st(path, follow=False)
    if found is None:
        raise Absent(f"{path} does not exist")
    if not stat.S_ISREG(found.st_mode) or found.st_size > 4 << 20:
        raise ValueError(f"{path} is not a regular file of at most 4 MiB")
    try:
        return json.loads(path.read_text())
    except ValueError as why:
        raise ValueError(f"{path} is not JSON: {why}") from None


def tree_size(top: Path) -> Data:
    """Files, bytes and newest mtime below a directory; links are never followed."""
    files, size, newest = 0, 0, 0.0
    todo = [str(top)]
    while todo:
        with os.scandir(todo.pop()) as entries:
            for entry in entries:
                try:
                    found = entry.stat(follow_symlinks=False)
                except FileNotFoundError:  # pruned under our hands
                    continue
                if stat.S_ISDIR(found.st_mode):
                    todo.append(entry.path)
                elif stat.S_ISREG(found.st_mode):
                    files, size = files + 1, size + found.st_size
                    newest = max(newest, found.st_mtime)
    return {"files": files, "bytes": size, "newest_mtime": newest or None}


def users(service_user: str) -> Data:
    me = os.geteuid()
    named = {u.pw_uid: u.pw_name for u in reversed(pwd.getpwall())}
    sudo = None
    if me != 0:
        sudo = False
        if shutil.which("sudo"):
            argv = ["sudo", "-n", "true"]
            sudo = (
                subprocess.run(argv, capture_output=True, timeout=15, check=False).returncode == 0
            )
    try:
        u = pwd.getpwnam(service_user)
        service: Data | None = {
            "name": u.pw_name, "uid": u.pw_uid, "gid": u.pw_gid, "home": u.pw_dir,
            "shell": u.pw_shell,
        }  # fmt: skip
    except KeyError:
        service = None
    no_login = ("", "nologin", "false", "sync")
    login = [
        u.pw_name for u in pwd.getpwall()
        if u.pw_uid not in (0, me) and u.pw_name not in (service_user, os.environ.get("SUDO_USER"))
        and Path(u.pw_shell).name not in no_login
    ]  # fmt: skip
    return {
        "name": named.get(me), "uid": me, "gid": os.getegid(), "sudo": sudo,
        "service_user": service, "login_users": sorted(login),
    }  # fmt: skip


def packages(names: list[str]) -> dict[str, str]:
    """dpkg's state of each name; "absent" for one that dpkg does not know."""
    if shutil.which("dpkg-query") is None:
        raise Absent("this host has no dpkg-query")
    states = dict.fromkeys(names, "absent")
    if names:
        argv = ["dpkg-query", "-W", "-f", "${Package} ${db:Status-Status}\n", "--", *names]
        got = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)
        if got.returncode not in (0, 1):  # dpkg-query(1): 1 = a name is not known, 2 = trouble
            raise OSError(f"dpkg-query exits {got.returncode}: {got.stderr.strip()}")
        for line in got.stdout.splitlines():
            name, state = line.split()
            if states.get(name) != "installed":  # one name, several architectures
                states[name] = state
    return states


def proc_stat(pid: int) -> tuple[str, int, int]:
    """State, parent and start time in ticks (field 22) of /proc/PID/stat, proc_pid_stat(5)."""
    words = read("proc", str(pid), "stat").rpartition(")")[2].split()
    return words[0], int(words[1]), int(words[19])


@functools.lru_cache(maxsize=1)
def processes() -> dict[int, Data]:
    """All processes. Raises OSError where the kernel would hide some of them, proc(5)."""
    hidden = re.findall(r" /proc .* - proc .*\bhidepid=(\w+)", read("proc/self/mountinfo"))
    if hidden and hidden[-1] not in ("0", "off") and os.geteuid():
        raise OSError(f"/proc is mounted with hidepid={hidden[-1]}: processes of others are hidden")
    rows: dict[int, Data] = {}
    for path in host("proc").iterdir():
        if not path.name.isdigit():
            continue
        try:
            state, parent, ticks = proc_stat(int(path.name))
            argv = (path / "cmdline").read_bytes().decode(errors="replace")
            rows[int(path.name)] = {
                "comm": (path / "comm").read_text(errors="replace").strip(), "ppid": parent,
                "ticks": ticks, "uid": path.stat().st_uid, "state": state,
                "argv": argv.rstrip("\0").split("\0"),
            }  # fmt: skip
        except (FileNotFoundError, ProcessLookupError):  # ended meanwhile
            continue
    if not rows:
        raise OSError("/proc lists no processes")
    return rows


def family(pid: int) -> list[int]:
    """A process and all its descendants."""
    pids = [pid]
    for one in pids:
        pids += [p for p, row in processes().items() if row["ppid"] == one and p not in pids]
    return pids


def ports(wanted: list[int]) -> Data:
    """Listening TCP sockets, v4 and v6, with their process where it may be read."""
    inodes: dict[str, int] = {}
    for pid in processes():
        try:
            fds = list(host("proc", str(pid), "fd").iterdir())
        except OSError:  # not ours to read, or ended: the socket is then shown without a pid
            continue
        for fd in fds:
            with contextlib.suppress(OSError):  # closed since: a server that is asked something
                link = os.readlink(fd)
                if link.startswith("socket:["):
                    inodes[link[8:-1]] = pid
    rows = []
    for name in ("tcp", "tcp6"):
        if name == "tcp6" and st(host("proc/net/tcp6")) is None:
            continue  # IPv6 is off
        for line in read("proc/net", name).splitlines()[1:]:
            word = line.split()
            address, _, port = word[1].partition(":")
            if word[3] != "0A":  # TCP_LISTEN
                continue
            quads = [bytes.fromhex(address[n : n + 8]) for n in range(0, len(address), 8)]
            raw = b"".join(q[::-1] if sys.byteorder == "little" else q for q in quads)
            owner = inodes.get(word[9])
            rows.append({
                "address": str(ipaddress.ip_address(raw)), "port": int(port, 16),
                "uid": int(word[7]), "pid": owner,
                "comm": processes()[owner]["comm"] if owner else None,
            })  # fmt: skip
    return {"wanted": wanted, "listening": rows}


def mask_text(text: str) -> str:
    for pattern, keep in SECRET_TEXT:
        text = pattern.sub(keep + "***", text)
    return text[:300]


def masked(argv: list[str]) -> list[str]:
    """A command line without its secrets: every value after a flag that names one, key=value."""
    out: list[str] = []
    after, first = False, False  # after a flag that names a secret; it is the first value of it
    for word in argv[:80]:
        if first or (after and not word.startswith("-")):
            out.append("***")
            first = False
            continue
        name, has_value, _ = word.partition("=")
        secret = bool(SECRET_NAME.search(name))
        after = first = secret and word.startswith("-") and not has_value
        out.append(f"{name}=***" if secret and has_value else mask_text(word))
    return out


def listing(path: Path) -> list[Path]:
    if not is_dir(path):
        if st(path, follow=False) is None:
            raise Absent(f"{path} does not exist")
        raise ValueError(f"{path} is not a directory")
    return sorted(path.iterdir())


def built(top: Path, sizes: bool) -> list[Data]:
    """Directories that are finished when they hold a complete marker."""
    rows = []
    for path in (p for p in listing(top) if p.is_dir() and not p.is_symlink()):
        row: Data = {"name": path.name, "complete": False, "marker": None, "why": None}
        try:
            row["marker"] = json_file(path / MARKER)
            row["complete"] = isinstance(row["marker"], dict)
        except (Absent, ValueError) as why:
            # model_gguf.py makes one file, which appears whole
            row["complete"] = path.name.startswith("gguf-") and (path / "model.gguf").is_file()
            row["why"] = None if row["complete"] else str(why)
        rows.append({**row, "bytes": tree_size(path)["bytes"] if sizes else None})
    return rows


def base_state(base: Path) -> Data:
    """Whose base_dir is: kvhost's when its state has a receipt or a run lock (or its guard)."""
    names = [p.name for p in listing(base) if p.name != "lost+found"]
    if names == ["state"] and is_dir(base / "state") and not listing(base / "state"):
        names = []  # a run that was killed before it had the lock
    marks = ("state/receipt.json", "state/run.lock", "state/run.lock.guard")
    ours = any(st(base / mark, follow=False) for mark in marks)
    owner = "kvhost" if ours else "foreign" if names else "nobody"
    return {"owner": owner, "entries": names[:8]}


def current(base: Path) -> Data:
    link = base / "current"
    if st(link, follow=False) is None:
        raise Absent(f"{link} does not exist")
    if not link.is_symlink():
        raise ValueError(f"{link} is not a symlink")
    try:
        resolves = is_dir(link)
    except OSError:  # a loop
        resolves = False
    return {"target": str(link.readlink()), "resolves": resolves}


def run_lock(base: Path) -> Data:
    path = base / "state" / "run.lock"
    content = json_file(path)
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a JSON object")
    return {"content": content, "age_s": max(0.0, time.time() - path.stat().st_mtime)}


def last_run(base: Path) -> str:
    """Run id of the last run that held the lock; "" where an older version left no name."""
    path = base / "state" / "run.lock.guard"
    if st(path, follow=False) is None:
        raise Absent(f"no run was ever begun in {base}")
    return path.read_text(errors="replace").strip()


def services(base: Path) -> list[Data]:
    boot = read("proc/sys/kernel/random/boot_id").strip()
    rows = []
    for path in listing(base / "run"):
        if path.suffix != ".json" or not SERVICE.fullmatch(path.stem):
            continue  # notes of other kinds
        record = json_file(path)
        pid, ticks = int(record["pid"]), int(record["start_ticks"])
        row: Data = {
            "name": path.stem, "record": record, "alive": False, "pids": [],
            "anon_bytes": 0, "shmem_bytes": 0,
        }  # fmt: skip
        now = processes().get(pid)
        same = now is not None and now["ticks"] == ticks and now["state"] not in "ZX"
        if same and record.get("boot_id") == boot:
            row.update(alive=True, pids=family(pid))
            for one in row["pids"]:
                kib = dict(re.findall(r"(Rss\w+):\s+(\d+)", read("proc", str(one), "status")))
                row["anon_bytes"] += int(kib.get("RssAnon", 0)) * 1024
                row["shmem_bytes"] = max(row["shmem_bytes"], int(kib.get("RssShmem", 0)) * 1024)
        rows.append(row)
    return rows


def tier(top: Path) -> Data:
    rows, foreign = [], []
    for path in listing(top):
        if path.name.startswith("ns-") and path.is_dir() and not path.is_symlink():
            meta = part(functools.partial(json_file, path / NAMESPACE))
            rows.append({"name": path.name, "metadata": meta, **tree_size(path)})
        elif path.name != "lost+found" and not path.name.startswith(".kvhost"):
            foreign.append(path.name)
    return {"namespaces": rows, "foreign": foreign[:20]}


def files(base: Path) -> dict[str, Data]:
    """Owner, mode and digest of what kvhost renders; of secrets no digest."""
    rows: dict[str, Data] = {}
    for name in ("bin", "etc", "secrets"):
        for path in sorted((base / name).rglob("*")) if is_dir(base / name) else []:
            found = st(path, follow=False)
            if found is None or not stat.S_ISREG(found.st_mode) or len(rows) >= 500:
                continue
            small = name != "secrets" and found.st_size <= 4 << 20
            rows[str(path)] = {
                "uid": found.st_uid, "mode": f"{found.st_mode & 0o7777:04o}",
                "sha256": hashlib.sha256(path.read_bytes()).hexdigest() if small else None,
            }  # fmt: skip
    return rows


def own_units(base: Path) -> list[Data]:
    """Units of kvhost's names, and whether they are this installation's (services/units.py)."""
    rows = []
    for top in UNIT_DIRS:
        if host(top).is_symlink():  # /lib is /usr/lib
            continue
        folder = host(top, "systemd/system")
        for path in listing(folder) if is_dir(folder) else []:
            if not UNIT.fullmatch(path.name):
                continue
            plain = stat.S_ISREG(path.lstat().st_mode)
            first = path.read_text(errors="replace")[:4096] if plain else ""
            for_base = first.startswith(f"# Written by kvhost for {base}. ")
            found = None if for_base else WRITTEN_FOR.match(first)
            rows.append({"path": str(path), "ours": top == "etc" and for_base,
                         "installation": found[1] if found else None})  # fmt: skip
    return rows


def kvhost(base: Path, tier_dir: Path, models: Path | None = None) -> Data:
    """``models``: where models lie beside those in base_dir."""
    stores = dict.fromkeys((base / "models", models or base / "models"))
    return {
        "last_run": part(lambda: last_run(base)),  # first: a run that comes meanwhile is seen later
        "base": part(lambda: base_state(base)),
        "receipt": part(lambda: json_file(base / "state" / "receipt.json")),
        "verified": part(lambda: json_file(base / "state" / "verified.json")),
        "drive": part(lambda: json_file(base / "state" / "drive.json")),
        "good": part(lambda: json_file(base / "state" / "good" / "manifest.json")),
        "previous": part(lambda: json_file(base / "state" / "previous" / "manifest.json")),
        "failed": part(lambda: json_file(base / "state" / "failed.json")),
        "current": part(lambda: current(base)),
        "envs": part(lambda: built(base / "envs", False)),
        "tools": part(lambda: built(base / "tools", False)),
        "models": part(lambda: [row for store in stores for row in built(store, True)]),
        "tier": part(lambda: tier(tier_dir)),
        "services": part(lambda: services(base)),
        "run_lock": part(lambda: run_lock(base)),
        "files": part(lambda: files(base)),
        "units": part(lambda: own_units(base)),
    }


def programs(argv: list[str]) -> list[str]:
    """Names that a command line runs: the program; for Python its script or module too."""
    names = [Path(argv[0]).name]
    if names[0].startswith("python"):
        rest = argv[1:]
        module = rest[rest.index("-m") + 1 :][:1] if "-m" in rest else []
        script = [Path(w).name for w in rest if not w.startswith("-")][:1]
        names += [m.split(".")[0] for m in module] or script
    return names


def installation(pid: int, rows: dict[int, Data]) -> str | None:
    """base_dir of the kvhost that runs a process: that of its command line or its parents'."""
    while pid in rows:
        for word in rows[pid]["argv"]:
            found = OF_KVHOST.fullmatch(word)  # conda has envs/ too: what lies there decides
            with contextlib.suppress(OSError, Absent):  # of another container it is not here
                if found and base_state(Path(found[1]))["owner"] == "kvhost":
                    return found[1]
        pid = rows[pid]["ppid"]
    return None


def adoptable(base: Path, service_user: str) -> Data:
    """Engines, caches of models and units that are here and not kvhost's."""
    mine: set[int] = set()
    me = os.geteuid()
    records = part(lambda: services(base))["data"] or []
    for row in records:
        mine.update(row["pids"])
    found = []
    every = processes()
    for pid, p in sorted(every.items()):
        ours = pid in mine or any(f"{base}/" in w for w in p["argv"])
        if not ours and any(ENGINES.match(w) for w in (p["comm"], *programs(p["argv"]))):
            row = {"pid": pid, "comm": p["comm"], "argv": masked(p["argv"]), "uid": p["uid"]}
            found.append({**row, "installation": installation(pid, every)})
    caches, names = [], {"root", service_user, os.environ.get("SUDO_USER")}
    homes = {u.pw_dir: u.pw_name for u in pwd.getpwall() if u.pw_name in names or u.pw_uid == me}
    for home, name in sorted(homes.items()):
        hub = Path(home) / ".cache/huggingface/hub"
        models = part(functools.partial(hf_models, hub))
        if models["status"] != "absent":
            caches.append({"user": name, "path": str(hub), "models": models})
    units = {
        p.name
        for top in ("etc", "run", "lib", "usr/lib")
        for pattern in UNITS
        for p in host(top, "systemd/system").glob(pattern)
    }
    return {"processes": found, "hf_caches": caches, "units": sorted(units)}


def hf_models(hub: Path) -> list[Data]:
    rows = [p for p in listing(hub) if p.name.startswith("models--") and p.is_dir()]
    return [{"name": p.name[8:].replace("--", "/"), "bytes": tree_size(p)["bytes"]} for p in rows]


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


def main(argv: list[str] | None = None) -> int:
    cli = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    cli.add_argument("--base-dir", required=True, type=Path, help="kvhost's directory")
    cli.add_argument("--tier-dir", required=True, type=Path, help="directory of the KV cache")
    cli.add_argument("--models-dir", type=Path, help="models lie there too")
    cli.add_argument("--service-user", required=True, help="user that the services run as")
    cli.add_argument("--packages", default="", metavar="A,B", help="dpkg names")
    cli.add_argument("--ports", default="", metavar="N,N", help="TCP ports that are wanted")
    cli.add_argument("--timeout-s", type=float, default=30.0, help="seconds for all parts")
    args = cli.parse_args(argv)
    parts: dict[str, Callable[[], Any]] = {
        "users": lambda: users(args.service_user),
        "packages": lambda: packages([n for n in args.packages.split(",") if n]),
        "ports": lambda: ports([int(n) for n in args.ports.split(",") if n]),
        "kvhost": lambda: kvhost(args.base_dir, args.tier_dir, args.models_dir),
        "adoptable": lambda: adoptable(args.base_dir, args.service_user),
    }
    print(json.dumps(gather(parts, args.timeout_s), separators=(",", ":")), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
