"""What a host gets whose plan holds a refusal: one operation that fails, and nothing else."""

from __future__ import annotations

from pyinfra.api import operation

from deploys.common.operations import Commands, refuse


@operation()
def refused() -> Commands:
    """Fails this host, and no other. Nothing on it was touched."""
    yield refuse("refused: nothing was changed on this host; the plan says what to do")
