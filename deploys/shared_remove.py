"""`kvhost shared --remove`: a host's store is taken away. What it held is lost; packages stay."""

from deploys import shared
from deploys.common.prepare import visit
from deploys.common.refused import unreported
from deploys.common.runlock import take_lock
from deploys.common.store import answer
from kvhost.report import ReportError

here = visit()
if here is None:
    unreported()
else:
    try:
        there = answer(("look", "--base", here.paths.base_dir, "--address", "127.0.0.1",
                        "--port", "6379"))["there"]  # fmt: skip
    except ReportError:
        there = True  # the removal itself says what is wrong
    if there:
        take_lock(name="host: one run at a time", run=here)
        shared.remove(here)
    else:
        shared.no_store(name="shared: no store of kvhost's is here")
