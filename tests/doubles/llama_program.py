#!/usr/bin/env python3
"""A program llama-server that computes nothing, for deploys where no real one is at hand.

As build 11434 was seen to do: /completion reuses the longest common beginning of its slot and
computes at least one token; /slots tells a slot's last task once it had one; a save writes a file,
a restore reads it. A file that is cut off ends the process, other damage is loaded without a word.
The answer is a function of the prompt. What it shows is that kvhost's own parts work together; that
llama-server does so is shown with the real one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

FLAGS = (
    "--model --alias --host --port --ctx-size --parallel --no-kv-unified --cache-ram "
    "--cache-type-k --cache-type-v --flash-attn --slot-save-path --slots --metrics --no-ui "
    "--offline"
)
BUILD = "b1-double"


class Server:
    """The slots and the counters."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.key = args, os.environ.get("LLAMA_API_KEY")
        self.slots: dict[int, list[int]] = {n: [] for n in range(args.parallel)}
        self.tasks: dict[int, int] = {}
        self.counted = dict.fromkeys(
            ("prompt_tokens", "prompt_tokens_cached", "tokens_predicted"), 0
        )
        self.lock = threading.Lock()

    def answer(self, prompt: list[int], count: int) -> list[int]:
        seed = hashlib.sha256(json.dumps(prompt).encode()).digest()
        return [32 + seed[n % 32] % 95 for n in range(count)]

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt, slot = body["prompt"], int(body.get("id_slot", 0))
        there = self.slots[slot]
        same = next(
            (n for n, (a, b) in enumerate(zip(prompt, there, strict=False)) if a != b), None
        )
        common = min(len(prompt), len(there)) if same is None else same
        cached = min(common, len(prompt) - 1)
        tokens = self.answer(prompt, int(body["n_predict"]))
        self.slots[slot] = [*prompt, *tokens[:-1]]
        self.tasks[slot] = max(self.tasks.values(), default=0) + 1
        computed = len(prompt) - cached
        for name, more in zip(self.counted, (computed, cached, len(tokens)), strict=True):
            self.counted[name] += more
        first = {"id": tokens[0], "logprob": -0.5}
        return {
            "tokens": tokens,
            "timings": {
                "prompt_n": computed, "cache_n": cached, "prompt_ms": computed * 0.5,
                "predicted_per_token_ms": 1.0,
            },
            "completion_probabilities": [{"top_logprobs": [first]}],
        }  # fmt: skip

    def act(self, slot: int, action: str, body: dict[str, Any]) -> dict[str, Any]:
        if action == "erase":
            self.slots[slot] = []
            return {"n_erased": 0}
        path = Path(self.args.slot_save_path, body["filename"])
        if action == "save":
            data = json.dumps(self.slots[slot]).encode()
            path.write_bytes(data)
            return {"n_saved": len(self.slots[slot]), "n_written": len(data)}
        data = path.read_bytes()
        if not data.endswith(b"]"):
            os.abort()  # GGML_ASSERT
        self.slots[slot] = [int(word) for word in data.strip(b"[]").split(b",") if word.strip()]
        return {"n_restored": len(self.slots[slot]), "n_read": len(data)}

    def get(self, path: str) -> tuple[int, Any]:
        if path == "/slots":
            rows = []
            for n, content in self.slots.items():
                row: dict[str, Any] = {"id": n, "is_processing": False}
                if n in self.tasks:
                    row.update(id_task=self.tasks[n], n_prompt_tokens=len(content))
                rows.append(row)
            return 200, rows
        if path == "/metrics":
            return 200, "".join(f"llamacpp:{k}_total {v}\n" for k, v in self.counted.items())
        return 200, {"build_info": BUILD}

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        where, _, action = path.partition("?action=")
        if path == "/completion":
            return 200, self.complete(body)
        return 200, self.act(int(where.rpartition("/")[2]), action, body)


def handler(server: Server) -> type:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def reply(self, status: int, body: Any) -> None:
            data = (body if isinstance(body, str) else json.dumps(body)).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def allowed(self) -> bool:
            given = self.headers.get("Authorization", "")
            return not server.key or given == f"Bearer {server.key}"

        def do_GET(self) -> None:
            if self.path == "/health":
                self.reply(200, {"status": "ok"})
            elif not self.allowed():
                self.reply(401, {"error": "Invalid API Key"})
            else:
                with server.lock:
                    self.reply(*server.get(self.path))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if not self.allowed():
                self.reply(401, {"error": "Invalid API Key"})
                return
            with server.lock:
                self.reply(*server.post(self.path, body))

    return Handler


def main() -> int:
    if "--version" in sys.argv:
        print("version: 0.0.0 (build 1, commit double)")
        return 0
    if "--help" in sys.argv:
        print(FLAGS)
        return 0
    parser = argparse.ArgumentParser()
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--parallel", type=int)
    parser.add_argument("--slot-save-path")
    args, _ = parser.parse_known_args()
    ThreadingHTTPServer((args.host, args.port), handler(Server(args))).serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main())
