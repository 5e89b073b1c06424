"""Asks a script on a host for its JSON while a run is executing; its progress is shown."""

from __future__ import annotations

import json
import shlex
from typing import Any

from pyinfra import logger
from pyinfra.api import StringCommand

from deploys.common.operations import connector_arguments


def ask_host(host: Any, argv: tuple[str, ...]) -> dict[str, Any] | None:
    """What the command printed as its last line; None, with the reason told, if it failed."""
    ok, output = host.run_shell_command(StringCommand(shlex.join(argv)), **connector_arguments())
    for line in output.stderr_lines:
        logger.info(f"    [{host.name}] {line}")
    lines = [line for line in output.stdout_lines if line.strip()]
    if not ok or not lines:
        # kept is what it said, not these words
        host.log_styled("failed, see above", fg="red", log_func=logger.error)
        return None
    loaded: dict[str, Any] = json.loads(lines[-1])
    return loaded
