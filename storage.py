"""The claimed drive alone: `pyinfra inventory.py storage.py`. No engine is installed."""

from deploys import host as host_stage
from deploys import storage
from deploys.common.prepare import prepare
from deploys.common.refused import refused
from deploys.common.runlock import take_lock

run = prepare(stages=frozenset({"host", "storage"}))
if run is None:
    refused(name="refused: see the plan above")
elif run.drive_order is None:
    why = "no drive is claimed: set drive_serial or another drive_ setting of this host"
    refused(name="storage: the drive", why=why)
else:
    asks = (*host_stage.asks(run), *storage.asks(run))
    take_lock(name="host: one run at a time", run=run, asks=asks)
    host_stage.deploy(run)
    storage.deploy(run)
