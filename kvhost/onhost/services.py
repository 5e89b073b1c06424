#!/usr/bin/env python3
"""Looks at and moves the services, which systemd runs where it is PID 1, elsewhere supervisord.

services.py --base DIR --user U [--json] status     who runs, and with its present configuration?
services.py --base DIR --user U ensure              all run, each with its present configuration
services.py --base DIR --user U start|stop|restart [NAME …]
services.py --base DIR --user U shutdown            stops all, and supervisord
services.py --base DIR --user U uninstall           the same, and systemd's units are taken away

Started as root, or as U where supervisord runs them. Order of starting: cache server, runners,
pruner; of stopping: the other way. By hand nothing waits for the pause that follows quick failures.
Exit: 0 done, 1 a service did not come (why, and its last log lines, are shown on stderr).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import TYPE_CHECKING, Any, NoReturn, Union

sys.dont_write_bytecode = True  # bin/ stays as it was installed
if TYPE_CHECKING:
    from kvhost.onhost.services_host import (
        STOP_LIMIT_S,
        Host,
        Trouble,
        alive,
        say,
        wait_until,
    )
    from kvhost.onhost.services_supervisor import Supervisord
    from kvhost.onhost.services_systemd import Systemd, booted
else:  # it lies beside this file on a host, where there is no package kvhost
    from services_host import (
        STOP_LIMIT_S,
        Host,
        Trouble,
        alive,
        say,
        wait_until,
    )
    from services_supervisor import Supervisord
    from services_systemd import Systemd, booted

#: seconds: a service's launch.py says what it waits for, and gives up by itself
START_LIMIT_S = 900
Manager = Union[Supervisord, Systemd]  # noqa: UP007 (Python 3.9)


def entry(host: Host, name: str, wanted: str | None, states: Any) -> dict[str, Any]:
    record, lock, failed = host.read(name), host.read(name, "lock"), host.read(name, "failed")
    launcher = alive(lock.get("launcher_pid"), lock.get("launcher_ticks"))
    unknown = ("DOWN", "no supervisord" if states is None else "not known to it")
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
    wide = max(8, *map(len, found["services"]))
    for name, entry in found["services"].items():
        old = "" if entry["current"] else "  (with an older configuration)"
        print(f"{name:<{wide}} {entry['state']:<9} {entry['detail']}{old}")
    every = found["services"].values()
    return 0 if all(e["state"] == "RUNNING" and e["alive"] and e["current"] for e in every) else 1


def status(host: Host, manager: Manager) -> dict[str, Any]:
    states = manager.states()
    rows = {name: entry(host, name, host.wanted_digest(name), states) for name in host.order}
    return {"services": rows, "supervisor_fresh": manager.fresh(), "manager": manager.name}


def ensure(host: Host, manager: Manager) -> None:
    manager.bring()
    stale = []
    for name in host.order:
        wanted = host.wanted_digest(name)

        def settled(name: str = name, wanted: str | None = wanted) -> bool:
            row = entry(host, name, wanted, manager.states())
            unseen = row["state"] in ("STARTING", "RUNNING") and not row["launcher"]
            return row["state"] != "STOPPING" and not unseen

        wait_until(settled, 10)
        row = entry(host, name, wanted, manager.states())
        if not row["coming"] and not (row["alive"] and row["current"]):
            say(f"{'restarting' if row['alive'] else 'starting'} {name}")
            stale.append(name)
    for name in reversed(stale):
        stop(host, manager, name)
    start(host, manager, list(host.order))


def start(host: Host, manager: Manager, names: list[str]) -> None:
    """Returns once all run. Raises Trouble after the first failure of one."""
    before: dict[str, Any] = {}
    for name in names:
        row = entry(host, name, host.wanted_digest(name), manager.states())
        before[name] = row["failed_unix"]
        if not (row["alive"] and row["state"] == "RUNNING"):
            host.write(f"{name}.now", "")
            manager.launch(name)
        # the next one needs its process only; that it is seen to live takes longer
        come(host, manager, name, before[name], ("RUNNING", "STARTING"))
    for name in names:
        come(host, manager, name, before[name], ("RUNNING",))


def come(
    host: Host, manager: Manager, name: str, failed_before: Any, enough: tuple[str, ...]
) -> None:
    wanted = host.wanted_digest(name)
    began = told = time.monotonic()
    while True:
        row = entry(host, name, wanted, manager.states())
        if row["alive"] and row["state"] in enough:
            return
        if row["failed_unix"] not in (failed_before, None):
            give_up(manager, name, row["failed"])
        if row["state"] in ("FATAL", "BACKOFF", "DOWN", "STOPPED"):
            give_up(manager, name, f"{row['state']}: {row['detail']}")
        now = time.monotonic()
        if now - began > START_LIMIT_S:
            give_up(manager, name, f"not there after {START_LIMIT_S} s ({row['doing']})")
        if now - told > 10:
            told = now
            say(f"  {name}: {row['doing'] or row['state']}")
        time.sleep(0.1)


def stop(host: Host, manager: Manager, name: str) -> None:
    """Returns once its process is gone. Raises Trouble if it is not."""
    manager.halt(name)

    def gone() -> bool:
        row = entry(host, name, None, manager.states())
        return not row["alive"] and not row["launcher"] and row["state"] != "STOPPING"

    if not wait_until(gone, STOP_LIMIT_S):
        raise Trouble(f"{name} still runs (process {host.read(name).get('pid')})")


def give_up(manager: Manager, name: str, why: str | None) -> NoReturn:
    manager.show_log(name)
    raise Trouble(f"{name} did not start: {why or 'no reason was given'}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--base", required=True)
    parser.add_argument("--json", action="store_true", help="status as JSON")
    parser.add_argument("--user", required=True)
    parser.add_argument(
        "command", choices=["status", "ensure", "start", "stop", "restart", "shutdown", "uninstall"]
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="of services; none: all")
    args = parser.parse_args()
    try:
        host = Host(args.base, args.user)
        unknown = [name for name in args.names if name not in host.order]
        if unknown:
            parser.error(f"no service {', '.join(unknown)}; there are {', '.join(host.order)}")
        names = [name for name in host.order if name in args.names or not args.names]
        manager: Manager = Systemd(host) if booted() else Supervisord(host)
        if args.command == "status":
            return show_status(status(host, manager), as_json=args.json)
        if args.command == "ensure":
            ensure(host, manager)
        elif args.command == "shutdown":
            manager.shutdown()
        elif args.command == "uninstall":
            manager.uninstall()
        else:
            if args.command in ("stop", "restart"):
                for name in reversed(names):
                    stop(host, manager, name)
            if args.command in ("start", "restart"):
                manager.up()
                start(host, manager, names)
    except (Trouble, OSError) as error:
        say(f"services: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
