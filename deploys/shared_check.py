"""`kvhost shared --check A B`: one of its two steps on one host. No service is restarted."""

import json
from io import StringIO
from typing import Any

from pyinfra.api import FunctionCommand, operation

from deploys.common.care import ask_host
from deploys.common.context import Run
from deploys.common.operations import Commands, connector_arguments
from deploys.common.prepare import prepare
from deploys.common.reasons import failed
from deploys.common.refused import NOT_PROVISIONED, SEE_ABOVE, refused
from deploys.common.rendered import look
from deploys.common.runlock import take_lock
from deploys.verify.operations import evidence_config
from kvhost.commands.asking import answer, question
from kvhost.services import shared


@operation(is_idempotent=False)
def step(run: Run) -> Commands:
    """Carries the step out and tells the command.

    + run: the run of this host
    """
    settings, paths = run.settings, run.paths

    def act(state: Any, host: Any) -> bool:
        late = look(run)
        if late.resolved is None:
            return failed(host, f"not provisioned: {late.why}")
        namespace = late.namespace_dir(run).rpartition("/")[2]
        store = {"place": shared.place(settings, paths), "namespace": namespace,
                 "password_file": shared.password_path(paths)}  # fmt: skip
        told = {**evidence_config(run, late), **question(), "store": store, "pause": None}
        config = f"{paths.state}/shared-check.json"
        host.put_file(StringIO(json.dumps(told)), config, **connector_arguments())
        found = ask_host(host, ("python3", run.script("shared_check"), "--config", config))
        return found is not None and (answer(run.host, found) or True)

    yield FunctionCommand(act, (), {})


run = prepare(only_refusals=True)
if run is None:
    refused(name="refused: see above", why=SEE_ABOVE)
elif run.report.kvhost.data is None or run.report.kvhost.data.receipt.data is None:
    refused(name="not provisioned", why=NOT_PROVISIONED)
elif run.settings.shared_tier is None:
    why = "this host uses no shared tier: set shared_tier, then kvhost up"
    refused(name="shared: no tier", why=why)
else:
    take_lock(name="host: one run at a time", run=run)
    step(name=f"shared: {question().get('step', 'nothing')}", run=run)
