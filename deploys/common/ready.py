"""The commands that ask runners whether they have answered; two stages use them."""

from __future__ import annotations

from deploys.common.context import Visit
from kvhost.services.describe import ready_argv
from kvhost.services.runners import asked_runner, runners_of


def ready_commands(run: Visit, *words: str) -> tuple[tuple[str, ...], ...]:
    """One command a runner."""
    return tuple(
        (
            *ready_argv(one.settings, run.paths, with_key=run.with_key, name=one.service),
            *engines(run),
            *words,
        )
        for one in runners_of(run.settings)
    )


def ready_command(run: Visit, *words: str) -> tuple[str, ...]:
    """For the runner alone that the restart test asks."""
    one = asked_runner(run.settings)
    argv = ready_argv(one.settings, run.paths, with_key=run.with_key, name=one.service)
    return (*argv, *engines(run), *words)


def engines(run: Visit) -> tuple[str, ...]:
    """What registers with the cache server, if there is one: each rank of each runner."""
    if run.settings.native or run.settings.runner == "ollama":
        return ()
    return ("--engines", str(sum(one.ranks for one in runners_of(run.settings))))
