"""`kvhost logs`: the services' logs of every host, the last error first. Changes nothing."""

from typing import Any

from pyinfra.api import FunctionCommand, operation

from deploys.common.care import ask_host
from deploys.common.context import Visit
from deploys.common.operations import Commands
from deploys.common.refused import provisioned
from kvhost.commands.asking import answer, question


def words(at: Visit) -> tuple[str, ...]:
    asked = question()
    chosen = [word for name in asked.get("services", []) for word in ("--service", str(name))]
    keys = [key for key in ("since", "lines", "level") if key in asked]
    given = [word for key in keys for word in (f"--{key}", str(asked[key]))]
    return ("python3", at.script("logs"), "--base", at.paths.base_dir, "--json", *chosen, *given)


@operation(is_idempotent=False)
def logs(at: Visit) -> Commands:
    """Reads the logs and tells the command.

    + at: the host
    """

    def run(state: Any, host: Any) -> bool:
        found = ask_host(host, words(at))
        return found is not None and (answer(at.host, {"services": found}) or True)

    yield FunctionCommand(run, (), {})


here = provisioned("logs", name="logs")
if here is not None:
    logs(name="logs", at=here)
