"""What a model asks of a host, from its config.json alone: enough to refuse before a download.

The exact figure comes from the engine later; where the formula does not hold, nothing is claimed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvhost.namespace import DTYPE_BYTES
from kvhost.plan_types import ModelNeed
from kvhost.settings import Settings


def need_of(config: Mapping[str, Any], weights_bytes: int, settings: Settings) -> ModelNeed | None:
    """Bytes of weights and of KV cache per token, tokens of context; None if config.json does not
    tell (no plain attention).

    KV: 2 (K and V) x layers x KV heads x head size x bytes of an element. vLLM serves float32
    weights as bfloat16 unless dtype says otherwise, so "auto" counts two bytes.
    """
    try:
        layers, heads = int(config["num_hidden_layers"]), int(config["num_attention_heads"])
        kv_heads = int(config.get("num_key_value_heads") or heads)
        head_size = int(config.get("head_dim") or int(config["hidden_size"]) // heads)
        context = int(config["max_position_embeddings"])
    except (KeyError, TypeError, ValueError):
        return None
    element = DTYPE_BYTES.get(settings.kv_cache_dtype) or DTYPE_BYTES.get(settings.dtype) or 2
    kv_bytes = 2 * layers * kv_heads * head_size * element
    return ModelNeed(weights_bytes, kv_bytes, context, heads, kv_heads)
