#!/usr/bin/env python3
"""Whether Ollama answers: ollama_ready.py --url URL [--once | --timeout S] [--main PID]

Ready means that /api/version answers; no model is loaded. `--once` asks a single time and prints
JSON, {"ready", "version", "why"}. Exit: 0 ready, 1 not.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any

sys.dont_write_bytecode = True  # bin/ stays as it was installed
if TYPE_CHECKING:
    from kvhost.onhost.ollama_look import Unusable, api
else:  # it lies beside this file on a host, where there is no package kvhost
    from ollama_look import Unusable, api


def asked(url: str) -> dict[str, Any]:
    """{"ready", "version", "why"}."""
    try:
        return {"ready": True, "version": api(url)["version"], "why": None}
    except (Unusable, KeyError) as error:
        return {"ready": False, "version": None, "why": str(error)}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--url", required=True)
    parser.add_argument("--once", action="store_true", help="ask once, print JSON")
    parser.add_argument("--timeout", type=float, default=60)
    parser.add_argument("--main", type=int, help="end with this process, for systemd")
    args = parser.parse_args()
    if args.once:
        print(json.dumps(asked(args.url)))
        return 0
    deadline = time.monotonic() + args.timeout
    while (why := asked(args.url)["why"]) is not None:
        if args.main is not None and not os.path.exists(f"/proc/{args.main}"):
            why, deadline = f"process {args.main} has ended", 0
        if time.monotonic() > deadline:
            print(f"not ready: {why}", file=sys.stderr)
            return 1
        time.sleep(0.3)
    return 0


if __name__ == "__main__":
    sys.exit(main())
