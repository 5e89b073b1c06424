#!/usr/bin/env python3
"""What a plan of the runner Ollama needs to know of a host; changes nothing. JSON.

ollama_report.py [--unit U] [--archive A --sha256 H --env DIR] [--models DIR]

Parts {"status", "why", "data"}: unit (ollama_unit.py look; without --archive), archive
({"against"}, ollama_archive.py check), models ({"blocked"}: the directory on the way to DIR that
the unit's user may not enter, null where none is).
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

sys.dont_write_bytecode = True  # bin/ stays as it was installed
if TYPE_CHECKING:
    from kvhost.onhost import ollama_archive, ollama_unit
    from kvhost.onhost.report_parts import part
else:  # it lies beside this file on a host, where there is no package kvhost
    import ollama_archive
    import ollama_unit
    from report_parts import part

Data = dict[str, Any]


def blocked(path: str, user: str) -> Data:
    """The first directory on the way to a path that the user may not enter."""
    way = [path]
    while way[-1] != "/":
        way.append(os.path.dirname(way[-1]))
    for folder in reversed(way):
        if not os.path.isdir(folder):
            break  # it is made
        ids = ["--reuid", user, "--regid", user, "--init-groups", "--inh-caps=-all"]
        done = subprocess.run(["setpriv", *ids, "test", "-x", folder], check=False)
        if done.returncode != 0:
            return {"blocked": folder, "user": user}
    return {"blocked": None, "user": user}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--unit", default=ollama_unit.UNIT)
    parser.add_argument("--archive", help="file on the host, or URL")
    parser.add_argument("--sha256")
    parser.add_argument("--env", help="directory that it is unpacked to")
    parser.add_argument("--models", help="directory that Ollama's models are to lie in")
    args = parser.parse_args()
    found: Data = {"unit": None, "archive": None, "models": None}
    if args.archive:
        check = functools.partial(ollama_archive.against, args.archive, args.sha256, args.env)
        found["archive"] = part(lambda: {"against": check()})
    else:
        found["unit"] = part(functools.partial(ollama_unit.look, args.unit))
        user = (found["unit"]["data"] or {}).get("user")
        if args.models and user:
            found["models"] = part(functools.partial(blocked, args.models, user))
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
