"""What a .gguf file asks of a host, from its header alone (onhost/gguf.py reads it). Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from kvhost.plan.types import ModelNeed
from kvhost.settings import Settings
from kvhost.sizing.kv_bytes import dtype_named, element_bytes

#: architectures of llama.cpp whose every layer keeps K and V of every token -> transformers' name
PLAIN = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "mistral": ("mistral", "MistralForCausalLM"),
}
#: more than any model has: what says more is damaged, and a list of as many would be made
MOST_LAYERS = 10_000
_COUNTS = (
    "block_count", "attention.head_count", "embedding_length", "context_length",
    "attention.head_count_kv", "attention.key_length", "attention.value_length",
)  # fmt: skip


def need_of_heads(
    settings: Settings, kv_heads: Sequence[int], key_length: int, value_length: int
) -> ModelNeed:
    """Bytes of KV per token with the settings' types, of layers with so many KV heads each; the
    other figures are 0, for the caller to fill in."""
    bytes_of = key_length * _element(settings.llama_cache_type_k)
    bytes_of += value_length * _element(settings.llama_cache_type_v)
    return ModelNeed(0, int(sum(kv_heads) * bytes_of), 0)


def llama_need(told: Mapping[str, Any], settings: Settings) -> ModelNeed | None:
    """From what gguf.read() gave. None where it does not tell, or is of an architecture with other
    layers: nothing is claimed then. Layers with a window count as if they kept every token."""
    shape = _shape(told.get("keys", {}))
    if shape is None:
        return None
    heads, kv_heads, key_length, value_length, context = shape
    found = need_of_heads(settings, kv_heads, key_length, value_length)
    return ModelNeed(int(told["weights_bytes"]), found.kv_bytes_per_token, context, heads)


def odd_count(told: Mapping[str, Any]) -> tuple[str, str] | None:
    """A count in the header that no model has: what is expected, and what it says; None if there is
    none. 0 says nothing (a layer without attention), and a long list is told by its length alone.
    """
    keys = told.get("keys", {})
    kind = keys.get("general.architecture")
    for name in _COUNTS:
        found = keys.get(f"{kind}.{name}", 0)
        each = found if isinstance(found, list) else [] if isinstance(found, dict) else [found]
        if not all(type(one) is int and one >= 0 for one in each):
            return f"{name} of 1 or more", f"{name} = {found!r:.60}"
    layers, heads, width = (keys.get(f"{kind}.{name}") for name in _COUNTS[:3])
    if isinstance(layers, int) and layers > MOST_LAYERS:
        return f"block_count of at most {MOST_LAYERS} layers", f"block_count = {layers}"
    if isinstance(heads, int) and isinstance(width, int) and heads > width > 0:
        expected = f"attention.head_count of at most embedding_length = {width}"
        return expected, f"attention.head_count = {heads}"
    return None


def architecture(told: Mapping[str, Any]) -> str:
    """As the file itself names it."""
    return str(told.get("keys", {}).get("general.architecture"))


def config_of(told: Mapping[str, Any]) -> dict[str, Any] | None:
    """The config.json that transformers would have of it, as far as a size of KV needs it."""
    keys = told.get("keys", {})
    kind, shape = str(keys.get("general.architecture")), _shape(keys)
    if kind not in PLAIN or shape is None or len(set(shape[1])) != 1:
        return None
    heads, kv_heads, key_length, value_length, context = shape
    if key_length != value_length:
        return None
    model_type, architecture = PLAIN[kind]
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "num_hidden_layers": len(kv_heads),
        "hidden_size": keys[f"{kind}.embedding_length"],
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads[0],
        "head_dim": key_length,
        "max_position_embeddings": context,
        "torch_dtype": "float16",
    }


def _element(name: str) -> Fraction:
    return element_bytes(dtype_named(name))


def _shape(keys: Mapping[str, Any]) -> tuple[int, list[int], int, int, int] | None:
    """Heads, KV heads of each layer, lengths of a key and a value, context."""
    kind = keys.get("general.architecture")

    def of(name: str) -> Any:
        return keys.get(f"{kind}.{name}")

    layers, heads, width = of("block_count"), of("attention.head_count"), of("embedding_length")
    context, kv_heads = of("context_length"), of("attention.head_count_kv")
    other = [key for key in keys if ".ssm." in key or ".kv_lora_rank" in key or ".wkv." in key]
    if other or not all(map(_positive, (layers, context, width))) or layers > MOST_LAYERS:
        return None
    if isinstance(heads, list) and all(type(one) is int and one >= 0 for one in heads):
        heads = max(heads, default=0)
    if not _positive(heads):
        return None
    rows = kv_heads if isinstance(kv_heads, list) else [kv_heads or heads] * layers
    # a layer without attention has none
    if (
        len(rows) != layers
        or not all(type(row) is int and row >= 0 for row in rows)
        or not any(rows)
    ):
        return None
    key_length = of("attention.key_length") or width // heads
    value_length = of("attention.value_length") or key_length
    if not _positive(key_length) or not _positive(value_length):
        return None
    return heads, rows, key_length, value_length, context


def _positive(found: Any) -> bool:
    return type(found) is int and found > 0
