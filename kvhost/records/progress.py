"""What happens on which host right now, told by the run to the command that started it."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

#: names a file to which the run appends lines of JSON: time, host, event, text, steps
EVENTS = "KVHOST_EVENTS"


def tell(host: str, event: str, text: str = "", steps: int = 0) -> None:
    """For the command that started this run, if it asked. ``steps``: of all of this host."""
    name = os.environ.get(EVENTS)
    if name:
        row = {"time": time.time(), "host": host, "event": event, "text": text, "steps": steps}
        # it is only shown: a full disk of the controller must not stop what is done to hosts
        with suppress(OSError), Path(name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def read(file: TextIO) -> list[dict[str, Any]]:
    """The events that came since the last time. A line that is still written waits for the next."""
    found: list[dict[str, Any]] = []
    while True:
        at = file.tell()
        line = file.readline()
        if not line.endswith("\n"):
            file.seek(at)
            return found
        with suppress(ValueError):  # cut off by a full disk
            found.append(json.loads(line))
