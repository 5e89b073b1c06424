#!/usr/bin/env python3
"""Looks at what kvhost left on a host, for `kvhost drift`; changes nothing. Prints JSON.

drift_look.py --ask JSON, run as root. JSON: {"base", "user", "files": [path], "directories":
[path], "absent": {path: text}, "checks": {name: command}, "model": path, "env", "mounts": [path],
"collector": name or null, "answers": {service: command}}. The answer has a part each, {"status":
ok|absent|unreadable, "why", "data"}: files and directories by path (null where nothing is); whether
a file is there that begins with that text; the JSON that each command prints ({"data"}, or "why"
there is none); the model's digest, from what model_digest.py remembers of files that are as they
were ("changed" names the others); the engine's environment against its own marker and its packages;
the services and what runs them; the mounts that the paths lie in; the state of what writes the
figures for Prometheus; for each service what is missing until it answers, as its command (ready.py
or ollama_ready.py, --once) says, null where nothing is.
"""

from __future__ import annotations

import argparse
import functools
import grp
import hashlib
import json
import os
import pwd
import stat
import subprocess
import sys
from typing import IO, TYPE_CHECKING, Any

sys.dont_write_bytecode = True
if TYPE_CHECKING:
    from kvhost.onhost import bounded, services
    from kvhost.onhost.engine_whole import is_complete
    from kvhost.onhost.masking import mask_text
    from kvhost.onhost.model_digest import remembered_model
    from kvhost.onhost.report_parts import Absent, part
    from kvhost.onhost.services_host import Host, Trouble
    from kvhost.onhost.services_supervisor import Supervisord
    from kvhost.onhost.services_systemd import Systemd, booted
else:  # it lies beside this file, where there is no package kvhost
    import bounded
    import services
    from engine_whole import is_complete
    from masking import mask_text
    from model_digest import remembered_model
    from report_parts import Absent, part
    from services_host import Host, Trouble
    from services_supervisor import Supervisord
    from services_systemd import Systemd, booted

Data = dict[str, Any]
#: seconds; ready.py asks several things, and gives each its own time
ASK_S = 60.0
#: bytes; what kvhost renders is far smaller
MOST_BYTES = 16 << 20


def owner(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def group(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def opened(path: str) -> IO[bytes]:
    """Neither a link that came in its place is followed, nor a pipe waited for. OSError."""
    return open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")


def look_at(path: str) -> Data | None:
    """Kind, owner, mode and digest of what lies at a path; None when nothing does. OSError."""
    try:
        found = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    row: Data = {"kind": "other", "user": owner(found.st_uid), "group": group(found.st_gid)}
    row["sha256"] = None
    row["mode"] = f"{stat.S_IMODE(found.st_mode):o}"
    if stat.S_ISLNK(found.st_mode):
        row.update(kind="link", target=os.readlink(path))
    elif stat.S_ISDIR(found.st_mode):
        row["kind"] = "directory"
    elif stat.S_ISREG(found.st_mode):
        row["kind"] = "file"
        if found.st_size <= MOST_BYTES:
            with opened(path) as handle:
                row["sha256"] = hashlib.sha256(handle.read(MOST_BYTES + 1)).hexdigest()
    return row


def packages(env: str) -> dict[str, str]:
    """Name -> version of what is installed in an environment, from its .dist-info directories."""
    found: dict[str, str] = {}
    top = os.path.join(env, "lib")
    for python in sorted(os.listdir(top)) if os.path.isdir(top) else []:
        site = os.path.join(top, python, "site-packages")
        for name in os.listdir(site) if os.path.isdir(site) else []:
            if name.endswith(".dist-info"):
                package, _, version = name[: -len(".dist-info")].partition("-")
                found[package.lower().replace("_", "-").replace(".", "-")] = version
    return found


def environment(env: str) -> Data:
    if not os.path.lexists(env):
        raise Absent(f"{env} is not there")
    return {"whole": is_complete(env), "packages": packages(env)}


def running(base: str, user: str) -> Data:
    host = Host(base, user)
    manager: services.Manager = Systemd(host) if booted() else Supervisord(host)
    states = manager.states()
    rows = {n: services.entry(host, n, host.wanted_digest(n), states) for n in host.order}
    try:
        fresh, why = manager.fresh(), None
    except (Trouble, OSError) as error:  # a description is gone: the files say which
        fresh, why = False, str(error)
    return {"services": rows, "supervisor_fresh": fresh, "why": why, "manager": manager.name}


def collector(base: str, user: str, name: str | None) -> str | None:
    """State of what writes the figures for Prometheus: a unit of systemd's, or a program of
    supervisord's; None where none is asked for."""
    if name is None:
        return None
    if not booted():
        states = Supervisord(Host(base, user)).states() or {}
        return states.get(name, ("DOWN", ""))[0]
    show = ["systemctl", "show", "--property=ActiveState,UnitFileState", f"{name}.service"]
    done = subprocess.run(show, stdout=subprocess.PIPE, check=True, timeout=30)
    rows = dict(line.split("=", 1) for line in done.stdout.decode().split() if "=" in line)
    good = (rows.get("ActiveState"), rows.get("UnitFileState")) == ("active", "enabled")
    return "RUNNING" if good else ", ".join(value for value in rows.values() if value)


def answers(asked: dict[str, list[str]]) -> Data:
    """Service -> what is missing until it answers, None where it does."""
    found: Data = {}
    for service, argv in asked.items():
        try:
            said = bounded.run(argv, ASK_S)
        except OSError as error:
            found[service] = str(error)
            continue
        last = (said.out.strip() or said.err.strip() or "it printed nothing").splitlines()[-1]
        try:
            told = json.loads(last)
            missing = told.get("missing") or told.get("why")  # of ready.py, of ollama_ready.py
            found[service] = None if told["ready"] is True else mask_text(str(missing))[:300]
        except (ValueError, KeyError, TypeError, AttributeError):
            found[service] = mask_text(f"exit code {said.code}: {last}")[:300]
    return found


def checks(asked: dict[str, list[str]]) -> Data:
    """Name -> {"data": the JSON that its command prints, "why": null or why there is none}."""
    found: Data = {}
    for name, argv in asked.items():
        found[name] = {"data": None, "why": None}
        try:
            said = bounded.run(argv, ASK_S)
            if said.code != 0:
                told = (said.err.strip() or said.out.strip() or "no output").splitlines()[-1]
                raise ValueError(told)
            lines = said.out.strip().splitlines()
            found[name]["data"] = json.loads(lines[-1] if lines else "")
        except (OSError, ValueError) as error:
            found[name]["why"] = mask_text(str(error))[:300]
    return found


def begins(asked: dict[str, str]) -> dict[str, bool]:
    """Path -> whether something is there, and begins with that text if there is one. OSError."""
    found = {}
    for path, text in asked.items():
        row, wanted = look_at(path), text.encode()
        found[path] = row is not None and not wanted
        if row is not None and row["kind"] == "file" and wanted:
            with opened(path) as handle:
                found[path] = handle.read(len(wanted)) == wanted
    return found


def model(path: str, base: str) -> Data:
    if not os.path.exists(path):
        raise Absent(path)
    return remembered_model(path, os.path.join(base, "state", "model-digests.json"))


def mounts(paths: list[str]) -> Data:
    """Path -> the mount that it lies in, proc_pid_mountinfo(5). The longest mount point counts."""
    rows = []
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as handle:
        for line in handle:
            words = line.split()
            after = words[words.index("-") + 1 :]
            point = words[4].encode().decode("unicode_escape")
            rows.append((point, after[0], mask_text(after[1])[:300], sorted(words[5].split(","))))
    found: Data = {}
    for path in paths:
        real = os.path.realpath(path)
        inside = [row for row in rows if (real + "/").startswith(row[0].rstrip("/") + "/")]
        # of two at one place the later one is on top
        best = max(enumerate(inside), key=lambda item: (len(item[1][0]), item[0]))[1]
        found[path] = dict(zip(("mount_point", "fs", "source", "options"), best))  # noqa: B905
    return found


def by_path(paths: list[str]) -> Data:
    return {path: look_at(path) for path in paths}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ask", required=True, help="JSON, see the head of this file")
    ask = json.loads(parser.parse_args().ask)
    looks: dict[str, Any] = {
        "files": functools.partial(by_path, ask["files"]),
        "directories": functools.partial(by_path, ask["directories"]),
        "absent": functools.partial(begins, ask.get("absent", {})),
        "checks": functools.partial(checks, ask.get("checks", {})),
        "model": functools.partial(model, ask.get("model", ""), ask["base"]),
        "env": functools.partial(environment, ask["env"]),
        "services": functools.partial(running, ask["base"], ask["user"]),
        "mounts": functools.partial(mounts, ask["mounts"]),
        "collector": functools.partial(collector, ask["base"], ask["user"], ask.get("collector")),
        "answers": functools.partial(answers, ask.get("answers", {})),
    }
    found = {name: part(looks[name]) for name in ask.get("parts") or looks}
    print(json.dumps(found, separators=(",", ":")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
