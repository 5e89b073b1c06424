"""A service as data, for whichever supervisor runs it, and commands that several run first.

A service is started by onhost/launch.py from a JSON description (`launch_spec`); what differs
between supervisors is only who starts launch.py.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvhost.paths import HostPaths

#: seconds after a boot within which a driver has listed its GPUs; those of a large host take one
GPU_WAIT_S = 120


def unit_file(name: str) -> str:
    """Name of a service's unit; without systemd there is no such file."""
    return f"kvhost-{name}.service"


@dataclass(frozen=True)
class Service:
    """One service, for whichever supervisor runs it. Times in seconds."""

    name: str
    #: what it is, for people
    title: str
    argv: tuple[str, ...]
    env: dict[str, str]
    #: environment variable -> file that holds its secret value
    secret_env: dict[str, str] = field(default_factory=dict)
    #: "host:port" that must answer first
    wait_for: tuple[str, ...] = ()
    #: files whose change means that the service has to be restarted
    watch: tuple[str, ...] = ()
    #: (source, copy): the service reads the copy, made when it starts, so that what it was started
    #: with is what its record says, whatever is written to the source meanwhile
    copies: tuple[tuple[str, str], ...] = ()
    #: commands run before it; the argument "{unclean}" becomes --unclean after an unclean stop
    before: tuple[tuple[str, ...], ...] = ()
    #: commands run, while it still answers, before it is told to stop; they have its secrets
    before_stop: tuple[tuple[str, ...], ...] = ()
    #: mount point of the drive that it works on; it does not start while that is away
    needs_mount: str | None = None
    #: it does not start again sooner than this after its end
    min_gap_s: float = 0
    #: files that tell the right place (a mounted tier) from an empty directory; it waits for them
    require: tuple[str, ...] = ()
    #: where it writes, beside its home, log and run directories
    writes: tuple[str, ...] = ()
    #: command that ends well once it has answered, and how long that may take
    ready: tuple[str, ...] = ()
    ready_s: int = 0
    #: ports of loopback that only root and the service's user may open, where systemd runs it
    closed_ports: tuple[int, ...] = ()
    #: services that are started first, and are wanted
    after: tuple[str, ...] = ()
    stop_timeout_s: int = 30
    #: start order, low first
    priority: int = 100

    def launch_spec(self, paths: HostPaths) -> str:
        """What launch.py reads, as JSON. Holds no secret, only the names of files that do."""
        spec: dict[str, Any] = {
            "service": self.name,
            "argv": list(self.argv),
            "env": self.env,
            "secret_env": self.secret_env,
            "record": f"{paths.run}/{self.name}.json",
            "watch": [*self.watch, f"{paths.etc}/{unit_file(self.name)}"],
            "require": list(self.require),
            "log": f"{paths.log}/{self.name}.log",
            "wait_for": list(self.wait_for),
            "wait_s": 120,
            "before": [list(argv) for argv in self.before],
            **({"before_stop": list(map(list, self.before_stop))} if self.before_stop else {}),
            "copies": [list(pair) for pair in self.copies],
            "min_gap_s": self.min_gap_s,
            "stop_timeout_s": self.stop_timeout_s,
        }
        if self.needs_mount is not None:
            spec["drive"] = {"mount": self.needs_mount, "record": paths.drive}
        return json.dumps(spec, indent=1, sort_keys=True) + "\n"


def plain_env(paths: HostPaths) -> dict[str, str]:
    """Environment of what needs no more than the host's own programs."""
    return {"PATH": "/usr/bin:/bin", "HOME": paths.home, "LC_ALL": "C.UTF-8"}


def script(paths: HostPaths, name: str) -> tuple[str, str]:
    """Beginning of a command that runs one of kvhost/onhost's scripts as the services do."""
    return f"{paths.tools}/current/bin/python", f"{paths.bin}/{name}.py"


def gpu_gate(paths: HostPaths, gpus: int, uuids: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Command that waits for the GPUs which the engine needs; none without one."""
    if not gpus:
        return ()
    named = tuple(word for uuid in uuids for word in ("--uuid", uuid))
    return ((*script(paths, "gpu_gate"), "--expect", str(gpus), *named, "--wait", str(GPU_WAIT_S)),)


def shm_sweep(paths: HostPaths, *patterns: str) -> tuple[str, ...]:
    """Command that removes what a killed service left in /dev/shm."""
    return (*script(paths, "shm_sweep"), *patterns)
