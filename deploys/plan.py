"""`kvhost plan`: settings, report and plan of every host; nothing is changed anywhere."""

from pyinfra import host

from deploys.common.prepare import known_plans, prepare
from deploys.common.refused import refused
from kvhost.commands.asking import answer
from kvhost.plan.make import plan_to_json

if prepare() is None:
    refused(name="refused: see the plan above")
answer(host.name, {"plan": plan_to_json(known_plans()[host.name])})
