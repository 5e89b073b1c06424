#!/usr/bin/env python3
"""The store of the shared tier on its host: what is there, whether it runs, and its removal.

shared_store.py look    --base DIR --address A --port P   what a store could be made of here; JSON
shared_store.py state   --kind K --address A --port P     whether it runs as its files say; JSON
shared_store.py install --kind K --note FILE              its package, without a server of its own
shared_store.py drift   [--kind K] --address A --port P   the same, and every file of it; JSON
shared_store.py remove  --base DIR                        stops it, removes its files; JSON

K: redis-server or valkey-server. Run as root; no secret is on the command line or in an answer.
Exit: 0 done, 1 not (why, stderr).
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import hashlib
import json
import os
import pwd
import shutil
import socket
import ssl
import stat
import subprocess
import sys
import time
from typing import Any

KINDS = {"redis-server": "redis", "valkey-server": "valkey"}
ETC = "/etc/kvhost-store"
START = f"{ETC}/start.env"
#: all that kvhost ever writes there
FILES = ("store.conf", "users.acl", "start.env", "store.pem", "store.key")
APT = ("apt-get", "-q", "-o", "DPkg::Lock::Timeout=300")
Data = dict[str, Any]


class Trouble(Exception):
    """What went wrong, for people."""


def run(*argv: str, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, **more
    )


def unit(kind: str) -> str:
    return f"{kind}@kvhost.service"


def drop_in(kind: str) -> str:
    return f"/etc/systemd/system/{unit(kind)}.d"


def data_dir(kind: str) -> str:
    return f"/var/lib/{KINDS[kind]}/kvhost"


def first_line(path: str) -> str | None:
    """None where nothing is. Raises OSError."""
    try:
        with open(path, encoding="utf-8", errors="replace") as handle:
            return handle.readline().rstrip("\n")
    except FileNotFoundError:
        return None


def shown(kind: str) -> dict[str, str]:
    """What systemd says of the unit."""
    names = "ActiveState,UnitFileState,MainPID,LoadState,SubState"
    said = run("systemctl", "show", "-p", names, unit(kind)).stdout
    return dict(line.split("=", 1) for line in said.splitlines() if "=" in line)


def package(name: str) -> Data:
    """{"state": installed, available or none, "version": as dpkg writes it}."""
    state = run("dpkg-query", "-W", "-f", "${db:Status-Status} ${Version}", name)
    words = state.stdout.split()
    if state.returncode == 0 and words[:1] == ["installed"]:
        return {"state": "installed", "version": words[-1]}
    policy = run("apt-cache", "policy", name).stdout
    found = [line.split()[1] for line in policy.splitlines() if line.strip().startswith("Cand")]
    if found and found[0] != "(none)":
        return {"state": "available", "version": found[0]}
    return {"state": "none", "version": None}


def memory_bytes() -> int:
    with open("/proc/meminfo", encoding="ascii") as handle:
        for line in handle:
            if line.startswith("MemTotal:"):
                return int(line.split()[1]) * 1024
    raise Trouble("/proc/meminfo has no MemTotal")


def bindable(address: str, port: int) -> str | None:
    """Why a server could not listen there; None if it could."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind((address, port))
        except OSError as error:
            return f"{error.strerror} ({errno.errorcode.get(error.errno or 0, '?')})"
    return None


def look(args: argparse.Namespace) -> Data:
    systemd = os.path.isdir("/run/systemd/system")
    apt = shutil.which("apt-get") is not None and shutil.which("dpkg-query") is not None
    why = bindable(args.address, 0)
    ours = first_line(f"{ETC}/store.conf")
    mine = ours is not None and ours.startswith(f"# Written by kvhost for {args.base}.")
    runs = systemd and any(shown(kind).get("ActiveState") == "active" for kind in KINDS)
    taken = None if why else bindable(args.address, args.port)
    free = shutil.disk_usage("/var/lib").free
    if mine:  # what it holds already is its own to use
        free += sum(size_of(data_dir(kind)) for kind in KINDS)
    packages = {kind: package(kind) for kind in KINDS} if apt else {}
    return {
        "systemd": systemd,
        "apt": apt,
        "packages": {kind: one["state"] for kind, one in packages.items()},
        "versions": {kind: one["version"] for kind, one in packages.items()},
        "address": why is None,
        "address_why": why,
        "port_taken": taken if taken and not (mine and runs) else None,
        "other": ours if ours is not None and not mine else None,
        "there": mine,
        "memory_bytes": memory_bytes(),
        "disk_free_bytes": free,
    }


def size_of(path: str) -> int:
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(os.path.join(folder, name)).st_size
    return total


def file_at(path: str) -> Data | None:
    """None where nothing lies."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return None
    row: Data = {"mode": f"{stat.S_IMODE(found.st_mode):o}", "sha256": None}
    try:
        row["user"] = pwd.getpwuid(found.st_uid).pw_name
    except KeyError:
        row["user"] = str(found.st_uid)
    if stat.S_ISREG(found.st_mode):
        with open(path, "rb") as handle:
            row["sha256"] = hashlib.sha256(handle.read()).hexdigest()
    return row


def drift(args: argparse.Namespace) -> Data:
    """All that kvhost wrote, as it lies there, and the server."""
    kinds = [args.kind] if args.kind else [kind for kind in KINDS if os.path.isdir(drop_in(kind))]
    paths = [os.path.join(ETC, name) for name in FILES]
    paths += [os.path.join(drop_in(kind), "kvhost.conf") for kind in kinds]
    args.kind = kinds[0] if kinds else "redis-server"
    return {"kind": args.kind, "files": {p: file_at(p) for p in paths}, "state": state(args)}


def state(args: argparse.Namespace) -> Data:
    """`fresh`: started with the files that lie there now."""
    told = shown(args.kind)
    pid = int(told.get("MainPID") or 0)
    wanted, fresh = first_line(START) or "", False
    with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as handle:
        fresh = wanted.encode() in handle.read().split(b"\0")
    return {
        "active": told.get("ActiveState") == "active",
        "enabled": told.get("UnitFileState") == "enabled",
        "fresh": pid > 0 and fresh,
        "asks": asks(args),
    }


def asks(args: argparse.Namespace) -> str | None:
    """Why it is not what it should be: a server that asks whoever comes for a password."""
    try:
        with socket.create_connection((args.address, args.port), 5) as raw:
            one: socket.socket = raw
            if args.tls:  # whom it is to be trusted by is the hosts' to say; here it only answers
                context = ssl.create_default_context()
                context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
                one = context.wrap_socket(raw)
            one.sendall(b"*1\r\n$4\r\nPING\r\n")
            said = one.recv(200).decode(errors="replace").strip()
    except OSError as error:
        return f"no answer: {error}"
    return None if said.startswith("-NOAUTH") else f"it answers {said[:100]!r} without a password"


def wait(args: argparse.Namespace) -> Data:
    """Until it is all that, or time is up. Raises Trouble."""
    deadline = time.monotonic() + 30
    while True:
        told = state(args)
        if told["active"] and told["fresh"] and told["asks"] is None:
            return told
        if time.monotonic() > deadline:
            log = run("journalctl", "-q", "-n", "20", "-o", "cat", "-u", unit(args.kind)).stdout
            raise Trouble(f"{unit(args.kind)} does not run as it should: {told}\n{log}")
        time.sleep(0.2)


def install(args: argparse.Namespace) -> Data:
    """The package starts a server of its own, on loopback, without a password: not here."""
    own = f"{args.kind}.service"
    run("systemctl", "mask", "--runtime", own)
    try:
        env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        run(*APT, "update", env=env)
        done = run(*APT, "install", "-y", "--no-install-recommends", args.kind, env=env)
        if done.returncode != 0:
            raise Trouble(f"apt-get install {args.kind} failed:\n{done.stdout[-2000:]}")
        run("systemctl", "disable", own)
    finally:
        run("systemctl", "unmask", "--runtime", own)
    with open(args.note, "a", encoding="ascii") as handle:
        handle.write(args.kind + "\n")
    return {"installed": args.kind}


def remove(args: argparse.Namespace) -> Data:
    """Files of kvhost's alone; packages stay. Raises Trouble, OSError."""
    ours = first_line(f"{ETC}/store.conf")
    if ours is not None and not ours.startswith(f"# Written by kvhost for {args.base}."):
        raise Trouble(f"{ETC}/store.conf is not this installation's: {ours}")
    gone = []
    for kind in KINDS:
        if not os.path.isdir(drop_in(kind)):
            continue
        done = run("systemctl", "disable", "--now", unit(kind))
        if shown(kind).get("ActiveState") not in ("inactive", "failed"):
            raise Trouble(f"{unit(kind)} could not be stopped: {done.stdout.strip()}")
        for path in (os.path.join(drop_in(kind), "kvhost.conf"), data_dir(kind)):
            gone += [path] if remove_path(path) else []
        with contextlib.suppress(OSError):  # a person put something in there
            os.rmdir(drop_in(kind))
        run("systemctl", "daemon-reload")
        run("systemctl", "reset-failed", unit(kind))
    for name in FILES:
        path = os.path.join(ETC, name)
        gone += [path] if remove_path(path) else []
    with contextlib.suppress(OSError):
        os.rmdir(ETC)
    return {"removed": gone, "stays": os.listdir(ETC) if os.path.isdir(ETC) else []}


def remove_path(path: str) -> bool:
    if not os.path.lexists(path):
        return False
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        os.unlink(path)
    return True


ACTIONS = {
    "look": look, "state": state, "drift": drift, "wait": wait, "install": install,
    "remove": remove,
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("command", choices=list(ACTIONS))
    parser.add_argument("--base", default="", help="kvhost's directory")
    parser.add_argument("--kind", choices=sorted(KINDS), help="its package and program")
    parser.add_argument("--address", help="that it listens on")
    parser.add_argument("--port", type=int)
    parser.add_argument("--tls", action="store_true", help="it speaks TLS")
    parser.add_argument("--note", help="file that keeps the names of installed packages")
    args = parser.parse_args()
    try:
        print(json.dumps(ACTIONS[args.command](args)))
    except (Trouble, OSError, ValueError) as error:
        print(f"shared_store: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
