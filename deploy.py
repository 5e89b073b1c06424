"""The whole run: `pyinfra inventory.py deploy.py`. Every stage says "no change" the second time."""

from deploys import cache, driver, engine, model, monitoring, ollama, runner, storage, verify
from deploys import host as host_stage
from deploys.common.back import finish_way_back
from deploys.common.prepare import prepare
from deploys.common.refused import refused
from deploys.common.runlock import take_lock
from deploys.common.testing import die_at_step

run = prepare()
die_at_step()
if run is None:
    refused(name="refused: see the plan above")
elif run.settings.runner == "ollama":  # neither an engine of Python's nor a tier
    asks = (*host_stage.asks(run), *storage.asks(run), *ollama.asks(run), *monitoring.asks(run))
    take_lock(name="host: one run at a time", run=run, asks=asks)
    host_stage.deploy(run)
    storage.deploy(run)
    ollama.deploy(run)
    monitoring.clear(run)
else:
    asks = (
        *host_stage.asks(run),
        *storage.asks(run),
        *engine.asks(run),
        *model.asks(run),
        *cache.check_asks(run),
        *runner.check_asks(run),
        *engine.switch_asks(run),
        *cache.asks(run),
        *monitoring.asks(run),
        *runner.asks(run),
        *verify.asks(run),
    )
    take_lock(name="host: one run at a time", run=run, asks=asks)
    finish_way_back(name="host: a way back that was broken off", run=run)
    host_stage.deploy(run)
    storage.deploy(run)
    driver.deploy(run)
    engine.deploy(run)
    model.deploy(run)
    cache.check(run)
    runner.check(run)
    engine.switch(run)
    cache.deploy(run)
    ollama.leave(run)
    monitoring.deploy(run)
    runner.deploy(run)
    monitoring.clear(run)
    verify.deploy(run)
