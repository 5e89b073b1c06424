"""What a host gets whose plan holds a refusal: one operation that fails, and nothing else."""

from __future__ import annotations

from pyinfra.api import operation

from deploys.common.operations import Commands, refuse


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
