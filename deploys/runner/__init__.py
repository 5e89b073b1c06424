"""Stage runner: the services' descriptions, their supervisor, and that they have answered."""

from __future__ import annotations

from pyinfra.operations import files

from deploys.common.context import Run
from deploys.common.operations import secret_file
from deploys.runner.operations import (
    receipt,
    service_files,
    services_answer,
    supervisor_takes_it,
)
from kvhost.services import api_key_path


def check(run: Run) -> None:
    """Before anything in use is touched: does the installed supervisord take its configuration?"""
    supervisor_takes_it(name="runner: what supervisord makes of its configuration", run=run)


def deploy(run: Run) -> None:
    if run.api_key is not None:
        secret_file(
            name="runner: API key",
            path=api_key_path(run.paths),
            secret=run.api_key,
            # systemd, as root, hands it to the one service that needs it
            user="root" if run.systemd else run.user,
        )
    else:
        files.file(name="runner: no API key", path=api_key_path(run.paths), present=False)
    service_files(name="runner: descriptions of the services", run=run)
    services_answer(name="runner: services run and have answered", run=run)
    receipt(name="runner: receipt", run=run)
