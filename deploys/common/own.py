"""What lies in directories of the service's user is made as that user, never by root.

Whoever reaches the cache server's port may be that user (docs/hazards.md), and a path that it can
replace by a link would have root write, or hand over, whatever the link names.
"""

from __future__ import annotations

import shlex

from pyinfra import host
from pyinfra.api import StringCommand, operation

from deploys.common.context import Run
from deploys.common.facts import CommandJson
from deploys.common.operations import Commands, as_service


def own_files(run: Run, *words: str) -> Commands:
    """Commands that make what onhost/own_files.py is told; none when all is as wanted."""
    argv = (run.python, run.script("own_files"))
    check = host.get_fact(CommandJson, argv=as_service(run.user, {}, (*argv, "--check", *words)))
    if check["status"] == "ok" and check["data"]["ok"]:
        return
    yield StringCommand(shlex.join(as_service(run.user, {}, (*argv, *words))))


@operation()
def own_directories(run: Run, paths: tuple[str, ...]) -> Commands:
    """Directories of the service's user inside one of its own, 0700.

    + run: the run of this host
    + paths: parents first
    """
    yield from own_files(run, *(word for path in paths for word in ("--dir", path)))
