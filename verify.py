"""The verdict alone: `pyinfra inventory.py verify.py -y`. Nothing is installed or changed."""

from deploys import verify
from deploys.common.prepare import prepare
from deploys.common.refused import refused
from deploys.common.runlock import take_lock

run = prepare()
if run is None:
    refused(name="refused: see the plan above")
else:
    take_lock(name="host: one run at a time", run=run)
    verify.deploy(run, always=True)
