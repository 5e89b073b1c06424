"""What a host gets whose plan holds a refusal: one operation that fails, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

from pyinfra import context
from pyinfra.api import operation

from deploys.common.context import REPO, Visit
from deploys.common.operations import Commands, refuse
from deploys.common.prepare import visit, why_unreported
from kvhost.basics import up_command

UP = up_command(REPO)
NOT_PROVISIONED = f"nothing was provisioned here: {UP} does that"
SEE_THE_PLAN = "refused: nothing was changed on this host; the plan says what to do"
SEE_ABOVE = "refused: nothing was changed on this host, see above"


def refused(name: str, why: str = SEE_THE_PLAN) -> None:
    """An operation that fails this host, and no other. Nothing on it was touched.

    With --dry, or where the question before a run is answered with no, no operation is run: so the
    host counts as failed from now on, and pyinfra ends with 1 in any case.
    """
    context.state.failed_hosts.add(context.ctx_host.get())
    _refused(name=name, why=why)


def unreported() -> None:
    """The same of a host that visit() got no report of."""
    refused(name="the host's report", why=f"it gave no report: {why_unreported()}")


@operation()
def _refused(why: str) -> Commands:
    """Fails this host.

    + why: what is told
    """
    yield refuse(why)


def provisioned(
    script: str, name: str, why: Callable[[Visit], str | None] = lambda at: None
) -> Visit | None:
    """The host that is visited, if it can be asked by that script of kvhost/onhost; else None, and
    an operation ``name`` fails it with the reason. ``why``: a better reason, where there is one."""
    here = visit()
    if here is None:
        unreported()
    elif here.lacks(script):
        base = here.paths.base_dir
        reason = why(here)
        refused(
            name, reason or f"nothing of kvhost is in {base}: {UP} does that, or set its base_dir"
        )
    else:
        return here
    return None
