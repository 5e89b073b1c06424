#!/usr/bin/env python3
"""A double of the runner and of the cache server: a small model of where KV lies, no engine.

    engine_double.py runner|cache PORT STATE_DIR CACHE_PORT

The runner keeps blocks of 128 tokens in a memory of its own (least recently used first out), asks
the cache server for whole chunks of 256, and answers with token ids that are a digest of the KV it
used. The cache server has an L1 in memory and an L2 of one file a chunk in STATE_DIR/kv. Both serve
metrics pages with the names, labels and habits of vLLM 0.32.0 and lmcache 0.5.6 (recorded in
tests/fixtures/replay/recording.json): the cache server's counters appear with the first look-up.
STATE_DIR/mode.json switches single faults on.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
import time
import urllib.request
from collections import OrderedDict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

CHUNK, BLOCK, FILE_BYTES = 256, 128, 8192
ROLE, PORT, STATE, CACHE_PORT = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
LOCK = threading.Lock()
Json = dict[str, Any]


def read(name: str) -> Json:
    path = STATE / name
    found: Json = json.loads(path.read_text()) if path.exists() else {}
    return found


def digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def keys_of(tokens: list[int], size: int, salt: str) -> list[str]:
    """A key for each whole piece of ``size`` tokens: of it and all before it."""
    keys, last = [], salt
    for start in range(0, len(tokens) - len(tokens) % size, size):
        last = digest(last, tokens[start : start + size])
        keys.append(last)
    return keys


class Cache:
    """L1 and L2; a KV of a chunk is a digest of the tokens up to its end, as text."""

    def __init__(self) -> None:
        self.l1: dict[str, str] = {}
        self.counts: dict[str, float] = {}
        self.pending: list[tuple[str, str]] = []
        threading.Thread(target=self.write, daemon=True).start()

    def folder(self) -> Path:
        return STATE / str(read("mode.json").get("l2", "kv"))

    def find(self, key: str, mode: Json) -> str | None:
        places = [self.folder()]
        if mode.get("reads_other_namespaces"):
            places += [path for path in sorted(STATE.glob("ns-*")) if path.is_dir()]
        for place in places:
            path = place / f"{key}.data"
            if path.exists() and mode.get("l2") != "":
                return path.read_bytes()[:64].decode(errors="replace")
        return None

    def lookup(self, keys: list[str]) -> list[str]:
        mode, found, tiers = read("mode.json"), [], {"l1": 0, "l2": 0}
        for key in keys:
            tier, kv = ("l1", self.l1.get(key))
            if kv is None:
                tier, kv = "l2", self.find(key, mode)
            if kv is None:
                break
            tiers[tier] += CHUNK
            found.append(kv)
        for kv, key in zip(found, keys, strict=False):
            self.l1[key] = kv
        if mode.get("forgets"):  # an index in memory only
            found, tiers = [], {"l1": 0, "l2": 0}
        for name, amount in (
            ("lmcache_mp_lookups_requests_total", 1),
            ("lmcache_mp_lookup_requested_tokens_total", len(keys) * CHUNK),
            ("lmcache_mp_lookup_hit_tokens_total", len(found) * CHUNK),
            ("lmcache_mp_lookup_hit_l1_tokens_total", tiers["l1"]),
            ("lmcache_mp_lookup_hit_l2_tokens_total", tiers["l2"]),
            ("lmcache_mp_l2_load_completed_requests_total", int(tiers["l2"] > 0)),
        ):
            self.counts[name] = self.counts.get(name, 0) + amount
        return found

    def store(self, pairs: list[tuple[str, str]]) -> None:
        self.l1.update(pairs)
        self.pending += pairs

    def write(self) -> None:
        while True:
            if not self.pending:
                time.sleep(0.01)
                continue
            mode = read("mode.json")
            # all that a request stored appear as good as together, or one after the other
            batch = [self.pending.pop(0) for _ in self.pending[:]] if mode.get("at_once") else []
            done = []
            for key, kv in batch or [self.pending.pop(0)]:
                path = self.folder() / f"{key}.data"
                if mode.get("l2") == "" or path.exists():
                    continue
                time.sleep(mode.get("write_delay", 0))
                path.parent.mkdir(exist_ok=True)
                path.with_suffix(".tmp").write_bytes((kv * (FILE_BYTES // 64)).encode())
                done.append(path)
            for path in done:
                path.with_suffix(".tmp").replace(path)

    def page(self) -> str:
        active = 0 if read("mode.json").get("l2") == "" else 1
        lines = [f'lmcache_mp_l2_prefetch_adapters{{state="active"}} {active}.0']
        lines += [f'{name}{{model_name="m"}} {value}' for name, value in self.counts.items()]
        return "\n".join(lines) + "\n"


class Runner:
    """An engine with a memory of its own."""

    def __init__(self) -> None:
        self.memory: OrderedDict[str, str] = OrderedDict()
        self.blocks = 64
        self.hits = {"prefix": 0, "queries": 0, "external": 0, "computed": 0}
        self.finished = 0

    def ask(self, path: str, body: object) -> Any:
        url = f"http://127.0.0.1:{CACHE_PORT}{path}"
        request = urllib.request.Request(url, json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=10) as reply:
            return json.load(reply)

    def remember(self, keys: list[str], kvs: list[str]) -> None:
        for key, kv in zip(keys, kvs, strict=False):
            self.memory[key] = kv
            self.memory.move_to_end(key)
        while len(self.memory) > self.blocks:
            self.memory.popitem(last=False)

    def generate(self, tokens: list[int], salt: str, count: int) -> tuple[list[int], int]:
        """(token ids of the answer, cached tokens)."""
        mode = read("mode.json")
        blocks, chunks = keys_of(tokens, BLOCK, salt), keys_of(tokens, CHUNK, salt)
        own: list[str] = []
        for key in blocks:
            if key not in self.memory:
                break
            own.append(self.memory[key])
        found: list[str] = []
        if chunks and not mode.get("no_connector"):
            found = self.ask("/double/lookup", chunks)
            self.hits["queries"] += len(tokens) - len(own) * BLOCK
        external = max(0, len(found) * CHUNK - len(own) * BLOCK)
        if mode.get("load_fails"):
            external, found = 0, []
        # the KV of a block: of the engine's memory, of the chunk that was loaded, or computed
        per, kvs = CHUNK // BLOCK, []
        computed = [key for key in keys_of(tokens, CHUNK, "") for _ in range(per)]
        computed += keys_of(tokens, BLOCK, "")[len(computed) :]
        for index in range(len(blocks)):
            if index < len(own):
                kvs.append(own[index])
            elif index // per < len(found):
                kvs.append(found[index // per])
            else:
                kvs.append(computed[index])
        self.hits["prefix"] += len(own) * BLOCK
        self.hits["external"] += external
        cached = len(own) * BLOCK + external
        self.hits["computed"] += len(tokens) - cached
        self.remember(blocks, kvs)
        if chunks and not mode.get("no_connector"):
            pairs = [(key, kvs[i * per]) for i, key in enumerate(chunks)]
            self.ask("/double/store", pairs)
        seed = digest(kvs, tokens[len(blocks) * BLOCK :], mode.get("weights", 0))
        self.finished += 1
        return [int(digest(seed, n)[:8], 16) % 4000 for n in range(count)], cached

    def page(self) -> str:
        e = 'engine="0",model_name="tiny"'
        source, done = "vllm:prompt_tokens_by_source_total", "vllm:request_success_total"
        hits = self.hits
        return f"""vllm:cache_config_info{{block_size="{BLOCK}",num_gpu_blocks="{self.blocks}"}} 1.0
vllm:num_requests_running{{{e}}} 0.0
vllm:num_requests_waiting{{{e}}} 0.0
vllm:prefix_cache_hits_total{{{e}}} {hits["prefix"]}.0
vllm:external_prefix_cache_queries_total{{{e}}} {hits["queries"]}.0
vllm:external_prefix_cache_hits_total{{{e}}} {hits["external"]}.0
{source}{{{e},source="local_compute"}} {hits["computed"]}.0
{source}{{{e},source="local_cache_hit"}} {hits["prefix"]}.0
{source}{{{e},source="external_kv_transfer"}} {hits["external"]}.0
{done}{{{e},finished_reason="stop"}} 0.0
{done}{{{e},finished_reason="length"}} {self.finished}.0
"""


MODEL: Any = Cache() if ROLE == "cache" else Runner()
LIFE = 0
SERVED = 0


def tell_place() -> None:
    """Where a test has got to: LIFE.SERVED, the start of the runner and its requests since."""
    new = STATE / "place.json.new"
    new.write_text(json.dumps({"life": LIFE, "served": SERVED}))
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
            page = MODEL.page()
            for old, new in mode.get("metrics", {}).items():
                page = page.replace(old, new)
            return self.reply(200, page)
        if self.path == "/version":
            return self.reply(200, '{"version":"0.32.0"}' if ROLE == "runner" else '"0.5.6-double"')
        if self.path == "/status":
            ids = [] if mode.get("not_registered") else [0]
            return self.reply(200, json.dumps({"modules": {"registered_gpu_ids": ids}}))
        return self.reply(200, "{}")  # /health, /healthcheck

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if ROLE == "cache":
            with LOCK:
                call = MODEL.lookup if self.path == "/double/lookup" else MODEL.store
                return self.reply(200, json.dumps(call(body)))
        mode = read("mode.json")
        if mode.get("key") and self.headers.get("Authorization") != "Bearer " + mode["key"]:
            return self.reply(401, '{"error": "Unauthorized"}')
        prompts = body["prompt"]
        if isinstance(prompts[0], list):
            for prompt in prompts:
                MODEL.generate(prompt, "", 1)
            return self.reply(200, "{}")
        self.stream(mode, body)
        return None

    def stream(self, mode: Json, body: Json) -> None:
        global SERVED
        fault = mode.get("fault", {}).get(f"{LIFE}.{SERVED}")
        if fault == "500":
            self.reply(500, '{"error": "prompt [11, 12, 13, 14, 15] failed"}')
            return
        salt, tokens = body.get("cache_salt", ""), body["prompt"]
        with LOCK:
            answer, cached = MODEL.generate(tokens, salt, body["max_tokens"])
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        if mode.get("proxy_alters") and LIFE > 1:
            answer[3] += 1
        for number, token in enumerate(answer):
            gap = mode.get("logprob_gap", 0) if LIFE > 1 else 0
            top = {f"token_id:{token}": -0.1 - gap, f"token_id:{token + 1}": -3.0}
            choice = {
                "token_ids": [token],
                "logprobs": {"top_logprobs": [top]},
            }
            self.event({"choices": [choice]})
            if fault == "hang" and number == 0:
                time.sleep(60)
            if fault == "cut":
                return
            if fault == "late":  # its KV is written although nobody reads the answer any more
                time.sleep(1.5)
                break
        details = (
            {} if mode.get("no_details") else {"prompt_tokens_details": {"cached_tokens": cached}}
        )
        self.event({"choices": [], "usage": {"prompt_tokens": len(tokens), **details}})
        self.wfile.write(b"data: [DONE]\n\n")
        for number in range(mode.get("extra_files", 0)):  # another's, in the middle of the request
            (STATE / "kv" / f"extra-{LIFE}-{SERVED}-{number}.data").write_bytes(os.urandom(64))
        SERVED += 1
        tell_place()

    def event(self, data: Json) -> None:
        self.wfile.write(b"data: " + json.dumps(data).encode() + b"\n\n")
        self.wfile.flush()

    def log_message(self, format: str, *args: Any) -> None:
        print(format % args, file=sys.stderr, flush=True)


if ROLE == "runner":
    LIFE = read("place.json").get("life", 0) + 1
    tell_place()
ThreadingHTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
