"""The engine's figures of the KV cache, recorded or new, beside those of kvhost/sizing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvhost.sizing.arch import architecture_of
from kvhost.sizing.kv_bytes import KvSize, dtype_named, size_of

FIXTURES = Path(__file__).parent / "fixtures" / "sizing"
TINY: dict[str, Any] = json.loads((FIXTURES / "tiny.json").read_text())
PUBLIC: dict[str, Any] = json.loads((FIXTURES / "public.json").read_text())
#: of Llama-3-8B's shape
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "torch_dtype": "float16",
}
#: name of vLLM's specification -> kind of layer
KINDS = {
    "FullAttentionSpec": "full",
    "SlidingWindowSpec": "window",
    "ChunkedLocalAttentionSpec": "window",
    "MLAAttentionSpec": "latent",
    "CrossAttentionSpec": "cross",
    "MambaSpec": "state",
}


def engine_record(path: Path = FIXTURES / "engine.json") -> dict[str, Any]:
    record: dict[str, Any] = json.loads(path.read_text())
    return record


def sized(config: dict[str, Any], ranks: int = 1, recurrent: str = "auto") -> KvSize:
    """As the engine computes it in bfloat16; the KV dtype is the one that the fixture names."""
    told = config.get("kvhost_kv_dtype", "bfloat16")
    found = architecture_of(config)
    states = {"state_dtype": "bfloat16", "recurrent": recurrent}
    return size_of(found, dtype_named(told), ranks=ranks, **states)


Row = tuple[str, int, int, int | None]


def rows_of_engine(one: dict[str, Any]) -> list[Row]:
    """(kind, layers, bytes of a token or of a state in one layer, window), without padding."""
    rows = []
    for layer in one["layers"]:
        kind = KINDS[layer["kind"]]
        tokens = 1 if kind == "state" else layer["block_tokens"]
        assert layer["page_bytes"] % tokens == 0
        window = layer["window"] if kind == "window" else None
        rows.append((kind, layer["layers"], layer["page_bytes"] // tokens, window))
    return sorted(rows, key=str)


def rows_of_kvhost(kv: KvSize) -> list[Row]:
    rows = []
    for part in kv.parts:
        window = part.window if part.kind == "window" else None
        rows.append((part.kind, part.layers, part.layer_token or part.layer_fixed, window))
    return sorted(rows, key=str)


def compared(name: str, record: dict[str, Any] | None = None) -> tuple[object, object]:
    """What kvhost says of a small model, and what the engine says; equal where all is well."""
    record = record or engine_record()
    kv = sized(TINY[name], recurrent=record["recurrent_dtype"])
    return rows_of_kvhost(kv), rows_of_engine(record["models"][name])


DOC = Path(__file__).parents[1] / "docs" / "sizing.md"
MARKS = ("<!-- engine table -->\n", "<!-- end of engine table -->")


def table() -> str:
    """The table of docs/sizing.md, from the record."""
    lines = ["| model_type | layers | bytes in a layer: of a token, of a state | per token | how |",
             "|---|---|---|---|---|"]  # fmt: skip
    for name, one in engine_record()["models"].items():
        kv = sized(TINY[name])
        rows = rows_of_engine(one)
        layers = ", ".join(f"{count} {kind}" + (f" of {window}" if window else "")
                           for kind, count, _, window in rows)  # fmt: skip
        each = ", ".join(str(size) for _, _, size, _ in rows)
        kind = TINY[name]["model_type"] + (" (fp8)" if name.endswith("fp8") else "")
        lines.append(f"| {kind} | {layers} | {each} | {kv.per_token} | {one['way']} |")
    return "\n".join(lines) + "\n"


def write_table() -> None:
    """Puts the table of a new record into the page."""
    before, _, rest = DOC.read_text().partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    DOC.write_text(before + MARKS[0] + table() + MARKS[1] + after)
