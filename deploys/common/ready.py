"""The command that asks a server whether it has answered; two stages use it."""

from __future__ import annotations

from deploys.common.context import Visit
from kvhost.services import ready_argv


def ready_command(run: Visit, *words: str) -> tuple[str, ...]:
    return (*ready_argv(run.settings, run.paths, with_key=run.with_key), *words)
