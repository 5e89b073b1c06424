"""Stage monitoring: the collector of figures for Prometheus, where it is wanted; else none."""

from __future__ import annotations

from collections.abc import Iterator

from deploys.common.context import Run
from deploys.common.looks import Ask
from deploys.monitoring.operations import ACTIVE, PLACE, collector, writable
from kvhost.monitoring import textfile


def asks(run: Run) -> Iterator[Ask]:
    """What the operation of deploy() will ask."""
    yield ("text", PLACE)
    if not run.settings.monitoring:
        yield ("text", textfile(run.settings))
        return
    yield ("file", run.settings.monitoring_textfile_dir)
    if run.systemd:
        yield ("file", PLACE)
        yield ("argv", *ACTIVE)
    else:
        yield ("argv", *writable(run))


def deploy(run: Run) -> None:
    wanted = run.settings.monitoring
    name = "monitoring: figures for Prometheus" if wanted else "monitoring: not wanted"
    collector(name=name, run=run)
