"""Stage verify: the restart-persistence test; the host collects evidence, the judge sits here."""

from __future__ import annotations

from deploys.common.context import Run
from deploys.verify.operations import restart_test, settle
from kvhost.journal import tell


def deploy(run: Run, *, always: bool = False) -> None:
    """``always``: also when nothing has changed since the last verdict."""
    if run.settings.verify != "never" or always:
        asked = always or run.settings.verify == "always"
        restart_test(name="verify: does the KV cache survive a restart", run=run, asked=asked)
    else:
        tell("untested", host=run.host)
    settle(name="verify: what passed is recorded, the rest cleared away", run=run, clear=not always)
