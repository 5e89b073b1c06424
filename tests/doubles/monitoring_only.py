"""The stages host and monitoring alone, as deploy.py calls them: no engine is needed for these."""

from deploys import host as host_stage
from deploys import monitoring
from deploys.common.prepare import prepare
from deploys.common.refused import refused
from deploys.common.runlock import take_lock

run = prepare()
if run is None:
    refused(name="refused: see the plan above")
else:
    asks = (*host_stage.asks(run), *monitoring.asks(run))
    take_lock(name="host: one run at a time", run=run, asks=asks)
    host_stage.deploy(run)
    monitoring.deploy(run)
    monitoring.clear(run)
