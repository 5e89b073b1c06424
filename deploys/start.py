"""pyinfra's command with less to load before it begins: `python -m deploys.start` is `pyinfra`.

What is left out does nothing in it: pyinfra puts a class of its own in the place of paramiko's
`invoke`, which would load asyncio, unittest and a YAML reader. Everything works without this file.
"""

import gc
import sys
from importlib import metadata

# modules and their classes are made to stay: looking for garbage among them takes a tenth of the
# start (keep_journal() in deploys/common/journal.py ends this)
gc.set_threshold(1_000_000)
#: one look at all that is installed, not one for each of gevent's and pyinfra's questions
metadata.entry_points = metadata.entry_points().select
sys.modules["invoke"] = None  # type: ignore[assignment]  # "there is none", which paramiko expects

import paramiko  # noqa: E402

del sys.modules["invoke"]

from pyinfra_cli.main import main  # noqa: E402

assert paramiko  # loaded before all that would ask it for invoke

if __name__ == "__main__":
    main()
