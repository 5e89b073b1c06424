"""The store of the tier that hosts share: `kvhost shared`, or `pyinfra inventory.py shared.py`.

On the hosts that have a shared_store_address; on the others nothing is done. No engine is
installed. Hosts use the store by the setting shared_tier (deploy.py).
"""

from pyinfra.api.exceptions import PyinfraError

from deploys import shared
from deploys.common.prepare import show, visit
from deploys.common.refused import refused, unreported
from deploys.common.runlock import take_lock
from deploys.common.store import look, secrets_of, store_of
from kvhost.plan.stopped import controller_refused, plan_failed
from kvhost.plan.types import Action, Plan, unreadable
from kvhost.report import ReportError
from kvhost.schema.shared_values import is_s3
from kvhost.secrets import SecretError
from kvhost.services.store import store_notes, store_refusals

here = visit()
if here is None:
    unreported()
elif here.settings.shared_store_address is None:
    show(Plan((), (), ()))
    why = "no shared_store_address, no store here"
    if is_s3(here.settings.shared_tier):
        why += ": kvhost makes Redis or Valkey, and no S3 store or bucket"
    shared.no_store(name=f"shared: {why}")
else:
    settings = here.settings
    try:
        secrets = secrets_of(settings)
        found = look(settings)
        refusals = tuple(store_refusals(settings, found, secrets.password))
        store = store_of(here, found, secrets)
    except SecretError as error:
        found, refusals = {}, controller_refused(str(error)).refusals  # of this host alone
    except ReportError as error:
        found, refusals = {}, (unreadable("cache", "what a store needs", str(error)),)
    except PyinfraError:
        raise  # pyinfra's own way to end a host, or the run
    except Exception as error:  # whatever is odd about one host: the others go on
        found, refusals = {}, plan_failed(error).refusals
    what = f"the store on {settings.shared_store_address}:{settings.shared_store_port}"
    step = Action("cache", what, "unknown" if found.get("there") else "change")
    show(Plan((step,), refusals, () if refusals else tuple(store_notes(settings))))
    if refusals:
        refused(name="refused: see the plan above")
    else:
        take_lock(name="host: one run at a time", run=here, asks=tuple(shared.asks(store)))
        shared.deploy(store)
