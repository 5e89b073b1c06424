"""Stage runner: the services' descriptions, their supervisor, and that they have answered."""

from __future__ import annotations

from collections.abc import Iterator

from deploys.common.context import Run
from deploys.common.looks import Ask
from deploys.common.operations import no_file, secret_file
from deploys.common.ready import ready_commands
from deploys.runner.operations import (
    proof_path,
    receipt,
    service_file_paths,
    service_files,
    services_answer,
    services_command,
    supervisor_takes_it,
)
from kvhost.services.served import api_key_path


def check_asks(run: Run) -> Iterator[Ask]:
    """What the operation of check() will ask."""
    if not run.systemd:
        yield ("file", f"{run.paths.etc}/supervisord.conf")


def asks(run: Run) -> Iterator[Ask]:
    """What the operations of deploy() will ask."""
    yield ("file", api_key_path(run.paths))
    for path in service_file_paths(run):
        yield ("file", path)
    yield ("argv", *services_command(run, "--json", "status"))
    for command in ready_commands(run, "--once"):
        yield ("argv", *command)
    if run.drive_order is not None:
        yield ("text", run.paths.drive)
    yield ("text", proof_path(run))
    yield ("file", run.paths.receipt)


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
        no_file(name="runner: no API key", path=api_key_path(run.paths))
    service_files(name="runner: descriptions of the services", run=run)
    services_answer(name="runner: services run and have answered", run=run)
    receipt(name="runner: receipt", run=run)
