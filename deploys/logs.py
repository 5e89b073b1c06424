"""`kvhost logs`: the services' logs of every host, the last error first. Changes nothing."""

from typing import Any

from pyinfra.api import FunctionCommand, operation

from deploys.common.care import ask_host
from deploys.common.context import Visit
from deploys.common.operations import Commands
from deploys.common.prepare import visit
from deploys.common.refused import not_provisioned, refused
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


here = visit()
if here is None:
    refused(name="the host gave no report")
elif here.lacks("logs"):
    not_provisioned(name="logs", base_dir=here.paths.base_dir)
else:
    logs(name="logs", at=here)
