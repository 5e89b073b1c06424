"""One run at a time on a host: the lock is taken before a run changes anything.

It is dropped when this process ends, however it ends short of a kill; a killed run's lock is
taken over at once by the next run of the same controller (kvhost/records/holder.py: its process is
seen to be dead, or the controller booted since), by another controller after 30 minutes without a
sign of life, or with `break_lock`.
"""

from __future__ import annotations

import atexit
import getpass
import json
import os
import shlex
import socket
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import gevent
from pyinfra import context, logger
from pyinfra.api import StringCommand, operation

from deploys.common import early
from deploys.common.context import Run, Visit
from deploys.common.looks import Ask, Looks, NotLooked, expect
from deploys.common.operations import Commands, connector_arguments, executing, not_locked
from deploys.common.sent import ONHOST
from kvhost.records import holder
from kvhost.records.holder import Controller
from kvhost.records.journal import start_ticks
from kvhost.records.last_asked import key_id
from kvhost.report import RunLock

REFRESH_S = 300


def controller_id() -> str:
    """Tells controllers apart: the machine id where there is one, else the host name."""
    try:
        return Path("/etc/machine-id").read_text(encoding="utf-8").strip() or socket.gethostname()
    except OSError:
        return socket.gethostname()


@cache
def this_controller() -> Controller:
    """As it was first asked: a lock that is free for the plan is so when it is taken."""
    return Controller(
        machine=controller_id(),
        boot=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        space=str(Path("/proc/self/ns/pid").readlink()),
        key=key_id(),
        up_s=time.clock_gettime(time.CLOCK_BOOTTIME),
    )


def is_dead(lock: RunLock) -> bool | None:
    """Whether the run that holds a lock is known to be dead; None if it ran elsewhere."""
    return holder.is_dead(lock.content, lock.age_s, this_controller(), start_ticks)


def owner(run: Visit) -> dict[str, Any]:
    return {
        "run_id": run.run_id,
        "user": getpass.getuser(),
        "controller": socket.gethostname(),
        **this_controller().owner(),
        "pid": os.getpid(),
        "pid_start_ticks": start_ticks(os.getpid()),
    }


def take_words(run: Visit) -> tuple[str, ...]:
    """Arguments of `runlock.py take`."""
    words = ["--file", run.paths.run_lock, "--owner", json.dumps(owner(run))]
    kvhost = run.report.kvhost.data
    held = kvhost.run_lock.data if kvhost else None
    if held is not None and is_dead(held):
        words += ["--dead", str(held.content.get("run_id"))]
    if run.settings.break_lock:
        words += ["--break", run.settings.break_lock]
    elif kvhost and kvhost.last_run.data is not None:
        words += ["--last", kvhost.last_run.data]
    return tuple(words)


def command(run: Visit, verb: str) -> StringCommand:
    """keep or drop. The script travels with the command: a removal takes that of the host away."""
    state = shlex.quote(run.paths.state)
    argv = ["--file", run.paths.run_lock, "--owner", json.dumps(owner(run)), verb]
    text = (ONHOST / "runlock.py").read_text(encoding="utf-8")
    # after a removal there is nothing to give back
    return StringCommand(
        f"[ ! -d {state} ] || python3 - {shlex.join(argv)} <<'KVHOST-END'\n{text}\nKVHOST-END"
    )


def may_wait(run: Visit) -> bool:
    """Whether a run may look without the lock: it expects to change nothing, and nobody has it."""
    kvhost = run.report.kvhost.data
    return (
        isinstance(run, Run)
        and all(action.state != "change" for action in run.plan.actions)
        and not run.settings.break_lock
        and kvhost is not None
        and kvhost.receipt.status == "ok"
        and kvhost.run_lock.status == "absent"
        and kvhost.last_run.data is not None
    )


@operation()
def take_lock(run: Visit, asks: tuple[Ask, ...] = ()) -> Commands:
    """One run at a time: takes the host's run lock, and looks at all that the run will ask.

    A run that expects to change nothing looks without the lock; its first change takes it, looks
    again, and fails where another run was here since the report. No change to the host in itself.

    + run: the run of this host
    + asks: what its operations will ask, in their order
    """
    known = Looks(
        lock_path=run.paths.run_lock,
        asks=asks,
        take=take_words(run),
        taken=keeper(run) if executing() else None,
    )
    expect(known)
    if not executing():
        return
    early.remember(run.host, run.paths.run_lock, asks)
    told = early.looks(run.host, run.paths.run_lock, asks)
    waits = bool(asks) and may_wait(run)
    try:
        if told is not None and waits:
            known.told(*told)
        else:
            known.gather(asks, take=not waits)
    except NotLooked as why:
        yield not_locked(str(why))
        return
    kvhost = run.report.kvhost.data
    last = kvhost.last_run.data if kvhost else None
    if not known.locked and known.lock != {"held": None, "last": last}:
        yield not_locked(json.dumps(known.lock))


def keeper(run: Visit) -> Callable[[], None]:
    """What keeps the lock alive once it is taken, until this process gives it back at its end."""
    this = context.ctx_host.get()  # the host itself: the proxy is empty at exit
    how = connector_arguments()

    def refresh() -> None:
        while True:
            gevent.sleep(REFRESH_S)
            this.run_shell_command(command(run, "keep"), **how)

    keeping = gevent.Greenlet(refresh)

    def drop() -> None:
        keeping.kill()
        try:
            this.run_shell_command(command(run, "drop"), **how)
        except Exception as error:
            logger.warning(f"{run.host}: the run lock stays ({error}); the next run takes it over")

    def begin() -> None:
        if not _drops:
            atexit.register(drop_all)
        _drops.append(drop)
        keeping.start()

    return begin


_drops: list[Callable[[], None]] = []


def drop_all() -> None:
    """Gives all locks back, those of all hosts at once."""
    gevent.joinall([gevent.spawn(drop) for drop in _drops])
