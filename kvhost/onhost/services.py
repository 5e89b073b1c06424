#!/usr/bin/env python3
"""Looks at and moves the services of kvhost where PID 1 is not systemd (supervisord does the work).

services.py --base DIR --user U [--json] status     who runs, and with its present configuration?
services.py --base DIR --user U ensure              all run, each with its present configuration
services.py --base DIR --user U start|stop|restart [NAME …]
services.py --base DIR --user U shutdown            stops all, and supervisord

Started as root or as U. Order of starting: cache server, runner, pruner; of stopping: the other
way. By hand nothing waits for the pause that follows quick failures. Exit: 0 done, 1 a service
did not come (why, and its last log lines, are shown on stderr).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import xmlrpc.client
from typing import TYPE_CHECKING, Any, NoReturn

sys.dont_write_bytecode = True  # bin/ stays as it was installed
if TYPE_CHECKING:
    from kvhost.onhost.services_host import (
        STOP_LIMIT_S,
        Host,
        Trouble,
        alive,
        say,
        show_log,
        wait_until,
    )
else:  # it lies beside this file on a host, where there is no package kvhost
    from services_host import (
        STOP_LIMIT_S,
        Host,
        Trouble,
        alive,
        say,
        show_log,
        wait_until,
    )

ORDER = ("cache", "runner", "pruner")
#: seconds: a service's launch.py says what it waits for, and gives up by itself
START_LIMIT_S = 900
# faults of supervisord's XML-RPC (supervisord.org/api.html)
BAD_NAME, ALREADY_STARTED, NOT_RUNNING = 10, 60, 70
NO_SUCH_FILE = (FileNotFoundError, ConnectionRefusedError)


def entry(host: Host, name: str, wanted: str | None, states: Any) -> dict[str, Any]:
    record, lock, failed = host.read(name), host.read(name, "lock"), host.read(name, "failed")
    launcher = alive(lock.get("launcher_pid"), lock.get("launcher_ticks"))
    unknown = ("DOWN", "no supervisord" if states is None else "not known to supervisord")
    state, detail = (states or {}).get(name, unknown)
    return {
        "state": state,
        "detail": detail,
        "pid": record.get("pid"),
        "start_ticks": record.get("start_ticks"),
        "alive": alive(record.get("pid"), record.get("start_ticks")),
        "current": wanted is not None and record.get("config_digest") == wanted,
        # what its launch.py waits for, before the service itself runs
        "doing": lock.get("doing") if launcher else None,
        "coming": launcher and bool(lock.get("doing")) and lock.get("config_digest") == wanted,
        "launcher": launcher,
        "failed": failed.get("why"),
        "failed_unix": failed.get("failed_unix"),
    }


def show_status(found: dict[str, Any], as_json: bool) -> int:
    """Prints the state of the services; 0 when all run with their present configuration."""
    if as_json:
        print(json.dumps(found))
        return 0
    for name, entry in found["services"].items():
        old = "" if entry["current"] else "  (with an older configuration)"
        print(f"{name:<8} {entry['state']:<9} {entry['detail']}{old}")
    every = found["services"].values()
    return 0 if all(e["state"] == "RUNNING" and e["alive"] and e["current"] for e in every) else 1


def status(host: Host) -> dict[str, Any]:
    states = host.states()
    rows = {name: entry(host, name, host.wanted_digest(name), states) for name in ORDER}
    fresh = states is not None and host.conf_read() == host.conf_digests()
    return {"services": rows, "supervisor_fresh": fresh}


def end_supervisors(host: Host) -> None:
    """Ends each supervisord that does not answer; two would start every service twice."""
    for how, seconds in ((signal.SIGTERM, STOP_LIMIT_S), (signal.SIGKILL, 10)):
        pids = host.supervisors()
        if not pids:
            return
        say(f"supervisord (process {pids}) does not answer: {how.name}")
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, how)
        wait_until(lambda: not host.supervisors(), seconds)
    raise Trouble(f"supervisord (process {host.supervisors()}) cannot be ended")


def start_supervisor(host: Host) -> None:
    # one that was started or told to stop a moment ago is given time to say so
    wait_until(lambda: host.answers() or not host.supervisors(), 5)
    if host.answers():
        return
    end_supervisors(host)
    say("starting supervisord")
    digests = host.conf_digests()
    try:
        done = subprocess.run(
            host.as_user([os.path.join(host.tools, "supervisord"), "-c", host.conf]),
            env=host.clean_env(),
            cwd=host.path("home"),
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError as error:
        raise Trouble(f"supervisord cannot be started: {error}") from error
    if done.returncode != 0:
        raise Trouble("supervisord did not start:\n" + (done.stdout + done.stderr).strip())
    if not wait_until(host.answers, 20):
        show_log(host, "supervisord")
        raise Trouble(f"supervisord was started, but does not answer on {host.socket}")
    host.write("supervisor.read", json.dumps(digests))


def read_again(host: Host, digests: dict[str, str]) -> None:
    """What `supervisorctl update` does; groups whose description changed are restarted."""
    say("supervisord reads its new configuration")
    try:
        added, changed, removed = host.call("reloadConfig")[0]
        for name in (*removed, *changed):
            host.call("stopProcessGroup", name)
            host.call("removeProcessGroup", name)
        for name in (*changed, *added):
            host.call("addProcessGroup", name)
    except xmlrpc.client.Fault as fault:
        raise Trouble(f"supervisord refuses {host.conf}: {fault.faultString}") from fault
    host.write("supervisor.read", json.dumps(digests))


def bring_supervisor(host: Host) -> None:
    if not host.answers():
        start_supervisor(host)
    digests, read = host.conf_digests(), host.conf_read()
    if read == digests:
        return
    if read and read.get("daemon") != digests["daemon"]:
        say("supervisord is restarted: its own part of the configuration changed")
        shutdown(host)
        start_supervisor(host)
    else:
        read_again(host, digests)


def shutdown(host: Host) -> None:
    if host.answers():
        host.call("shutdown")
    if not wait_until(lambda: not host.supervisors(), STOP_LIMIT_S):
        end_supervisors(host)


def ensure(host: Host) -> None:
    bring_supervisor(host)
    stale = []
    for name in ORDER:
        wanted = host.wanted_digest(name)

        def settled(name: str = name, wanted: str | None = wanted) -> bool:
            row = entry(host, name, wanted, host.states())
            unseen = row["state"] in ("STARTING", "RUNNING") and not row["launcher"]
            return row["state"] != "STOPPING" and not unseen

        wait_until(settled, 10)
        row = entry(host, name, wanted, host.states())
        if not row["coming"] and not (row["alive"] and row["current"]):
            say(f"{'restarting' if row['alive'] else 'starting'} {name}")
            stale.append(name)
    for name in reversed(stale):
        stop(host, name)
    start(host, list(ORDER))


def start(host: Host, names: list[str]) -> None:
    """Returns once all run. Raises Trouble after the first failure of one."""
    before: dict[str, Any] = {}
    for name in names:
        row = entry(host, name, host.wanted_digest(name), host.states())
        before[name] = row["failed_unix"]
        if not (row["alive"] and row["state"] == "RUNNING"):
            host.write(f"{name}.now", "")
            try:
                host.call("startProcess", name, False)
            except xmlrpc.client.Fault as fault:
                if fault.faultCode == BAD_NAME:
                    raise Trouble(f"{name}: not in {host.conf}") from fault
                if fault.faultCode != ALREADY_STARTED:
                    give_up(host, name, fault.faultString)
        # the next one needs its process only; that supervisord has seen it live takes longer
        come(host, name, before[name], ("RUNNING", "STARTING"))
    for name in names:
        come(host, name, before[name], ("RUNNING",))


def come(host: Host, name: str, failed_before: Any, enough: tuple[str, ...]) -> None:
    wanted = host.wanted_digest(name)
    began = told = time.monotonic()
    while True:
        row = entry(host, name, wanted, host.states())
        if row["alive"] and row["state"] in enough:
            return
        if row["failed_unix"] not in (failed_before, None):
            give_up(host, name, row["failed"])
        if row["state"] in ("FATAL", "BACKOFF", "DOWN", "STOPPED"):
            give_up(host, name, f"{row['state']}: {row['detail']}")
        now = time.monotonic()
        if now - began > START_LIMIT_S:
            give_up(host, name, f"not there after {START_LIMIT_S} s ({row['doing']})")
        if now - told > 10:
            told = now
            say(f"  {name}: {row['doing'] or row['state']}")
        time.sleep(0.1)


def stop(host: Host, name: str) -> None:
    """Returns once its process is gone. Raises Trouble if it is not."""
    try:
        host.call("stopProcess", name, False)
    except xmlrpc.client.Fault as fault:
        if fault.faultCode not in (NOT_RUNNING, BAD_NAME):
            raise Trouble(f"{name} could not be stopped: {fault.faultString}") from fault
    except NO_SUCH_FILE:
        pass  # no supervisord: its services end with it

    def gone() -> bool:
        row = entry(host, name, None, host.states())
        return not row["alive"] and not row["launcher"] and row["state"] != "STOPPING"

    if not wait_until(gone, STOP_LIMIT_S):
        raise Trouble(f"{name} still runs (process {host.read(name).get('pid')})")


def give_up(host: Host, name: str, why: str | None) -> NoReturn:
    show_log(host, name)
    raise Trouble(f"{name} did not start: {why or 'no reason was given'}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--base", required=True)
    parser.add_argument("--json", action="store_true", help="status as JSON")
    parser.add_argument("--user", required=True)
    parser.add_argument(
        "command", choices=["status", "ensure", "start", "stop", "restart", "shutdown"]
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {ORDER}; none: all")
    args = parser.parse_args()
    unknown = [name for name in args.names if name not in ORDER]
    if unknown:
        parser.error(f"no service {', '.join(unknown)}; there are {', '.join(ORDER)}")
    names = [name for name in ORDER if name in args.names or not args.names]
    try:
        host = Host(args.base, args.user)
        if args.command == "status":
            return show_status(status(host), as_json=args.json)
        if args.command == "ensure":
            ensure(host)
        elif args.command == "shutdown":
            shutdown(host)
        else:
            if args.command in ("stop", "restart"):
                for name in reversed(names):
                    stop(host, name)
            if args.command in ("start", "restart"):
                if not host.answers():
                    start_supervisor(host)
                start(host, names)
    except (Trouble, OSError) as error:
        say(f"services: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
