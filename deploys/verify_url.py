"""`kvhost verify --url … --where HOST`: the test of a server of others, run on that host.

Scripts, config and key lie in a directory of its own there (0700), which is removed again.
"""

from __future__ import annotations

import json
import os
import shlex
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

from pyinfra import context
from pyinfra.api import FunctionCommand, StringCommand, operation

from deploys.common.operations import Commands, connector_arguments, refuse
from deploys.common.reasons import failed
from kvhost.commands.verify_url import ASKED_VARIABLE
from kvhost.reports.kept import check_writable, reports_dir
from kvhost.verdict.verify_url import (
    ONHOST,
    SCRIPTS,
    Asked,
    from_json,
    judge_and_keep,
    script_config,
)


@operation()
def foreign_test(asked: Asked) -> Commands:
    """Restarts a server between two equal requests and judges what came back.

    + asked: the options of the command
    """
    if len(context.state.inventory.get_active_hosts()) != 1:
        yield refuse("the restart command runs on one host: name one")
        return
    yield FunctionCommand(test_there, (asked,), {})


def test_there(state: Any, host: Any, asked: Asked) -> bool:
    """False: no verdict; whatever the verdict is, it is kept and told by the command."""
    how = connector_arguments()

    def run(command: str) -> tuple[bool, Any]:
        found: tuple[bool, Any] = host.run_shell_command(
            StringCommand(command), print_output=True, **how
        )
        return found

    try:
        check_writable(reports_dir())
    except OSError as error:
        return failed(host, f"no report could be kept: {error}")
    ok, output = host.run_shell_command(StringCommand("mktemp -d /var/tmp/kvhost-XXXXXXXX"), **how)
    folder = output.stdout.strip() if ok else ""
    if not folder.startswith("/var/tmp/kvhost-") or "\n" in folder:
        return failed(host, "no directory could be made on the host")
    try:
        for name in SCRIPTS:
            host.put_file(str(ONHOST / name), f"{folder}/{name}", **how)
        key = None
        if asked.api_key_file is not None:
            key = f"{folder}/key"
            host.put_file(StringIO(Path(asked.api_key_file).read_text("utf-8")), key, **how)
        config = StringIO(json.dumps(script_config(asked, key)))
        host.put_file(config, f"{folder}/config.json", **how)
        program = f"python3 {folder}/{SCRIPTS[0]}"
        ok, _ = run(
            f"{program} --config {folder}/config.json --out {folder}/evidence.json; "
            f'code=$?; [ "$code" = 3 ] && exit 0; exit "$code"'
        )
        spool = BytesIO()
        if not ok or not host.get_file(f"{folder}/evidence.json", spool, **how):
            return failed(host, "no evidence could be collected")
        judge_and_keep(asked, spool.getvalue().decode())
    except (OSError, ValueError) as error:
        return failed(host, f"no verdict: {error}")
    finally:
        run(f"rm -rf {shlex.quote(folder)}")
    return True


foreign_test(
    name="verify: does a server's KV cache survive its restart command",
    asked=from_json(Path(os.environ[ASKED_VARIABLE]).read_text("utf-8")),
)
