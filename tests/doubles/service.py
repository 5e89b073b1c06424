#!/usr/bin/env python3
"""Starts or restarts a engine_double.py and writes its record as a launcher would.

service.py start|restart runner|cache PORT STATE_DIR CACHE_PORT
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

verb, role, port, state = sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4])
cache_port = sys.argv[5]
record = state / f"{role}.json"
if verb == "restart":
    pid = json.loads(record.read_text())["pid"]
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    while Path(f"/proc/{pid}").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text():
        time.sleep(0.02)
with (state / f"{role}.log").open("ab") as log:
    script = str(Path(__file__).with_name("engine_double.py"))
    child = subprocess.Popen(
        [sys.executable, script, role, port, str(state), cache_port],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
fields = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
who = {"pid": child.pid, "start_ticks": int(fields[19])}
who["boot_id"] = Path("/proc/sys/kernel/random/boot_id").read_text().strip()  # type: ignore[assignment]
with suppress(FileNotFoundError):
    record.unlink()
record.write_text(json.dumps(who))
