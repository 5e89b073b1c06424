"""The verdict alone: `pyinfra inventory.py verify.py -y`. Nothing is installed or changed."""

from deploys import ollama, verify
from deploys.common.prepare import prepare
from deploys.common.refused import NOT_PROVISIONED, SEE_ABOVE, refused
from deploys.common.runlock import take_lock

run = prepare(only_refusals=True)
if run is None:
    refused(name="refused: see above", why=SEE_ABOVE)
elif run.report.kvhost.data is None or run.report.kvhost.data.receipt.data is None:
    refused(name="not provisioned", why=NOT_PROVISIONED)
else:
    take_lock(name="host: one run at a time", run=run)
    if run.settings.runner == "ollama":
        ollama.verdict(run, always=True)
    else:
        verify.deploy(run, always=True)
