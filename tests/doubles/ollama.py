#!/usr/bin/python3
"""In place of the program `ollama`: its words, its API as far as kvhost asks it, its log lines.

No model is computed. serve | pull NAME | create NAME -f FILE | --version. What it knows to pull is
LIBRARY; a model of an architecture without flash attention is loaded with f16 whatever was asked,
as Ollama does, with the warnings of its log. ../lib/ollama/double.json may hold {"form":
"request"|"llama-server" (whose lines), "offline": true, "dies": true (serve ends at once)}.
Its digest of a model is that of its name.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

VERSION = "0.34.2-double"
#: name -> architecture, layers, heads of K and V, head size, whether it has flash attention
LIBRARY: dict[str, tuple[str, int, int, int, bool]] = {
    "qwen3:0.6b": ("qwen3", 28, 8, 128, True),
    "odd:1b": ("grok", 16, 8, 64, False),
}
BITS = {"f16": 16.0, "q8_0": 8.5, "q4_0": 4.5}
_MODE = Path(__file__).resolve().parents[1] / "lib/ollama/double.json"
MODE: dict[str, Any] = json.loads(_MODE.read_text()) if _MODE.exists() else {}
LOADED: dict[str, int] = {}
LOCK = threading.Lock()


def env(name: str, default: str = "") -> str:
    return os.environ.get(name, default)


def models() -> Path:
    return Path(env("OLLAMA_MODELS") or f"{env('HOME', '/nonexistent')}/.ollama/models")


def known() -> dict[str, Any]:
    path = models() / "double.json"
    return dict(json.loads(path.read_text())) if path.exists() else {}


def keep(name: str, about: tuple[str, int, int, int, bool]) -> None:
    models().mkdir(parents=True, exist_ok=True)
    (models() / "double.json").write_text(json.dumps({**known(), name: about}))


def digest(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def blob(name: str) -> str:
    return digest("blob of " + name)


def log(level: str, message: str, more: str = "") -> None:
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime())
    quoted = json.dumps(message) if " " in message else message
    print(f"time={stamp} level={level} source=double.py:1 msg={quoted} {more}".rstrip(),
          file=sys.stderr, flush=True)  # fmt: skip


def load(name: str) -> None:
    """Writes what Ollama writes when it loads a model."""
    _, layers, heads, size, flash = known()[name]
    asked, context = env("OLLAMA_KV_CACHE_TYPE"), int(env("OLLAMA_CONTEXT_LENGTH") or 4096)
    parallel = int(env("OLLAMA_NUM_PARALLEL") or 1)
    on = flash and env("OLLAMA_FLASH_ATTENTION", "1") not in ("0", "false")
    if not flash and env("OLLAMA_FLASH_ATTENTION") in ("1", "true"):
        log("WARN", "flash attention enabled but not supported by model")
    if not on and asked not in ("", "f16"):
        log("WARN", "quantized kv cache requested but flash attention disabled", f"type={asked}")
    kind = asked if on else ""
    cells, file = context * parallel, f"{models()}/blobs/sha256-{blob(name)}"
    mib = cells * layers * heads * size * BITS[kind or "f16"] / 8 / (1 << 20)
    if MODE.get("form") == "request":
        command = f"/usr/local/bin/ollama runner --ollama-engine --model {file} --port 40001"
        log("INFO", "starting runner", f"cmd={json.dumps(command)}")
        request = (
            f"{{Operation:commit LoraPath:[] Parallel:{parallel} BatchSize:512 FlashAttention:"
            f"{'Enabled' if on else 'Disabled'} KvSize:{cells} KvCacheType:{kind} NumThreads:4 "
            "GPULayers:[] MultiUserCache:false ProjectorPath: MainGPU:0 UseMmap:false}"
        )
        log("INFO", "load", f"request={json.dumps(request)}")
        log("INFO", "kv cache", f'device=CPU size="{2 * mib:.1f} MiB"')
    else:
        given = f"--cache-type-k {kind} --cache-type-v {kind} " if kind else ""
        command = (
            f"/usr/local/lib/ollama/llama-server --model {file} --port 40001 --host 127.0.0.1 "
            f"-c {cells} -np {parallel} {given}--flash-attn {'on' if on else 'off'} -b 512"
        )
        log("INFO", "starting llama-server", f"cmd={json.dumps(command)}")
        each = f"({kind or 'f16'}): {mib:7.2f} MiB"
        print(f"llama_kv_cache: size = {2 * mib:7.2f} MiB ({cells:6d} cells, {layers:3d} layers,  "
              f"1/1 seqs), K {each}, V {each}", file=sys.stderr, flush=True)  # fmt: skip
    LOADED[name] = context


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        return

    def answer(self, data: Any, code: int = 200) -> None:
        body = json.dumps(data).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        if self.path == "/api/version":
            self.answer({"version": VERSION})
        elif self.path == "/api/tags":
            self.answer({"models": [{"name": n, "model": n, "digest": digest(n)} for n in known()]})
        elif self.path == "/api/ps":
            rows = [
                {"name": name, "model": name, "digest": digest(name), "context_length": context,
                 "size": 1 << 30, "size_vram": 0, "expires_at": "2030-01-01T00:00:00Z"}
                for name, context in LOADED.items()
            ]  # fmt: skip
            self.answer({"models": rows})
        else:
            self.answer({"error": "not found"}, 404)

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
        name = asked.get("model", "")
        if self.path == "/api/pull":
            if MODE.get("offline") or name not in LIBRARY:
                why = "dial tcp: lookup registry.ollama.ai: no such host"
                return self.answer(
                    {"error": why if MODE.get("offline") else "file does not exist"}, 500
                )
            keep(name, LIBRARY[name])
            return self.answer({"status": "success"})
        if self.path == "/api/create":
            keep(name, ("qwen3", 28, 8, 128, True))
            return self.answer({"status": "success"})
        if name not in known():
            return self.answer({"error": f"model '{name}' not found"}, 404)
        if self.path == "/api/show":
            architecture, layers, heads, size, _ = known()[name]
            shape = {
                "general.architecture": architecture,
                f"{architecture}.block_count": layers,
                f"{architecture}.embedding_length": 2 * heads * size,
                f"{architecture}.attention.head_count": 2 * heads,
                f"{architecture}.attention.head_count_kv": heads,
                f"{architecture}.attention.key_length": size,
                f"{architecture}.attention.value_length": size,
            }
            file = f"# Modelfile\nFROM {models()}/blobs/sha256-{blob(name)}\nTEMPLATE x\n"
            about = {"modelfile": file, "details": {"quantization_level": "Q4_K_M"}}
            return self.answer({**about, "model_info": shape})
        if self.path == "/api/generate":
            with LOCK:
                if name not in LOADED:
                    load(name)
            return self.answer({"model": name, "response": "", "done": True, "done_reason": "load"})
        return self.answer({"error": "not found"}, 404)


def serve() -> int:
    if MODE.get("dies"):
        print("Error: listen tcp: something is wrong", file=sys.stderr)
        return 1
    address, _, port = env("OLLAMA_HOST", "127.0.0.1:11434").rpartition(":")
    flash = {"1": "true", "0": "false"}.get(env("OLLAMA_FLASH_ATTENTION"), "false")
    told = (
        f"map[HTTP_PROXY: OLLAMA_CONTEXT_LENGTH:{env('OLLAMA_CONTEXT_LENGTH', '0')} "
        f"OLLAMA_FLASH_ATTENTION:{flash} OLLAMA_HOST:http://{address}:{port} "
        f"OLLAMA_KEEP_ALIVE:{env('OLLAMA_KEEP_ALIVE', '5m0s')} "
        f"OLLAMA_KV_CACHE_TYPE:{env('OLLAMA_KV_CACHE_TYPE')} OLLAMA_MODELS:{models()} "
        f"OLLAMA_NUM_PARALLEL:{env('OLLAMA_NUM_PARALLEL', '1')} http_proxy: no_proxy:]"
    )
    log("INFO", "server config", f"env={json.dumps(told)}")
    server = ThreadingHTTPServer((address, int(port)), Handler)
    log("INFO", f"Listening on {address}:{port} (version {VERSION})")
    server.serve_forever()
    return 0


def client(path: str, body: dict[str, Any]) -> int:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    url = f"http://{env('OLLAMA_HOST', '127.0.0.1:11434')}{path}"
    try:
        with opener.open(urllib.request.Request(url, json.dumps(body).encode()), timeout=20) as got:
            got.read()
    except OSError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    return 0


def main() -> int:
    words = sys.argv[1:]
    if words == ["--version"]:
        print("Warning: could not connect to a running Ollama instance")
        print(f"Warning: client version is {VERSION}")
        return 0
    if words == ["serve"]:
        return serve()
    if words[:1] == ["pull"]:
        return client("/api/pull", {"model": words[1]})
    if words[:1] == ["create"]:
        return client("/api/create", {"model": words[1]})
    print(f"Error: unknown command {words}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
