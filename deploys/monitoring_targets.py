"""`kvhost monitoring scrape`: tells under which address a host is known. Nothing is changed."""

from typing import Any

from pyinfra import host
from pyinfra.api import FunctionCommand, operation
from pyinfra.connectors.local import LocalConnector

from deploys.common.context import Visit
from deploys.common.operations import Commands
from deploys.common.refused import provisioned
from kvhost.commands.asking import answer


def address() -> str:
    """As the inventory reaches it; the machine that this runs on is its loopback."""
    if issubclass(host.connector_cls, LocalConnector):
        return "127.0.0.1"
    return str(host.data.get("ssh_hostname") or host.name)


@operation(is_idempotent=False)
def target(at: Visit) -> Commands:
    """Tells the command where the host is, and whether it writes figures.

    + at: the host
    """
    where = address()

    def run(state: Any, host: Any) -> bool:
        answer(at.host, {"address": where, "monitoring": at.settings.monitoring})
        return True

    yield FunctionCommand(run, (), {})


here = provisioned("metrics", name="monitoring")
if here is not None:
    target(name="monitoring: targets", at=here)
