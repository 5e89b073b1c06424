"""One run at a time on a host: the lock is taken when a run begins to change things.

It is dropped when this process ends, however it ends short of a kill; a killed run's lock is
taken over at once by the next run of the same controller (its process is seen to be dead), by
another controller after 30 minutes without a sign of life, or with `break_lock`.
"""

from __future__ import annotations

import atexit
import getpass
import json
import os
import shlex
import socket
from pathlib import Path
from typing import Any

import gevent
from pyinfra import context, host, logger
from pyinfra.api import StringCommand, operation

from deploys.common.context import Visit
from deploys.common.facts import ONHOST
from deploys.common.operations import Commands, connector_arguments, executing, refuse

REFRESH_S = 300


def controller_id() -> str:
    """Tells controllers apart: the machine id where there is one, else the host name."""
    try:
        return Path("/etc/machine-id").read_text().strip() or socket.gethostname()
    except OSError:
        return socket.gethostname()


def start_ticks(pid: int) -> int | None:
    """Field 22 of /proc/PID/stat, None if there is no such process: PIDs are used again."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def is_dead(lock: dict[str, Any]) -> bool | None:
    """Whether the run that holds a lock is known to be dead; None if it ran elsewhere."""
    if lock.get("controller_id") != controller_id() or not isinstance(lock.get("pid"), int):
        return None
    if lock.get("pid_space") != pid_space():
        return None  # containers may share a machine id, and their PIDs mean nothing here
    return start_ticks(lock["pid"]) != lock.get("pid_start_ticks")


def pid_space() -> str:
    """This boot and this PID namespace: only in there does a PID name a process."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    space = Path("/proc/self/ns/pid").readlink()
    return f"{boot} {space}"


def owner(run: Visit) -> dict[str, Any]:
    return {
        "run_id": run.run_id,
        "user": getpass.getuser(),
        "controller": socket.gethostname(),
        "controller_id": controller_id(),
        "pid": os.getpid(),
        "pid_start_ticks": start_ticks(os.getpid()),
        "pid_space": pid_space(),
    }


def command(run: Visit, verb: str) -> StringCommand:
    """The script travels with the command: the first run finds nothing of kvhost on the host."""
    state = shlex.quote(run.paths.state)
    held = run.report.kvhost.data.run_lock.data if run.report.kvhost.data else None
    argv = ["--file", run.paths.run_lock, "--owner", json.dumps(owner(run)), verb]
    if held is not None and is_dead(held.content):
        argv += ["--dead", str(held.content.get("run_id"))]
    if run.settings.break_lock:
        argv += ["--break", run.settings.break_lock]
    text = (ONHOST / "runlock.py").read_text()
    # after a removal there is nothing to give back, and nothing to be made for it
    place = f"mkdir -p {state} &&" if verb == "take" else f"[ ! -d {state} ] ||"
    return StringCommand(f"{place} python3 - {shlex.join(argv)} <<'KVHOST-END'\n{text}\nKVHOST-END")


@operation()
def take_lock(run: Visit) -> Commands:
    """Takes the host's run lock for this run. No change to the host in itself.

    + run: the run of this host
    """
    if not executing():
        return
    ok, output = host.run_shell_command(command(run, "take"), **connector_arguments())
    if not ok:
        said = output.stdout or output.stderr
        yield refuse(
            "another run is in progress on this host, or its lock cannot be taken:\n"
            f"  {said}\nWait for it, or if it is gone: --data break_lock=RUN_ID"
        )
        return
    this = context.ctx_host.get()  # the host itself: the proxy is empty at exit
    how = connector_arguments()

    def refresh() -> None:
        while True:
            gevent.sleep(REFRESH_S)
            this.run_shell_command(command(run, "keep"), **how)

    keeper = gevent.spawn(refresh)

    def drop() -> None:
        keeper.kill()
        try:
            this.run_shell_command(command(run, "drop"), **how)
        except Exception as error:
            logger.warning(f"{run.host}: the run lock stays ({error}); the next run takes it over")

    atexit.register(drop)
