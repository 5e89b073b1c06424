"""pyinfra's command with less to load before it begins: `python -m deploys.start` is `pyinfra`.

Everything works without this file, and then takes longer: what is left out here does nothing in
pyinfra 3.10, what is kept comes out the same each time.
"""

import functools
import gc
import inspect
import sys
from importlib import metadata

# modules and their classes are made to stay: looking for garbage among them takes a tenth of the
# start (keep_journal() in deploys/common/journal.py ends this)
gc.set_threshold(1_000_000)
#: one look at all that is installed, not one for each of gevent's and pyinfra's questions
metadata.entry_points = metadata.entry_points().select

import pyinfra_cli  # noqa: E402  # gevent patches the standard library: before all else

# pyinfra has a class of its own in the place of paramiko's invoke, which would load asyncio,
# unittest and a YAML reader; None: there is no such module, for which paramiko is prepared
sys.modules["invoke"] = None  # type: ignore[assignment]
import paramiko  # noqa: E402

del sys.modules["invoke"]

from pyinfra.api import arguments, facts, util  # noqa: E402

assert pyinfra_cli
assert paramiko

#: the type hints of one class, asked for five times an operation and host
known = functools.cache(arguments.all_global_arguments)
arguments.all_global_arguments = facts.all_global_arguments = known
#: pyinfra orders operations by the numbers of the lines that call them, and reads no line
util.stack = functools.partial(inspect.stack, 0)
util.getframeinfo = functools.partial(inspect.getframeinfo, context=0)

from pyinfra_cli.main import main  # noqa: E402

if __name__ == "__main__":
    main()
