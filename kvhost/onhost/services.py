#!/usr/bin/env python3
"""Looks at and moves the services of kvhost where PID 1 is not systemd (supervisord does the work).

services.py --base DIR --user U status              JSON: {name: {state, current, pid, …}}
services.py --base DIR --user U ensure              all run, each with its present configuration
services.py --base DIR --user U start|stop|restart [NAME …]

Order is by the config's priority: cache server, runner, pruner. Exit: 0 done, 1 a service did not
come (its last log lines are shown).
"""

from __future__ import annotations

import argparse
import json
import os
import pwd
import subprocess
import sys
import time

ORDER = ("cache", "runner", "pruner")


def say(text):
    print(text, file=sys.stderr, flush=True)


class Host:
    """One installation of kvhost and the supervisord that runs its services."""

    def __init__(self, base, user):
        self.base, self.user = base, user
        self.conf = os.path.join(base, "etc", "supervisord.conf")
        self.tools = os.path.join(base, "tools", "current", "bin")

    def path(self, *parts):
        return os.path.join(self.base, *parts)

    def as_user(self, argv):
        account = pwd.getpwnam(self.user)
        if account.pw_uid == os.geteuid():
            return argv
        ids = ["--reuid", str(account.pw_uid), "--regid", str(account.pw_gid), "--init-groups"]
        return ["setpriv", *ids, "--inh-caps=-all", *argv]

    def clean_env(self):
        return {"PATH": "/usr/bin:/bin", "HOME": self.path("home"), "LC_ALL": "C.UTF-8"}

    def ctl(self, *args):
        """(exit code, output) of supervisorctl; exit 4 means that no supervisord answers."""
        done = subprocess.run(
            self.as_user([os.path.join(self.tools, "supervisorctl"), "-c", self.conf, *args]),
            env=self.clean_env(),
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, (done.stdout + done.stderr).strip()

    def states(self):
        """{name: (STATE, rest of the line)}; empty when no supervisord answers."""
        code, output = self.ctl("status")
        if code == 4 or "refused connection" in output or "no such file" in output:
            return {}
        rows = [line.split(None, 2) for line in output.splitlines()]
        return {row[0]: (row[1], row[2] if len(row) > 2 else "") for row in rows if len(row) > 1}

    def wanted_digest(self, name):
        done = subprocess.run(
            self.as_user(
                [
                    os.path.join(self.tools, "python"),
                    self.path("bin", "launch.py"),
                    "--digest",
                    self.path("etc", name + ".json"),
                ]
            ),
            env=self.clean_env(),
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout.strip() if done.returncode == 0 else None

    def record(self, name):
        try:
            with open(self.path("run", name + ".json"), encoding="utf-8") as handle:
                return json.load(handle)
        except (OSError, ValueError):
            return {}

    def supervisor_fresh(self):
        """Whether the running supervisord has read the configuration that lies there now."""
        try:
            started = os.stat(self.path("run", "supervisor.read")).st_mtime_ns
            return started >= os.stat(self.conf).st_mtime_ns
        except OSError:
            return False


def alive(record):
    try:
        with open("/proc/%d/stat" % record["pid"], encoding="utf-8", errors="replace") as handle:
            return int(handle.read().rpartition(")")[2].split()[19]) == record["start_ticks"]
    except (OSError, KeyError, ValueError, IndexError):
        return False


def status(host):
    states = host.states()
    result = {}
    for name in ORDER:
        record = host.record(name)
        state = states.get(name, ("DOWN", "no supervisord" if not states else "not known to it"))
        result[name] = {
            "state": state[0],
            "detail": state[1],
            "pid": record.get("pid"),
            "alive": alive(record),
            "current": record.get("config_digest") == host.wanted_digest(name),
        }
    return {"services": result, "supervisor_fresh": bool(states) and host.supervisor_fresh()}


def good(entry):
    return entry["state"] == "RUNNING" and entry["alive"] and entry["current"]


def start_supervisor(host):
    touch_read(host)
    done = subprocess.run(
        host.as_user([os.path.join(host.tools, "supervisord"), "-c", host.conf]),
        env=host.clean_env(),
        cwd=host.path("home"),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        say("supervisord did not start:\n" + (done.stdout + done.stderr).strip())
        sys.exit(1)


def touch_read(host):
    path = host.path("run", "supervisor.read")
    with open(path, "w", encoding="ascii"):
        pass
    os.utime(path)


def ensure(host):
    if not host.states():
        say("starting supervisord")
        start_supervisor(host)
    elif not host.supervisor_fresh():
        say("supervisord reads its new configuration")
        touch_read(host)
        code, output = host.ctl("update")
        say(output)
        if code != 0:
            sys.exit(1)
    settle(host)
    entries = status(host)["services"]
    stale = [name for name in ORDER if not good(entries[name])]
    # the runner keeps its registration with the server only if it outlives it by two heartbeats;
    # launch.py keeps that pause, so a changed cache server alone does not restart the runner
    for name in stale:
        say(
            "{} {}".format(
                "restarting" if entries[name]["state"] == "RUNNING" else "starting", name
            )
        )
        move(host, "restart", name)


def settle(host, seconds=15):
    """Waits while supervisord is still deciding about a service that has just been started."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        entries = status(host)["services"].values()
        if not any(e["state"] in ("STARTING", "STOPPING") for e in entries) and not any(
            e["state"] == "RUNNING" and not e["alive"] for e in entries
        ):
            return
        time.sleep(0.3)


def move(host, verb, name):
    old = host.record(name)
    if verb in ("stop", "restart"):
        host.ctl("stop", name)
    if verb == "stop" or (verb == "start" and alive(host.record(name))):
        return
    code, output = host.ctl("start", name)
    deadline = time.monotonic() + 60
    while code == 0 and time.monotonic() < deadline:
        now = host.record(name)
        if alive(now) and (now.get("pid"), now.get("start_ticks")) != (
            old.get("pid"),
            old.get("start_ticks"),
        ):
            return
        time.sleep(0.2)
    say(f"{name} did not start: {output}")
    show_log(host, name)
    sys.exit(1)


def show_log(host, name, lines=20):
    try:
        with open(host.path("log", name + ".log"), encoding="utf-8", errors="replace") as handle:
            for line in handle.readlines()[-lines:]:
                say(f"  {name} | {line.rstrip()}")
    except OSError as error:
        say(f"  {name} | no log: {error}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", required=True)
    parser.add_argument("--user", required=True)
    parser.add_argument(
        "command", choices=["status", "ensure", "start", "stop", "restart", "shutdown"]
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {ORDER}; none: all")
    args = parser.parse_args()
    unknown = [name for name in args.names if name not in ORDER]
    if unknown:
        parser.error("no service {}; there are {}".format(", ".join(unknown), ", ".join(ORDER)))
    host = Host(args.base, args.user)
    if args.command == "status":
        print(json.dumps(status(host)))
    elif args.command == "ensure":
        ensure(host)
    elif args.command == "shutdown":
        host.ctl("shutdown")
    else:
        if args.command != "stop" and not host.states():
            start_supervisor(host)
            settle(host)
        for name in args.names or ORDER:
            move(host, args.command, name)


if __name__ == "__main__":
    main()
