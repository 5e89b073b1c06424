"""Stage monitoring: the collector of figures for Prometheus, where it is wanted; else none."""

from __future__ import annotations

from collections.abc import Iterator

from deploys.common.context import Run
from deploys.common.looks import Ask
from deploys.monitoring.operations import ACTIVE, PLACE, collector, no_collector, writable
from kvhost.services.monitoring import textfile


def asks(run: Run) -> Iterator[Ask]:
    """What the operation of deploy() will ask."""
    if not run.settings.monitoring:
        yield ("text", PLACE)
        yield ("text", textfile(run.settings))
        return
    yield ("file", run.settings.monitoring_textfile_dir)
    if run.systemd:
        yield ("text", PLACE)
        yield ("file", PLACE)
        yield ("argv", *ACTIVE)
    else:
        yield ("argv", *writable(run))


def deploy(run: Run) -> None:
    """Before the stage runner: supervisord starts the program there, which needs its directory."""
    if run.settings.monitoring:
        collector(name="monitoring: figures for Prometheus", run=run)


def clear(run: Run) -> None:
    """After it: supervisord has ended the program, which would write its file again."""
    if not run.settings.monitoring:
        no_collector(name="monitoring: not wanted", run=run)
