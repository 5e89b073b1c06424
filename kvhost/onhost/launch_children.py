"""The processes of a service, for launch.py, which it lies beside: start, wait for, end them all.

Stopping is asked for by signals that are waited for, never handled. Every descendant ends with the
service: what loses its parent becomes a child of this process (PR_SET_CHILD_SUBREAPER, prctl(2)).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from typing import Any

PR_SET_PDEATHSIG = 1  # prctl(2)
PR_SET_CHILD_SUBREAPER = 36
STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
WAITED = (*STOP, signal.SIGCHLD)

LIBC = ctypes.CDLL(None)


class GaveUp(Exception):
    """The service could not be started: the exit code and why, for people."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code = code


class Stopped(Exception):
    """Asked to stop before the service was started."""


def say(text: str) -> None:
    # the log's reader (supervisord) may be dead, and the service must be ended all the same
    with contextlib.suppress(OSError):
        os.write(1, f"launch: {text}\n".encode())


def boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as handle:
        return handle.read().strip()


def stat_fields(pid: int) -> list[str] | None:
    """/proc/PID/stat from field 3 on (state, ppid, pgrp, session, …), None without such a process.

    The name in field 2 may hold spaces and parentheses (proc_pid_stat(5)).
    """
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as handle:
            return handle.read().rpartition(")")[2].split()
    except OSError:
        return None


def start_ticks(pid: int) -> int | None:
    """Field 22 of /proc/PID/stat: with the PID it names a process, as PIDs are used again."""
    fields = stat_fields(pid)
    return int(fields[19]) if fields else None


def processes() -> list[tuple[int, list[str]]]:
    """(pid, stat_fields) of every process that is not a zombie."""
    found = ((int(name), stat_fields(int(name))) for name in os.listdir("/proc") if name.isdigit())
    return [(pid, fields) for pid, fields in found if fields and fields[0] not in "ZX"]


def leftovers(record: dict[str, Any]) -> list[int]:
    """Processes of the run before that outlived their launch.py: those of its session.

    The session's number is the PID of its first process and is not given out again while any
    of them lives. pid 1 tells a restarted container, whose numbers begin anew.
    """
    session, ticks = record.get("pid"), record.get("start_ticks")
    if not isinstance(session, int) or record.get("boot_id") != boot_id():
        return []
    if record.get("pid1_ticks") != start_ticks(1) or start_ticks(session) not in (None, ticks):
        return []
    return [pid for pid, fields in processes() if int(fields[3]) == session]


class Signals:
    """Signals are waited for, never handled: none can interrupt a step halfway."""

    def __init__(self) -> None:
        self.asked = False
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, its children leave no exit code
        signal.pthread_sigmask(signal.SIG_BLOCK, WAITED)

    def wait(self, seconds: float) -> None:
        """Returns after ``seconds``, or sooner when a signal came."""
        got = signal.sigtimedwait(WAITED, max(seconds, 0.0))
        if got is not None and got.si_signo in STOP:
            self.asked = True

    def pause(self, seconds: float, until: str | None = None) -> None:
        """Sleeps; shorter if the file ``until`` appears. Raises Stopped when asked to stop."""
        deadline = time.monotonic() + seconds
        while not self.asked and not (until and os.path.lexists(until)):
            left = deadline - time.monotonic()
            if left <= 0:
                return
            self.wait(min(left, 0.3))
        if self.asked:
            raise Stopped


def end_with_parent() -> None:
    """This process is told to stop when its supervisor dies, and adopts orphans below it."""
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    LIBC.prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)


def spawn(argv: list[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
    """A child in a session of its own, told to stop when this process dies. Raises GaveUp."""
    parent = os.getpid()

    def in_child() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        LIBC.prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
        if os.getppid() != parent:  # it died before prctl
            os._exit(1)

    home = env.get("HOME", "/")
    try:
        return subprocess.Popen(
            argv,
            env=env,
            cwd=home,
            start_new_session=True,
            preexec_fn=in_child,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise GaveUp(1, f"cannot start {argv[0]} in {home}: {error}") from error


def reap(child: subprocess.Popen[bytes], *others: subprocess.Popen[bytes]) -> int | None:
    """Collects every dead child (orphans of the service too); ``child``'s exit code if it ended.
    The exit codes of ``others`` are kept in them."""
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            for one in (child, *others):
                if pid == one.pid:
                    one.returncode = os.waitstatus_to_exitcode(status)
    return child.returncode


def is_tracker(pid: int) -> bool:
    """Whether it is Python's resource tracker, which tidies up once all others have ended."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as handle:
            return b"multiprocessing.resource_tracker" in handle.read()
    except OSError:
        return False


def end_descendants(seconds: float = 10) -> None:
    """Kills all that is left below this process: whatever loses its parent becomes its child."""
    deadline, told = time.monotonic() + seconds, False
    tidying = time.monotonic() + 3
    while True:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        left = [pid for pid, fields in processes() if int(fields[1]) == os.getpid()]
        if time.monotonic() < tidying and all(map(is_tracker, left)):
            time.sleep(0.02)  # it ends by itself, having removed the service's shared memory
            continue
        left = [pid for pid in left if time.monotonic() > tidying or not is_tracker(pid)]
        if left and not told:
            say(f"killing what was left behind: {left}")
            told = True
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            say(f"could not be killed: {left}")
            return
        time.sleep(0.02)
