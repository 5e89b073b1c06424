"""Has the drive's filesystem use a disk that became larger: `pyinfra inventory.py grow.py`."""

from deploys import host as host_stage
from deploys import storage
from deploys.common.prepare import prepare
from deploys.common.refused import refused
from deploys.common.runlock import take_lock

run = prepare(stages=frozenset({"host", "storage"}))
if run is None:
    refused(name="refused: see the plan above")
elif run.bare:
    storage.nothing_here(name="storage: no run was ever here, nothing is grown")
else:
    take_lock(name="host: one run at a time", run=run, asks=tuple(host_stage.asks(run)))
    host_stage.deploy(run)
    storage.grow(run)
