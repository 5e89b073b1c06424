"""What a model asks of a host, from its config.json alone: enough to refuse before a download.

The exact figure comes from the engine later; where the architecture is not known, nothing is
claimed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvhost.plan.types import ModelNeed
from kvhost.report import ModelDir
from kvhost.settings import Settings
from kvhost.sizing.arch import architecture_of
from kvhost.sizing.declared import declared_kv_dtype
from kvhost.sizing.kv_bytes import COMPUTED, DTYPE_BYTES, SizeError, size_of
from kvhost.sizing.layer import UnknownArchitecture
from kvhost.sizing.weights import weights_in_memory


def weights_bytes(model: ModelDir, settings: Settings) -> int:
    """Bytes of a model's weights in memory; those of its files where these do not tell."""
    told = model.weights.data
    if told is not None:
        dtype = settings.dtype if settings.dtype in DTYPE_BYTES else COMPUTED
        found = weights_in_memory(told.model_dump(), model.config.data or {}, dtype)
        if found is not None:
            return found
    return sum(file.bytes for file in model.files if file.name.endswith((".safetensors", ".gguf")))


def need_of(config: Mapping[str, Any], weights_bytes: int, settings: Settings) -> ModelNeed | None:
    """Bytes of weights and of KV cache per token, tokens of context; None if config.json does not
    tell (kvhost/sizing/arch.py), or no token takes anything.

    vLLM serves float32 weights as bfloat16 unless dtype says otherwise, so "auto" counts two bytes;
    of KV it takes what the checkpoint declares, if it does.
    Layers with a window count as if they kept every token, as they do on a CPU.
    """
    computed = settings.dtype if settings.dtype in DTYPE_BYTES else COMPUTED
    try:
        found = architecture_of(config)
        asked = settings.kv_cache_dtype
        dtype = asked if asked != "auto" else declared_kv_dtype(config, found) or computed
        kv = size_of(found, dtype, state_dtype=computed)
    except (SizeError, UnknownArchitecture):
        return None
    if found.context is None or not kv.per_token:
        return None
    parts = tuple(
        (layer.heads, part.per_token)
        for layer, part in zip(found.layers, kv.parts, strict=True)
        if layer.kind not in ("state", "cross")
    )
    kinds = {heads for heads, _ in parts}
    known = (weights_bytes, kv.per_token, found.context, found.heads)
    if len(kinds) == 1:
        return ModelNeed(*known, kv_heads=kinds.pop())
    return ModelNeed(*known, kv_parts=parts)
