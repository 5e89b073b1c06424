#!/usr/bin/env python3
"""Waits until the driver lists the GPUs that the engine needs.

gpu_gate.py --expect N [--uuid GPU-… …] [--wait S]

Run before vLLM starts, as its user. After a boot the driver may still be loading, or a card may not
come up; vLLM would then end with a long trace, or start on fewer. Bounded: what is missing at the
end is said in one line. A nvidia-smi that does not answer is asked again until the time is over.
Exit: 0 there are enough, 1 there are not.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time

ASK_LIMIT_S = 20  # with persistence off every card is started first
PAUSE_S = 1.0


def gpus() -> tuple[list[str], str]:
    """(a line of nvidia-smi for each GPU, why there is none)."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "-L"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, timeout=ASK_LIMIT_S, check=False,
        )  # fmt: skip
    except FileNotFoundError:
        return [], "there is no nvidia-smi"
    except (OSError, subprocess.SubprocessError) as why:
        return [], f"nvidia-smi: {why}"
    text = done.stdout.decode(errors="replace")
    # a card that fell off the bus is a line "Unable to determine the device handle for GPU0"
    found = re.findall(r"(?m)^GPU \d+: .*$", text)
    said = " ".join(text.split())[:300]
    if done.returncode != 0:
        return [], f"nvidia-smi ends with {done.returncode}: {said}"
    return found, said or "nvidia-smi lists none"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--expect", type=int, required=True, help="number of GPUs, at least")
    parser.add_argument("--uuid", action="append", default=[], help="one that must be among them")
    parser.add_argument("--wait", type=float, default=120, help="seconds (120)")
    args = parser.parse_args()
    deadline = time.monotonic() + args.wait
    told = None
    while True:
        found, why = gpus()
        missing = [uuid for uuid in args.uuid if not any(f"UUID: {uuid}" in row for row in found)]
        if len(found) >= args.expect and not missing:
            print(f"{len(found)} GPUs are ready", file=sys.stderr)
            return 0
        now = f"{len(found)} of {args.expect} GPUs are ready: {why}"
        if missing:
            now = f"{', '.join(missing)} not among them: {now}"
        if time.monotonic() >= deadline:
            print(f"after {args.wait:.0f} s {now}", file=sys.stderr)
            return 1
        if now != told:
            print(f"waiting: {now}", file=sys.stderr, flush=True)
            told = now
        time.sleep(min(PAUSE_S, max(0.0, deadline - time.monotonic())))


if __name__ == "__main__":
    sys.exit(main())
