#!/usr/bin/env python3
"""A double of a server that kvhost did not install: replays counters that a real vLLM had.

    foreign_server.py PORT STATE_DIR EVIDENCE

EVIDENCE is recorded evidence (vLLM 0.32.0, tests/foreign_cases.py).
Its counters, answers and usages are given again, by the process's life and the requests served;
nothing is computed. On a cold and a control request it writes as many small files into
STATE_DIR/kv as were written then, and it reads them for the restored one. The start time on its
page is its own. STATE_DIR/mode.json switches single faults on.
"""

from __future__ import annotations

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from kvhost.onhost import evidence_probe as probe

STATE, RECORDED = Path(sys.argv[2]), json.loads(Path(sys.argv[3]).read_text())
ROLES = {"1.0": "cold", "1.1": "warm", "2.0": "restored", "2.1": "control"}
BORN = time.time()


def read(name: str) -> dict[str, Any]:
    path = STATE / name
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


LIFE = read("life.json").get("life", 0) + 1
(STATE / "life.json").write_text(json.dumps({"life": LIFE}))
SERVED = [0]


def metrics() -> str:
    """The page as recorded before the first request of this life, or after the last one."""
    served, life = SERVED[0], min(LIFE, 2)
    role = ROLES[f"{life}.{max(0, min(served, 2) - 1)}"]
    shot = RECORDED["requests"][role]["after" if served else "before"]
    lines = []
    for field, (name, labels) in probe.VLLM.items():
        if shot["vllm"][field] is not None:
            wanted = ",".join(f'{k}="{v}"' for k, v in {"engine": "0", **labels}.items())
            lines.append(f"{name}{{{wanted}}} {shot['vllm'][field]}")
    if "start_time" not in read("mode.json").get("without", []):
        lines.append(f"process_start_time_seconds {BORN}")
    return "\n".join(lines) + "\n"


class Handler(BaseHTTPRequestHandler):
    def reply(self, status: int, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def refused(self) -> bool:
        key = read("mode.json").get("key")
        return bool(key) and self.headers.get("Authorization") != f"Bearer {key}"

    def do_GET(self) -> None:
        mode = read("mode.json")
        if self.path == "/metrics":
            if "metrics" in mode.get("without", []):
                return self.reply(404, "no such page")
            return self.reply(200, metrics())
        if self.path == "/v1/models":
            if self.refused():
                return self.reply(401, "{}")
            found = {"id": RECORDED["config"]["model"], "max_model_len": 16384}
            return self.reply(200, json.dumps({"data": [found]}))
        return self.reply(200, json.dumps({"version": "0.32.0"}))

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        mode = read("mode.json")
        if self.refused():
            return self.reply(401, '{"error": "Unauthorized"}')
        if self.path == "/tokenize":
            if "tokenize" in mode.get("without", []):
                return self.reply(404, "{}")
            return self.reply(200, json.dumps({"tokens": list(asked["prompt"].encode())}))
        role = ROLES[f"{min(LIFE, 2)}.{min(SERVED[0], 1)}"]
        with (STATE / "asked.jsonl").open("a") as file:
            file.write(json.dumps({"role": role, **asked}) + "\n")
        if role in mode.get("fails", []):
            sent = self.headers.get("Authorization", "")
            return self.reply(500, f'{{"error": "prompt [11, 12, 13, 14, 15] of {sent} failed"}}')
        self.answer(role, RECORDED["requests"][role])
        return None

    def answer(self, role: str, recorded: dict[str, Any]) -> None:
        usage: dict[str, Any] = {"prompt_tokens": recorded["usage_prompt_tokens"]}
        usage["prompt_tokens_details"] = {"cached_tokens": recorded["usage_cached_tokens"]}
        written = (RECORDED["written"] or {"new_files": 8})["new_files"]
        folder = STATE / "kv"
        if role in ("cold", "control"):
            for number in range(written):
                (folder / f"{role}-{number}.bin").write_bytes(os.urandom(65536))
        if role == "warm" and "rewrites" in read("mode.json").get("with", []):
            for path in folder.glob("cold-*"):  # as LMCache's fs:// does
                fresh = path.with_suffix(".new")
                fresh.write_bytes(path.read_bytes())
                fresh.replace(path)
        if role == "restored" and "reads" not in read("mode.json").get("without", []):
            for path in folder.glob("cold-*"):
                path.read_bytes()
        self.send_response(200)
        self.end_headers()
        for event in (
            {"choices": [{"text": "x", "token_ids": recorded["output_tokens"]}]},
            {"choices": [], "usage": usage},
        ):
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        SERVED[0] += 1
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, format: str, *args: Any) -> None:
        print(format % args, file=sys.stderr, flush=True)


ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
