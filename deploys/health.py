"""The gate between two batches of `kvhost up`: do the services run, and does the server answer?

Nothing is changed. Asked through kvhost/commands/asking.py; a host without answer is not healthy.
"""

from typing import Any

from pyinfra.api import FunctionCommand, operation

from deploys.common.care import ask_host
from deploys.common.context import Visit
from deploys.common.operations import Commands
from deploys.common.ready import ready_commands
from deploys.common.refused import provisioned
from kvhost.commands.asking import answer
from kvhost.ollama.server import adopted


def why_not(at: Visit, host: Any) -> str | None:
    """What is wrong with a host, None if nothing is."""
    base = ("--base", at.paths.base_dir, "--user", at.user)
    status: dict[str, Any] | None = {"services": {}}
    if not adopted(at.settings):
        status = ask_host(host, ("python3", at.script("services"), *base, "--json", "status"))
    if status is None:
        return "its services could not be asked for"
    wrong = [
        f"{name} is {row['state']}"
        for name, row in status["services"].items()
        if row["state"] != "RUNNING" or not row["alive"]
    ]
    if wrong:
        return ", ".join(wrong)
    for argv in ready_commands(at, "--once"):
        ready = ask_host(host, argv)
        if ready is None or not ready["ready"]:
            return "the server does not answer"
    return None


@operation(is_idempotent=False)
def health(at: Visit) -> Commands:
    """Asks the services and the server of a host.

    + at: the host
    """

    def run(state: Any, host: Any) -> bool:
        why = why_not(at, host)
        answer(at.host, {"why": why})
        return why is None

    yield FunctionCommand(run, (), {})


here = provisioned("services", name="health")
if here is not None:
    health(name="health", at=here)
