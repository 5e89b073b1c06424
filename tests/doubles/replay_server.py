#!/usr/bin/env python3
"""A double of the runner and of the cache server: replays replies that the real ones gave.

    replay_server.py runner|cache PORT STATE_DIR

The replies are in tests/fixtures/replay/recording.json (vLLM 0.32.0 and lmcache 0.5.6 on CPU, a
prompt of 2,056 tokens; metrics that evidence.py does not read were left out): metrics pages by
"LIFE.SERVED" (process before or after the restart, requests served since) and the streamed answers
by role. It computes nothing. On a cold and a control request it writes as many small files into
STATE_DIR/kv as the cache server wrote. STATE_DIR/mode.json switches single faults on.
"""

from __future__ import annotations

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

RECORDING = Path(__file__).parents[1] / "fixtures" / "replay" / "recording.json"
ROLES = {"1.0": "cold", "1.1": "warm", "2.0": "restored", "2.1": "control"}
ROLE, STATE = sys.argv[1], Path(sys.argv[3])
REPLIES: dict[str, Any] = json.loads(RECORDING.read_text())


def read(name: str) -> dict[str, Any]:
    path = STATE / name
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def where() -> str:
    place = read("place.json")
    return f"{place['life']}.{place['served']}"


def move(**changes: int) -> None:
    new = STATE / "place.json.new"
    new.write_text(json.dumps({**read("place.json"), **changes}))
    new.replace(STATE / "place.json")


class Handler(BaseHTTPRequestHandler):
    def reply(self, status: int, text: str, kind: str = "text/plain") -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        mode = read("mode.json")
        if self.path == "/metrics":
            if ROLE in mode.get("no_metrics", []):
                return self.reply(404, "no such page")
            page = REPLIES["pages"][ROLE][where()]
            for old, new in mode.get("metrics", {}).items():
                page = page.replace(old, new)
            return self.reply(200, page)
        if self.path == "/version":
            return self.reply(200, REPLIES["texts"][ROLE])
        return self.reply(200, "{}")  # /health, /healthcheck

    def do_POST(self) -> None:
        mode, place = read("mode.json"), where()
        role = ROLES[place]
        json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        fault = mode.get("fault", {}).get(role)
        if mode.get("key") and self.headers.get("Authorization") != "Bearer " + mode["key"]:
            return self.reply(401, '{"error": "Unauthorized"}')
        if fault == "500":
            return self.reply(500, '{"error": "prompt [11, 12, 13, 14, 15] failed"}')
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for line in REPLIES["streams"][role]:
            self.wfile.write(line.encode())
            self.wfile.flush()
            if fault == "hang":
                time.sleep(60)
            if fault == "cut":
                return None
            if fault == "late":  # its KV is written although nobody reads the answer any more
                time.sleep(1.5)
                break
        if role in ("cold", "control"):
            for number in range(mode.get("files", 8)):
                (STATE / "kv" / f"{role}-{number}.data").write_bytes(os.urandom(8192))
        move(served=int(place[2:]) + 1)
        return None

    def log_message(self, format: str, *args: Any) -> None:
        print(format % args, file=sys.stderr, flush=True)


if ROLE == "runner":
    move(life=read("place.json").get("life", 0) + 1, served=0)
ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), Handler).serve_forever()
