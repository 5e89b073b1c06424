"""Gives the drive back: `pyinfra inventory.py release.py`. Its data stay on it.

Services stop, the drive is unmounted and its line taken out of fstab. With a `drive_erase` that is
the token which this prints, the drive is wiped as well.
"""

from deploys import host as host_stage
from deploys import storage
from deploys.common.prepare import prepare
from deploys.common.refused import refused
from deploys.common.runlock import take_lock

run = prepare(stages=frozenset({"host"}))
if run is None:
    refused(name="refused: see the plan above")
elif run.bare and run.settings.drive_erase is None:
    storage.nothing_here(name="storage: no run was ever here, nothing is given back")
else:
    take_lock(name="host: one run at a time", run=run, asks=tuple(host_stage.asks(run)))
    host_stage.deploy(run)
    storage.release(run)
