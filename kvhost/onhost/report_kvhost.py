"""What kvhost has on a host, for report_held.py: its files, environments, tier and services."""

from __future__ import annotations

import functools
import hashlib
import re
import stat
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvhost.onhost.report_parts import (
        Absent,
        Data,
        host,
        is_dir,
        json_file,
        listing,
        part,
        read,
        st,
        tree_size,
    )
    from kvhost.onhost.report_processes import family, processes
else:  # they lie beside this file
    from report_parts import (
        Absent,
        Data,
        host,
        is_dir,
        json_file,
        listing,
        part,
        read,
        st,
        tree_size,
    )
    from report_processes import family, processes

MARKER = ".kvhost-complete.json"  # a finished environment or model
SERVICE = re.compile(r"cache|runner(-[a-z0-9]+)?|slots|pruner")
UNIT = re.compile(rf"kvhost-({SERVICE.pattern})\.service")
UNIT_DIRS = ("etc", "run", "usr/lib", "lib")  # of systemd, the first one counts
NAMESPACE = ".kvhost-namespace.json"  # what a namespace is the digest of
WRITTEN_FOR = re.compile(r"# Written by kvhost for (/.*?)\. ")  # kvhost/services/units.py


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


def tier(top: Path) -> Data:
    rows, foreign = [], []
    for path in listing(top):
        if path.name.startswith("ns-") and path.is_dir() and not path.is_symlink():
            meta = part(functools.partial(json_file, path / NAMESPACE))
            rows.append({"name": path.name, "metadata": meta, **tree_size(path)})
        elif path.name != "lost+found" and not path.name.startswith(".kvhost"):
            foreign.append(path.name)
    return {"namespaces": rows, "foreign": foreign[:20]}


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
