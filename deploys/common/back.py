"""The way back: when a new environment does not prove itself, the one that passed last returns."""

from __future__ import annotations

import json
import shlex
from typing import Any

from pyinfra import logger
from pyinfra.api import FunctionCommand, StringCommand, operation

from deploys.common.context import Run
from deploys.common.operations import Commands, connector_arguments, converges, refuse
from deploys.common.ready import ready_command
from deploys.common.reasons import failed
from kvhost.reports.kept import tell_summary
from kvhost.settings import settings_digest

#: state of failed.json while its run was on the way back
BROKEN_OFF = "rolling back"


def go_back(host: Any, run: Run, why: str) -> bool:
    """Back to what passed last, if the environment was switched since; whether it went back.

    Says on the terminal what it did, or why it could not.
    """
    ready = ready_command(run, "--timeout", str(run.settings.ready_timeout_s))
    argv = (
        "python3", run.script("generations"), "back", "--base", run.paths.base_dir,
        "--user", run.user, "--why", why, "--lock", run.lock.digest,
        "--settings", settings_digest(run.settings), "--", *ready,
    )  # fmt: skip
    ok, output = host.run_shell_command(
        StringCommand(shlex.join(argv)), print_output=True, **connector_arguments()
    )
    answer: dict[str, Any] = {}
    if ok:
        answer = json.loads(output.stdout.strip().splitlines()[-1])
    if not ok:
        message = "IT COULD NOT BE GONE BACK to what passed last, see above; this host needs a look"
    elif answer["rolled_back"]:
        message = (
            f"WENT BACK to {answer['env']}, its configuration and its cache, because: {why}. "
            f"The one that failed is kept for a look: {answer['failed_env']}. It is not tried "
            "again until the lock or the settings change, or you say --data retry_failed=true"
        )
        tell_summary(run.host, rolled_back=why)
    else:
        logger.info(f"    [{run.host}] not gone back: {answer['why']}")
        return False
    failed(host, message)
    return bool(ok)


@operation()
@converges
def finish_way_back(run: Run) -> Commands:
    """Completes a way back that was broken off, and ends the run of this host there.

    + run: the run of this host
    """
    failed = run.report.kvhost.data.failed.data if run.report.kvhost.data else None
    if not isinstance(failed, dict) or failed.get("state") != BROKEN_OFF:
        return
    why = str(failed.get("why"))

    def finish(state: Any, host: Any) -> bool:
        go_back(host, run, why)
        return False  # what to do next is for a person, as after any way back

    yield FunctionCommand(finish, (), {})
    yield refuse("the way back of an earlier run was completed; nothing else was done")
