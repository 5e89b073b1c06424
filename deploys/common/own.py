"""What lies in directories of the service's user is made as that user, never by root.

Whoever reaches the cache server's port may be that user (docs/hazards.md), and a path that it can
replace by a link would have root write, or hand over, whatever the link names.
"""

from __future__ import annotations

import shlex

from pyinfra.api import StringCommand, operation

from deploys.common.context import Run
from deploys.common.looks import Ask, ask, json_of
from deploys.common.operations import Commands, as_service, converges


def own_files_command(run: Run, *words: str) -> tuple[str, ...]:
    return as_service(run.user, {}, (run.python, run.script("own_files"), *words))


def own_files_ask(run: Run, *words: str) -> Ask:
    return ("user", run.user, "python3", run.script("own_files"), "--check", *words)


def own_files(run: Run, *words: str) -> Commands:
    """Commands that make what onhost/own_files.py is told; none when all is as wanted."""
    check = json_of(ask(own_files_ask(run, *words)))
    if check["status"] == "ok" and check["data"]["ok"]:
        return
    yield StringCommand(shlex.join(own_files_command(run, *words)))


def words_for(paths: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(word for path in paths for word in ("--dir", path))


@operation()
@converges
def own_directories(run: Run, paths: tuple[str, ...]) -> Commands:
    """Directories of the service's user inside one of its own, 0700.

    + run: the run of this host
    + paths: parents first
    """
    yield from own_files(run, *words_for(paths))
