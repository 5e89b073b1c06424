"""The GPU's driver alone: `pyinfra inventory.py driver.py --data driver_install=true`.

It is what deploy.py does before the engine (deploys/driver): nothing where the driver is good.
"""

from deploys import driver
from deploys import host as host_stage
from deploys.common.prepare import prepare
from deploys.common.refused import refused
from deploys.common.runlock import take_lock
from deploys.common.testing import die_at_step

run = prepare(stages=frozenset({"host", "accelerator"}))
die_at_step()
if run is None:
    refused(name="refused: see the plan above")
else:
    take_lock(name="host: one run at a time", run=run, asks=tuple(host_stage.asks(run)))
    host_stage.deploy(run)
    driver.deploy(run)
