"""Whether the run that holds a host's lock is known, on this controller, to be dead. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

#: the PID namespace of a machine itself, in every Linux (PROC_PID_INIT_INO)
INITIAL = "pid:[4026531836]"


@dataclass(frozen=True)
class Controller:
    """``machine``: machine id, or host name; ``boot`` and ``space`` (a PID namespace): only in both
    does a PID name a process; ``key``: of this user's cache on its disk, None where none can be
    kept; ``up_s``: seconds since it booted."""

    machine: str
    boot: str
    space: str
    key: str | None
    up_s: float

    def owner(self) -> dict[str, str | None]:
        """What a lock says of it."""
        return {
            "controller_id": self.machine,
            "controller_boot_id": self.boot,
            "controller_pid_namespace": self.space,
            "controller_key": self.key,
        }


def is_dead(
    lock: Mapping[str, Any], age_s: float, here: Controller, ticks: Callable[[int], int | None]
) -> bool | None:
    """None if that cannot be known here. ``ticks``: when a process started, None if it is gone."""
    pid = lock.get("pid")
    if lock.get("controller_id") != here.machine or not isinstance(pid, int):
        return None
    boot, space = _place(lock)
    if boot == here.boot:
        # containers may share a machine id, and their PIDs mean nothing here
        return ticks(pid) != lock.get("pid_start_ticks") if space == here.space else None
    # a machine that booted has ended all that ran on it. But another one may have its machine id: a
    # container of the same image, a copy of the virtual machine. So: no container, the same
    # cache on the disk, and no sign of life since this boot
    booted = space == here.space == INITIAL and boot is not None
    copy = here.key is None or lock.get("controller_key") != here.key
    return True if booted and not copy and age_s >= here.up_s else None


def _place(lock: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Boot and PID namespace; of a lock of an older kvhost too."""
    if "controller_boot_id" in lock:
        boot, space = lock["controller_boot_id"], lock.get("controller_pid_namespace")
    else:
        boot, _, space = str(lock.get("pid_space", "")).partition(" ")
    return (str(boot), str(space)) if boot and space else (None, None)
