"""Reboots a host and waits until it can be reached again, for the event "reboot" of the test.

pyinfra's own operation takes the uptime for proof, which a container shares with its host; here it
is the start of the first process and the boot.
"""

from __future__ import annotations

import time
from typing import Any

import gevent
from pyinfra import logger

from deploys.common.context import Run
from deploys.common.operations import connector_arguments
from deploys.common.reasons import failed

IDENTITY = "cut -d ' ' -f 22 /proc/1/stat; cat /proc/sys/kernel/random/boot_id"
LOOK_S = 3


def identity(host: Any) -> list[str] | None:
    ok, output = host.run_shell_command(IDENTITY, **connector_arguments())
    return output.stdout.split() if ok else None


def reboot(host: Any, run: Run) -> bool:
    """False when the host does not come back within ready_timeout_s."""
    before = identity(host)
    logger.info(f"    [{run.host}] reboot")
    # detached, so that the connection's end is not waited for
    host.run_shell_command(
        "( sleep 1; systemctl reboot || reboot ) </dev/null >/dev/null 2>&1 &",
        **connector_arguments(),
    )
    deadline = time.monotonic() + run.settings.ready_timeout_s
    while time.monotonic() < deadline:
        gevent.sleep(LOOK_S)
        try:
            host.disconnect()
            host.connect(show_errors=False)
            now = identity(host) if host.connected else None
        except Exception as error:  # of whichever connector: it is not back yet
            logger.debug(f"[{run.host}] not back yet: {error}")
            continue
        if now is not None and now != before:
            return True
    return failed(host, "the host did not come back")
