"""What stands against the user's own program of a runner, asked of the host before the plan."""

from __future__ import annotations

import shlex

from pyinfra import host
from typing_extensions import override

from deploys.common.facts import CommandJson, with_siblings
from deploys.common.sent import sent
from kvhost.engine.locks import EngineLock
from kvhost.plan.host import installed
from kvhost.plan.llama import binary_refusals
from kvhost.plan.types import Refusal
from kvhost.report import HostReport
from kvhost.settings import Settings


class ProgramJson(CommandJson):
    """What onhost/engine_program.py says; it and what it needs travel along."""

    @override
    def command(self, argv: tuple[str, ...]) -> str:
        return sent(with_siblings("engine_program.py"), shlex.join(argv))


def against_program(
    settings: Settings, report: HostReport, lock: EngineLock
) -> tuple[Refusal, ...]:
    """Of llama_binary on the host, where it is still to be taken: its bytes are looked at there."""
    source, kvhost = settings.llama_binary, report.kvhost.data
    if settings.runner != "llama_server" or source is None or not source.startswith("/"):
        return ()
    if kvhost is not None and installed(kvhost.envs, lock.digest):
        return ()
    look = host.get_fact(ProgramJson, argv=("check", "--source", source))
    return tuple(binary_refusals(source, look))
