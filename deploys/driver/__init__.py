"""Stage driver: the GPU's driver, installed where the settings allow it, and a reboot for it."""

from __future__ import annotations

from deploys.common.context import Run
from deploys.driver.operations import driver


def deploy(run: Run) -> None:
    if run.settings.driver_install and run.lock.cuda is not None:
        driver(name="driver: installed, held and loaded", run=run)
