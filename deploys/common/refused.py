"""What a host gets whose plan holds a refusal: one operation that fails, and nothing else."""

from __future__ import annotations

from pyinfra.api import operation

from deploys.common.context import Visit
from deploys.common.operations import Commands, refuse
from deploys.common.prepare import visit


@operation()
def refused() -> Commands:
    """Fails this host, and no other. Nothing on it was touched."""
    yield refuse("refused: nothing was changed on this host; the plan says what to do")


@operation()
def not_provisioned(base_dir: str) -> Commands:
    """Fails this host: what is asked of it, only a provisioned host can answer.

    + base_dir: where kvhost would be
    """
    yield refuse(f"nothing of kvhost is in {base_dir}: bin/up does that, or set its base_dir")


def provisioned(script: str, name: str) -> Visit | None:
    """The host that is visited, if it can be asked by that script of kvhost/onhost; else None, and
    an operation ``name`` fails it with the reason."""
    here = visit()
    if here is None:
        refused(name="the host gave no report")
    elif here.lacks(script):
        not_provisioned(name=name, base_dir=here.paths.base_dir)
    else:
        return here
    return None
