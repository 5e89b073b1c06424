"""`kvhost plan`: settings, report and plan of every host; nothing is changed anywhere."""

import json
import os
import sys

from pyinfra import context

from deploys.common.prepare import known_plans, prepare
from deploys.common.refused import refused
from kvhost.plan.make import plan_to_json

if prepare() is None:
    refused(name="refused: see the plan above")
plans = known_plans()
if os.environ.get("KVHOST_PLAN_JSON") and len(plans) == len(
    context.state.inventory.get_active_hosts()
):
    sys.stdout.write(json.dumps({name: plan_to_json(p) for name, p in plans.items()}) + "\n")
