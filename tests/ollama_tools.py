"""What the tests of Ollama share: recorded logs, the shape of models, facts made of both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvhost.ollama.facts import OllamaFacts, parse_facts
from kvhost.onhost.ollama_log import loads_of

LOGS = Path(__file__).with_name("fixtures") / "ollama"
NAME = "qwen2.5:7b"
#: key -> value of a GGUF without its architecture, as /api/show has them
QWEN_7B: dict[str, Any] = {
    "block_count": 28,
    "embedding_length": 3584,
    "attention.head_count": 28,
    "attention.head_count_kv": 4,
}
QWEN_30B: dict[str, Any] = {
    "block_count": 48,
    "embedding_length": 2048,
    "attention.head_count": 32,
    "attention.head_count_kv": 4,
    "attention.key_length": 128,
    "attention.value_length": 128,
}


def read(name: str) -> dict[str, Any]:
    return loads_of((LOGS / f"{name}.log").read_text(encoding="utf-8").splitlines())


def ok(data: Any) -> dict[str, Any]:
    return {"status": "ok", "why": None, "data": data}


def facts_of(name: str, shape: dict[str, Any], **changes: Any) -> OllamaFacts:
    """What ollama_look.py would print for a recorded log."""
    log = read(name)
    load = log["loads"][-1] if log["loads"] else None
    model = {
        "digest": "ab" * 32,
        "blob": load["blob"] if load else None,
        "architecture": "any",
        "quantization": "Q4_K_M",
        "shape": shape,
    }
    in_memory = {"context_length": 4096, "size": 1, "size_vram": 0, "expires_at": None}
    told = {
        "schema": 1,
        "url": "http://127.0.0.1:11434",
        "name": NAME,
        "api": ok({"version": "0.0.0"}),
        "model": ok(model),
        "loaded": ok(in_memory),
        "log": ok({**log, "load": load, "loads": len(log["loads"])}),
    }
    return parse_facts(json.dumps({**told, **changes}))
