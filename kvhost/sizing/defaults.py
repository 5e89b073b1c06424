"""What a config.json leaves out: each family's defaults, as transformers 5.19 has them. Pure.

transformers, models/FAMILY/configuration_FAMILY.py; vLLM reads a config.json through it. A key that
is there and null stays null. tests/test_sizing_defaults.py compares the table with the engine's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: as config.json names them: the size of a model, which a config.json of its own always says;
#: one that is a part of another's (text_config) has but what differs from these
_SIZE = ("hidden_size", "num_hidden_layers", "num_attention_heads", "n_embd", "n_layer", "n_head")


def _of(
    hidden: int, layers: int, heads: int | None, context: int | None, **more: Any
) -> dict[str, Any]:
    """``more``: what a reader would otherwise take for absent."""
    size = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    told = {**size, "max_position_embeddings": context, **more}
    return {key: value for key, value in told.items() if value is not None}


def _gpt2(hidden: int, layers: int, heads: int, context: int) -> dict[str, Any]:
    return {"n_embd": hidden, "n_layer": layers, "n_head": heads, "n_positions": context}


_QWEN2_VL = _of(8192, 80, 64, 32768, num_key_value_heads=8)

#: where num_key_value_heads is not named, it is that of the heads (MHA); head_dim: hidden / heads
DEFAULTS: dict[str, dict[str, Any]] = {
    "cohere": _of(8192, 40, 64, 8192),
    "cohere2": _of(8192, 40, 64, 8192, sliding_window=4096, sliding_window_pattern=4),
    "deepseek_v2": _of(4096, 32, 32, 2048),
    "deepseek_v3": _of(7168, 61, 128, 4096),
    "falcon": _of(4544, 32, 71, 2048, multi_query=True, new_decoder_architecture=False),
    "falcon_h1": _of(4096, 32, 32, 8192, num_key_value_heads=8, mamba_d_ssm=1024),
    "falcon_mamba": _of(768, 32, None, None),
    "gemma": _of(3072, 28, 16, 8192, num_key_value_heads=16, head_dim=256),
    "gemma2": _of(2304, 26, 8, 8192, num_key_value_heads=4, head_dim=256, sliding_window=4096),
    "gemma3_text": _of(2304, 26, 8, 131072, num_key_value_heads=4, head_dim=256,
                       sliding_window=4096, sliding_window_pattern=6),
    "gemma3n_text": _of(2048, 35, 8, 32768, num_key_value_heads=2, head_dim=256,
                        sliding_window=512, num_kv_shared_layers=15),
    "gemma4_text": _of(2304, 30, 8, 131072, num_key_value_heads=4, head_dim=256,
                       sliding_window=512, num_kv_shared_layers=0, global_head_dim=512,
                       attention_k_eq_v=False),
    "glm4_moe_lite": _of(2048, 47, 20, 202752),
    "gpt2": _gpt2(768, 12, 12, 1024),
    "gpt_bigcode": {**_gpt2(768, 12, 12, 1024), "multi_query": True},
    "gpt_neox": _of(6144, 44, 64, 2048),
    "gpt_oss": _of(2880, 36, 64, 131072, num_key_value_heads=8, head_dim=64, sliding_window=128),
    "gptj": _gpt2(4096, 28, 16, 2048),
    "granite": _of(4096, 32, 32, 2048),
    "granitemoe": _of(4096, 32, 32, 2048),
    "granitemoehybrid": _of(4096, 32, 32, 2048),
    "jamba": _of(4096, 32, 32, 262144, num_key_value_heads=8),
    "lfm2": _of(2560, 32, 32, 128000, num_key_value_heads=8),
    "lfm2_moe": _of(2048, 32, 32, 128000, num_key_value_heads=8),
    "llama": _of(4096, 32, 32, 2048),
    "llama4_text": _of(5120, 48, 40, 131072, num_key_value_heads=8, head_dim=128,
                       attention_chunk_size=8192, no_rope_layer_interval=4),
    "mamba": _of(768, 32, None, None),
    "mamba2": _of(4096, 64, None, None),
    "mimo_v2_flash": _of(4096, 48, 64, 131072),
    "mistral": _of(4096, 32, 32, 131072, num_key_value_heads=8, sliding_window=4096),
    "mixtral": _of(4096, 32, 32, 131072, num_key_value_heads=8),
    "nemotron": _of(6144, 32, 48, 4096),
    "nemotron_h": _of(4096, 4, 32, 4096, num_key_value_heads=8, head_dim=128),
    "olmo": _of(4096, 32, 32, 2048),
    "olmo2": _of(4096, 32, 32, 2048),
    "olmoe": _of(2048, 16, 16, 4096),
    "opt": _of(768, 12, 12, 2048),
    "phi3": _of(3072, 32, 32, 4096),
    "qwen2": _of(4096, 32, 32, 32768, num_key_value_heads=32),
    "qwen2_5_vl": _QWEN2_VL,
    "qwen2_5_vl_text": _QWEN2_VL,
    "qwen2_moe": _of(2048, 24, 16, 32768, num_key_value_heads=16),
    "qwen2_vl": _QWEN2_VL,
    "qwen2_vl_text": _QWEN2_VL,
    "qwen3": _of(4096, 32, 32, 32768, num_key_value_heads=32, head_dim=128),
    "qwen3_5_moe_text": _of(2048, 40, 16, 32768, num_key_value_heads=2, head_dim=256,
                            full_attention_interval=4),
    "qwen3_5_text": _of(4096, 32, 16, 32768, num_key_value_heads=4, head_dim=256,
                        full_attention_interval=4),
    "qwen3_moe": _of(2048, 24, 32, 32768, num_key_value_heads=4),
    "qwen3_next": _of(2048, 48, 16, 32768, num_key_value_heads=2, head_dim=256,
                      full_attention_interval=4),
    "qwen3_vl_moe_text": _of(2048, 24, 16, 128000, num_key_value_heads=16),
    "qwen3_vl_text": _of(4096, 32, 32, 128000, num_key_value_heads=32, head_dim=128),
    "seed_oss": _of(4096, 64, 80, 524288, num_key_value_heads=8, head_dim=128),
    "stablelm": _of(2560, 32, 32, 4096, num_key_value_heads=32),
    "starcoder2": _of(3072, 30, 24, 4096, num_key_value_heads=2),
    "whisper": {"max_target_positions": 448},
}  # fmt: skip

#: families whose configuration comes with the model, or from vLLM -> keys that must be there:
#: what they are otherwise is not known here
STRANGE: dict[str, tuple[str, ...]] = {
    "internlm2": ("num_key_value_heads",),
    "internlm3": ("num_key_value_heads", "head_dim"),
    "kimi_k2": (),
    "kimi_linear": (),
    "nemotron-nas": (),
}


def filled_in(config: Mapping[str, Any], family: str, *, nested: bool) -> dict[str, Any]:
    """With the family's defaults for what is not there; those of its size only where it is a part
    of another config.json (``nested``). Raises KeyError for a key whose default is not known."""
    for key in STRANGE.get(family, ()):
        if key not in config:
            raise KeyError(key)
    own = DEFAULTS.get(family, {})
    return {**{key: own[key] for key in own if nested or key not in _SIZE}, **config}
