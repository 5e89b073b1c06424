"""What a model asks of a host, from its config.json alone: enough to refuse before a download.

The exact figure comes from the engine later; where the architecture is not known, nothing is
claimed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvhost.plan.types import ModelNeed
from kvhost.settings import Settings
from kvhost.sizing.arch import architecture_of
from kvhost.sizing.kv_bytes import DTYPE_BYTES, SizeError, size_of
from kvhost.sizing.layer import UnknownArchitecture


def need_of(config: Mapping[str, Any], weights_bytes: int, settings: Settings) -> ModelNeed | None:
    """Bytes of weights and of KV cache per token, tokens of context; None if config.json does not
    tell (kvhost/sizing/arch.py), or no token takes anything.

    vLLM serves float32 weights as bfloat16 unless dtype says otherwise, so "auto" counts two bytes.
    Layers with a window count as if they kept every token, as they do on a CPU.
    """
    computed = settings.dtype if settings.dtype in DTYPE_BYTES else "bfloat16"
    dtype = settings.kv_cache_dtype if settings.kv_cache_dtype in DTYPE_BYTES else computed
    try:
        found = architecture_of(config)
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
