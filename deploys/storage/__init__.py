"""Stage storage: the claimed drive, mounted; given back; grown. Without a claim it does nothing."""

from __future__ import annotations

from collections.abc import Iterator

from deploys.common.context import Run
from deploys.common.looks import Ask
from deploys.storage.operations import (
    check_command,
    drive,
    grow_drive,
    nothing_here,
    release_drive,
    wipe_drive,
)

__all__ = ["deploy", "grow", "nothing_here", "release"]


def asks(run: Run) -> Iterator[Ask]:
    """What the operation of deploy() will ask."""
    if run.drive_order is not None:
        yield ("argv", *check_command(run))


def deploy(run: Run) -> None:
    if run.drive_order is not None:
        drive(name="storage: the drive", run=run)


def release(run: Run) -> None:
    release_drive(name="storage: the drive given back", run=run)
    if run.settings.drive_erase is not None:
        wipe_drive(name="storage: the drive wiped", run=run)


def grow(run: Run) -> None:
    grow_drive(name="storage: the filesystem grown", run=run)
