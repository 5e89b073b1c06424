"""`kvhost remove`: takes kvhost away. The cache and the models only when asked.

The plan comes first; the command then asks, unless -y was given. Drives are released by release.py.
"""

from deploys.common.prepare import visit
from deploys.common.refused import SEE_ABOVE, refused, unreported
from deploys.common.runlock import take_lock
from deploys.remove import lacks_note, nothing, remove, show_removal
from kvhost.commands.asking import answer

here = visit()
if here is None:
    unreported()
else:
    found = show_removal(here)
    answer(here.host, {"goes": found, "unnoted": found is False and lacks_note(here)})
    if found:
        take_lock(name="host: one run at a time", run=here)
        remove(name="remove: services, programs, configuration, keys, user", at=here)
    elif found is None:
        refused(name="remove: not kvhost's", why=SEE_ABOVE)
    else:
        nothing(name="remove: nothing goes", at=here)
