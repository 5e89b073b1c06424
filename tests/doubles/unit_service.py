#!/usr/bin/env python3
"""In the place of a service under a real systemd: unit_service.py ROLE PORT…

cache PORT HTTP_PORT    listens on the one, is healthy on the other
runner API_PORT         is healthy, and answers a request with the right key only
pruner                  does nothing

What is written into HOME/ROLE.do changes it: "die" ends it with 3 at its start, "deaf" leaves it
without an answer, "slow" lets an answer take 5 s. It says in HOME/ROLE.saw what its sandbox lets it
do.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ROLE, PORTS = sys.argv[1], [int(word) for word in sys.argv[2:]]
HOME = Path(os.environ["HOME"])
KEY = os.environ.get("VLLM_API_KEY", "")


def told() -> str:
    with contextlib.suppress(FileNotFoundError):
        return (HOME / f"{ROLE}.do").read_text()
    return ""


def may(action: str, path: str) -> bool:
    try:
        if action == "write":
            place = Path(path, f".kvhost-probe-{os.getpid()}")
            place.write_text("")
            place.unlink()
        else:
            Path(path).read_bytes() if Path(path).is_file() else list(Path(path).iterdir())
    except OSError:
        return False
    return True


def saw() -> dict[str, object]:
    places = ("/etc", "/usr", "/var/lib", "/tmp", "/dev/shm", "/run", str(HOME))
    capabilities = [
        line.split()[1] for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith(("CapBnd", "NoNewPrivs"))
    ]  # fmt: skip
    # there is none in a bare container
    asks = ["sudo", "-n", "true"] if shutil.which("sudo") else ["false"]
    sudo = subprocess.run(asks, capture_output=True, check=False)
    return {
        "writes": [place for place in places if may("write", place)],
        "reads": [p for p in ("/home/deploy", "/root", "/etc/shadow", "/dev/kmsg") if may("r", p)],
        "limits": capabilities,
        "sudo": sudo.returncode == 0,
        "tmp": sorted(path.name for path in Path("/tmp").iterdir()),
        "nofile": os.sysconf("SC_OPEN_MAX"),
    }


class Answer(BaseHTTPRequestHandler):
    def reply(self, code: int, data: object) -> None:
        body = json.dumps(data).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        if "deaf" in told():
            time.sleep(30)
        self.reply(200, {"registered_gpu_ids": [0]} if self.path == "/status" else {})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if "slow" in told():
            time.sleep(5)
        good = not KEY or self.headers.get("Authorization") == f"Bearer {KEY}"
        self.reply(200 if good else 401, {})

    def log_message(self, *_: object) -> None:
        pass


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    (HOME / f"{ROLE}.saw").write_text(json.dumps(saw()))
    print(f"double of {ROLE} starts", flush=True)
    if "die" in told():
        print("told to die", flush=True)
        sys.exit(3)
    servers = [ThreadingHTTPServer(("127.0.0.1", port), Answer) for port in PORTS[-1:]]
    listeners = [socket.create_server(("127.0.0.1", port)) for port in PORTS[:-1]]
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    while True:
        signal.pause()
    del listeners


if __name__ == "__main__":
    main()
