#!/usr/bin/env python3
"""Say who and what is on a host: users, packages, ports, kvhost's own, what could be adopted.

The second half of report.py, which runs it and says what a part is; by hand it prints its parts
alone. Read only. Secrets in command lines are masked, of secret files no digest is given.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import ipaddress
import json
import os
import pwd
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvhost.onhost.masking import masked
    from kvhost.onhost.report_kvhost import base_state, kvhost, services
    from kvhost.onhost.report_parts import (
        Absent,
        Data,
        gather,
        host,
        listing,
        part,
        read,
        run,
        st,
        tree_size,
    )
    from kvhost.onhost.report_processes import processes
else:  # they lie beside this file
    from masking import masked
    from report_kvhost import base_state, kvhost, services
    from report_parts import Absent, Data, gather, host, listing, part, read, run, st, tree_size
    from report_processes import processes

ENGINES = re.compile(r"^(vllm|lmcache|lmcache_server|llama-server|ollama|supervisord)$|^VLLM::")
#: a program or file of an installation of kvhost, in a command line; group 1: its base_dir
OF_KVHOST = re.compile(
    r"(/.+?)/(?:(?:envs|tools)/[^/]+/|current/|bin/[a-z_]+\.py$|etc/(?:supervisord\.conf|vllm)).*"
)
UNITS = ("vllm*", "lmcache*", "ollama*", "llama-server*")


def users(service_user: str) -> Data:
    me = os.geteuid()
    named = {u.pw_uid: u.pw_name for u in reversed(pwd.getpwall())}
    sudo = None
    if me != 0:
        sudo = False
        if shutil.which("sudo"):
            sudo = run(["sudo", "-n", "true"])[0] == 0
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
