"""A control group of its own for each host of the lab.

Two systemds in one group remove each other's: a service of one fails at "step CGROUP", and what one
stops the other loses. nspawn makes the host's groups below the one that it is started in.
"""

from __future__ import annotations

import contextlib
import shlex
from pathlib import Path

MOUNTS, MINE = Path("/proc/self/mountinfo"), Path("/proc/self/cgroup")


def tops() -> list[Path]:
    """Where this process is in the hierarchies that systemd keeps its services in: v2, and v1's."""
    groups = [row.split(":", 2) for row in MINE.read_text().splitlines()]
    mine = {("v2" if number == "0" else names): path for number, names, path in groups}
    found = []
    for row in MOUNTS.read_text().splitlines():
        mount, _, after = row.partition(" - ")
        root, point = mount.split()[3:5]
        kind, _, options = after.split()[:3]
        key = "v2" if kind == "cgroup2" else "name=systemd"
        if kind == "cgroup2" or (kind == "cgroup" and "name=systemd" in options.split(",")):
            inside = mine.get(key, "/")
            below = Path(inside).relative_to(root) if Path(inside).is_relative_to(root) else ""
            found.append(Path(point, below))
    return found


def entering(name: str) -> str:
    """Shell: the process that runs it is in the group ``name`` from then on."""
    steps = []
    for top in tops():
        group = shlex.quote(str(top / name))
        steps.append(f"mkdir -p {group} && echo $$ > {group}/cgroup.procs")
    return " && ".join(steps) or "true"


def remove(name: str) -> bool:
    """Whether the group ``name`` and what is below it is gone; not while a process is in it."""
    for top in tops():
        below = sorted((top / name).rglob("*/"), key=lambda path: -len(path.parts))
        for group in (*below, top / name):
            with contextlib.suppress(OSError):
                group.rmdir()
    return not any((top / name).exists() for top in tops())
