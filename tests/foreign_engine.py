"""A vLLM of the tests' own, started with no help of kvhost, as a server that others installed.

    python -m tests.foreign_engine start|stop|restart DIR

The last one is what the tests give as restart command. DIR holds serve.json {"argv", "env", "url"},
the log, and pid, the leader of a session of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "LMCACHE_TRACK_USAGE": "false",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
}


def members(session: int) -> list[int]:
    """Processes of a session that still live."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if fields[0] not in "ZX" and int(fields[3]) == session:
                found.append(int(path.parent.name))
    return found


def start(folder: Path) -> None:
    config: dict[str, Any] = json.loads((folder / "serve.json").read_text())
    with (folder / "log").open("ab") as log:
        child = subprocess.Popen(
            config["argv"],
            env={**os.environ, **ENV, **config["env"]},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    (folder / "pid").write_text(str(child.pid))


def stop(folder: Path) -> None:
    """Ends the whole session: first asked, after 20 s killed."""
    path = folder / "pid"
    session = int(path.read_text()) if path.exists() else 0
    deadline = time.monotonic() + 20
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in members(session) if session else []:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        while members(session) and time.monotonic() < deadline:
            time.sleep(0.1)
        deadline += 10
    path.unlink(missing_ok=True)


def wait(folder: Path, seconds: float = 240) -> None:
    url = json.loads((folder / "serve.json").read_text())["url"]
    deadline = time.monotonic() + seconds
    while True:
        try:
            urllib.request.urlopen(url + "/health", timeout=5)
            return
        except OSError as error:
            pid = int((folder / "pid").read_text())
            if time.monotonic() > deadline or not members(pid):
                log = (folder / "log").read_text(errors="replace")[-3000:]
                raise SystemExit(f"vLLM did not start: {error}\n{log}") from error
        time.sleep(0.5)


def main() -> None:
    what, folder = sys.argv[1], Path(sys.argv[2])
    if what in ("stop", "restart"):
        stop(folder)
    if what in ("start", "restart"):
        start(folder)
    if what == "start":
        wait(folder)


if __name__ == "__main__":
    main()
