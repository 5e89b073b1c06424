"""`kvhost purge`: what lies in the tier of every host, or the removal of a part of it."""

import shlex
from typing import Any

from pyinfra.api import FunctionCommand, StringCommand, operation

from deploys.common.care import ask_host
from deploys.common.context import Visit
from deploys.common.operations import Commands, connector_arguments
from deploys.common.ready import ready_command
from deploys.common.refused import UP, provisioned, refused
from deploys.common.runlock import take_lock
from deploys.remove import what_stays
from kvhost.commands.asking import answer, question


def words(at: Visit, verb: str) -> tuple[str, ...]:
    asked = question()
    narrowed = [
        word
        for key in ("namespace", "model", "tenant_sha256")
        if key in asked
        for word in (f"--{key.replace('_', '-')}", str(asked[key]))
    ]
    where = ("--base", at.paths.base_dir, "--tier", at.paths.tier_dir, "--user", at.user)
    return ("python3", at.script("purge"), verb, *where, *narrowed)


@operation(is_idempotent=False)
def purge(at: Visit, verb: str) -> Commands:
    """Looks, or removes, and tells the command.

    + at: the host
    + verb: look or remove
    """

    def run(state: Any, host: Any) -> bool:
        found = ask_host(host, words(at, verb))
        if found is None:
            return False
        if found.get("restarted"):
            wait = ready_command(at, "--timeout", str(at.settings.ready_timeout_s))
            how = connector_arguments()
            ok, _ = host.run_shell_command(
                StringCommand(shlex.join(wait)), print_output=True, **how
            )
            if not ok:
                return False
        return answer(at.host, found) or True

    yield FunctionCommand(run, (), {})


def left_of_a_removal(at: Visit) -> str | None:
    """What `kvhost remove` left, and what removes that; None where it left nothing."""
    left = what_stays(at)
    if not left:
        return None
    data = " ".join(f"--data {name}=true" for name in left)
    return (
        f"kvhost is removed from {at.paths.base_dir}, and what it stored stays there: "
        f"{'; '.join(left.values())}. kvhost remove {data} removes it, {UP} uses it again"
    )


here = provisioned("purge", name="cache: look", why=left_of_a_removal)
if here is not None and here.settings.runner == "ollama":
    why = "Ollama keeps no KV cache on disk: there is nothing to purge"
    refused(name="cache: none", why=why)
elif here is not None:
    verb = str(question().get("verb", "look"))
    if verb == "remove":
        take_lock(name="host: one run at a time", run=here)
    purge(name=f"cache: {verb}", at=here, verb=verb)
