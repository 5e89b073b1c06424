"""Operations of the stage driver. What is changed is decided on the host, by its script."""

from __future__ import annotations

import json
import shlex
from io import StringIO
from typing import Any

from pyinfra import host
from pyinfra.api import FunctionCommand, StringCommand, operation
from pyinfra.operations import files

from deploys.common.context import Run
from deploys.common.facts import CommandJson
from deploys.common.operations import Commands, connector_arguments
from deploys.common.prepare import against_the_gpu
from deploys.common.reasons import failed
from deploys.common.reboot import reboot
from kvhost.report import ReportError

NEEDS_REBOOT = (
    "the driver is installed, and this host has to be rebooted for it: reboot it and run again, or "
    "set driver_reboot"
)


def order_path(run: Run) -> str:
    return f"{run.paths.state}/driver-order.json"


@operation()
def driver(run: Run) -> Commands:
    """The driver that the plan named is installed, held and loaded; the decision is made again.

    + run: the run of this host
    """
    script: tuple[str, ...] = ("python3", run.script("driver_apply"))
    base = ("--base", run.paths.base_dir)
    if run.driver_order is None:
        # the driver is good as it is; an order that a run before this one began may be unfinished
        state = host.get_fact(CommandJson, argv=(*script, "check", *base))
        if run.lacks("driver_apply") or (state["status"] == "ok" and state["data"]["ok"]):
            return
        command: tuple[str, ...] = (*script, "apply", *base)
    else:
        text = json.dumps(run.driver_order, indent=1, sort_keys=True) + "\n"
        yield from files.put._inner(
            src=StringIO(text), dest=order_path(run), user="root", group="root", mode="600",
            create_remote_dir=False,
        )  # fmt: skip
        command = (*script, "apply", *base, "--order", order_path(run))
    yield FunctionCommand(install, (run, command), {})


def install(state: Any, host: Any, run: Run, command: tuple[str, ...]) -> bool:
    """Carries the order out, reboots if it may, and asks again what stands against the GPU."""
    how = connector_arguments()
    ok, output = host.run_shell_command(
        StringCommand(shlex.join(command)), print_output=True, **how
    )
    if not ok:
        return False
    told = json.loads(output.stdout.splitlines()[-1])
    if told["reboot"] and not run.settings.driver_reboot:
        return failed(host, NEEDS_REBOOT)
    if told["reboot"] and not reboot(host, run):
        return False
    try:
        left = against_the_gpu(run)
    except ReportError as error:
        return failed(host, f"what the host says after that is no report: {error}")
    for one in left:
        found = f"needed: {one.needed}\n  found: {one.found}\n  fix: {one.fix}"
        failed(host, f"after that {one.code}: {one.what}\n  {found}")
    return not left
