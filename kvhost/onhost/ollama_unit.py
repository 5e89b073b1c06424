#!/usr/bin/env python3
"""kvhost's drop-in beside an ollama.service of somebody else: who sets what, and ours put or taken.

ollama_unit.py look [--unit U]      who sets the variables, in the order of systemd; JSON
ollama_unit.py apply --base DIR --text FILE --url URL [--unit U]
                                    ours put, and the unit restarted
ollama_unit.py remove --base DIR [--unit U]
                                    ours taken away, and the unit restarted as it was

The unit itself and the drop-ins of others are read and never written. A drop-in with which the
server does not answer is taken back. Only Ollama's own variables are told (ollama_sets.py): others
may be secrets. Started as root. Exit: 0 done, 1 not (why, on stderr; what was there is there).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

sys.dont_write_bytecode = True  # bin/ stays as it was installed
if TYPE_CHECKING:
    from kvhost.onhost.ollama_sets import files_of, of_process, sets_of, sets_of_file, settled
    from kvhost.onhost.services_systemd import booted, is_ours
else:  # it lies beside this file on a host, where there is no package kvhost
    from ollama_sets import files_of, of_process, sets_of, sets_of_file, settled
    from services_systemd import booted, is_ours

UNIT = "ollama.service"
PLACE = "/etc/systemd/system"
DROP_IN = "kvhost.conf"
ASKED = (
    *("LoadState", "ActiveState", "UnitFileState", "FragmentPath", "DropInPaths", "User"),
    *("MainPID", "InvocationID", "NeedDaemonReload", "ExecStart"),
)
ANSWER_S = 60
Data = dict[str, Any]


class Trouble(Exception):
    """What went wrong, for people."""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def call(*words: str) -> str:
    env = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"}
    try:
        done = subprocess.run(
            words, env=env, capture_output=True, text=True, check=False, timeout=180,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Trouble(f"{' '.join(words)}: {error}") from error
    if done.returncode != 0:
        raise Trouble(f"{' '.join(words)}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def read(path: str) -> str | None:
    """None without such a file; a unit may hold bytes that are no UTF-8. Raises OSError."""
    try:
        with open(path, encoding="utf-8", errors="replace") as handle:
            return handle.read()
    except FileNotFoundError:
        return None


def paths_of(shown: str) -> list[str]:
    """DropInPaths: systemctl puts a path with odd characters in quotes, older ones do not."""
    try:
        return shlex.split(shown)
    except ValueError:
        return shown.split()


def own_path(unit: str) -> str:
    return f"{PLACE}/{unit}.d/{DROP_IN}"


def shown_by_systemd(unit: str) -> dict[str, str]:
    text = call("systemctl", "show", "-p", ",".join(ASKED), unit)
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)


# Who sets what


def look(unit: str = UNIT) -> Data:
    """Who sets the variables, in the order in which systemd takes them: the last one counts.

    ``process``: those that the running server was started with. Raises Trouble, OSError.
    """
    if not booted():
        raise Trouble("systemd is not PID 1 here")
    shown = shown_by_systemd(unit)
    found: Data = {
        "unit": unit,
        "load": shown.get("LoadState", ""),
        "active": shown.get("ActiveState", ""),
        "enabled": shown.get("UnitFileState", ""),
        "fragment": shown.get("FragmentPath", ""),
        "user": shown.get("User") or "root",
        "stale": shown.get("NeedDaemonReload") == "yes",
        "invocation": shown.get("InvocationID", ""),
        "program": program(shown.get("ExecStart", "")),
        "sets": [],
        "ours": None,
        "unreadable": [],
        "process": None,
    }
    if found["load"] != "loaded":
        return found
    paths = [found["fragment"], *paths_of(shown.get("DropInPaths", ""))]
    files: list[str] = []
    for path in paths:
        text = read(path)
        if text is None:
            if path and not found["stale"]:
                found["unreadable"].append(f"{path}: it is not there")
            continue
        rows, more = sets_of(path, text)
        found["sets"] += rows
        files += more
        if path == own_path(unit):
            found["ours"] = text
    if found["ours"] is None:  # there, and not read by systemd yet
        found["ours"] = read(own_path(unit))
    for pattern in files:
        try:
            for path in files_of(pattern):
                found["sets"] += sets_of_file(path)
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            found["unreadable"].append(f"{pattern}: {error}")
    found["sets"] = settled(found["sets"])
    pid = int(shown.get("MainPID") or 0)
    found["process"] = of_process(pid) if pid else None
    return found


def program(shown: str) -> str | None:
    """The path of ExecStart as systemctl shows it: { path=/usr/bin/x ; argv[]=… }."""
    match = re.search(r"\bpath=(\S+) ;", shown)
    return match.group(1) if match else None


# Ours put, and taken


def write(path: str, text: str) -> None:
    folder = os.path.dirname(path)
    os.makedirs(folder, exist_ok=True)
    with open(path + ".new", "w", encoding="utf-8") as handle:
        handle.write(text)
        handle.flush()
        os.fsync(handle.fileno())
    os.chmod(path + ".new", 0o644)
    os.replace(path + ".new", path)


def take(path: str) -> None:
    """Our file, and its directory if nothing else is in it."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    with contextlib.suppress(OSError):
        os.rmdir(os.path.dirname(path))


def answers(url: str, seconds: float) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + seconds
    while True:
        try:
            with opener.open(f"{url}/api/version", timeout=5) as answer:
                return bool(json.load(answer)["version"])
        except (urllib.error.URLError, OSError, ValueError, KeyError, TypeError):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.3)


def wanted_of(path: str, text: str) -> dict[str, str]:
    return {one["variable"]: one["value"] or "" for one in sets_of(path, text)[0]}


def in_force(found: Data, text: str) -> bool:
    """Whether our drop-in lies there, is read, and the running server was started with it."""
    process = found["process"] or {}
    wanted = wanted_of("", text)
    return (
        found["ours"] == text
        and not found["stale"]
        and found["active"] == "active"
        and all(process.get(name) == value for name, value in wanted.items())
    )


def restart(unit: str) -> None:
    call("systemctl", "daemon-reload")
    call("systemctl", "reset-failed", unit)
    call("systemctl", "restart", unit)


def apply(unit: str, base: str, text: str, url: str, seconds: float = ANSWER_S) -> None:
    """Raises Trouble; then what was there is there."""
    path = own_path(unit)
    found = look(unit)
    if found["load"] != "loaded":
        raise Trouble(f"{unit} is {found['load'] or 'not there'}: nothing is adopted")
    before = found["ours"]
    if os.path.islink(path) or (before is not None and not is_ours(before, base)):
        raise Trouble(f"{path} is not kvhost's of {base}: it is left as it is")
    if in_force(found, text):
        say("in force already")
        return
    was_active = found["active"] == "active"
    if before != text:
        say(f"installing {path}")
        write(path, text)
    say(f"restarting {unit}")
    why = None
    try:
        restart(unit)
        if not answers(url, seconds):
            why = f"no server answered at {url} within {seconds:.0f} s"
    except Trouble as error:
        why = str(error)
    if why is None:
        return
    said = call("journalctl", "-u", unit, "-n", "15", "-o", "cat", "--no-pager")
    if before is None:
        take(path)
    else:
        write(path, before)
    if was_active:
        with contextlib.suppress(Trouble):  # it is said below that it does not run
            restart(unit)
    state = shown_by_systemd(unit).get("ActiveState")
    raise Trouble(
        f"{why}; the drop-in is taken back and {unit} is {state}. Its last lines:\n"
        + "\n".join(f"  {line}" for line in said.strip().splitlines())
    )


def remove(unit: str, base: str) -> None:
    path = own_path(unit)
    text = read(path)
    if text is None or not is_ours(text, base):
        say("nothing of kvhost is there")
        return
    was_active = booted() and shown_by_systemd(unit).get("ActiveState") == "active"
    take(path)
    if booted():
        call("systemctl", "daemon-reload")
    if was_active:
        say(f"restarting {unit} as it was")
        call("systemctl", "restart", unit)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("look", "apply", "remove"):
        command = commands.add_parser(name)
        command.add_argument("--unit", default=UNIT)
        if name != "look":
            command.add_argument("--base", required=True, help="base_dir, by which ours is told")
        if name == "apply":
            command.add_argument("--text", required=True, help="file with the drop-in's text")
            command.add_argument("--url", required=True, help="where the server then answers")
            command.add_argument("--timeout", type=float, default=ANSWER_S, help="seconds for it")
    args = parser.parse_args()
    try:
        if args.command == "look":
            print(json.dumps(look(args.unit)))
        elif args.command == "apply":
            apply(args.unit, args.base, read(args.text) or "", args.url, args.timeout)
        else:
            remove(args.unit, args.base)
    except (Trouble, OSError) as error:
        say(f"ollama_unit: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
