"""`kvhost drift`: what of a host is not as settings, lock and receipt say; nothing is changed."""

import json
import sys

from pyinfra import host

from deploys.common.drift import find_drift
from deploys.common.journal import keep_journal
from kvhost.commands.asking import answer

keep_journal()
found = find_drift()
if not answer(host.name, found):  # started by hand
    sys.stderr.write(json.dumps({host.name: found}) + "\n")
