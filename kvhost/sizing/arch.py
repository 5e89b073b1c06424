"""Which layers of a model keep a cache, and how much of it: from its config.json alone. Pure.

One entry a ``model_type`` of Hugging Face's config.json; what is not listed, or has a key of a
meaning that is not known here, raises UnknownArchitecture and is never guessed. docs/sizing.md
shows each family beside what vLLM allocates for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvhost.sizing import state as sizing_state
from kvhost.sizing.defaults import filled_in
from kvhost.sizing.layer import (
    Config,
    Kind,
    Layer,
    Reader,
    UnknownArchitecture,
    attention,
    head_count,
    head_size,
    latent,
    layer_count,
    maybe,
    number,
    of_kind,
    whole,
)


@dataclass(frozen=True)
class Architecture:
    """The layers of one model; ``heads`` are those of the query, ``context`` is in tokens."""

    model_type: str
    layers: tuple[Layer, ...]
    heads: int | None
    context: int | None
    #: the dtype of its weights as config.json says it
    dtype: str | None


def architecture_of(config: Config) -> Architecture:
    """Raises UnknownArchitecture, with what is missing, for what cannot be told exactly."""
    top, nested = config, isinstance(config.get("text_config"), Mapping)
    if not isinstance(config.get("text_config"), Mapping | None):
        raise UnknownArchitecture("text_config of config.json is no object")
    if nested:  # a model that also sees or hears
        config = {**config["text_config"]}
        config.setdefault("model_type", _TEXT_PART.get(str(top.get("model_type")), ""))
    name = str(config.get("model_type") or "")
    read = READERS.get(name)
    if read is None:
        raise UnknownArchitecture(
            f"model_type {name or '(none)'!r}: how its layers cache is not known here; nothing is "
            "guessed. Known: " + ", ".join(sorted(READERS))
        )
    try:
        config = filled_in(config, name, nested=nested)
        found = _together(read(config))
        heads = maybe(config, "num_attention_heads", "n_head", "decoder_attention_heads")
        if heads is None and any(layer.kind != "state" for layer in found):
            raise KeyError("num_attention_heads")  # by which ranks share it
        context = maybe(config, "max_position_embeddings", "n_positions", "max_target_positions")
    except KeyError as error:
        raise UnknownArchitecture(
            f"config.json of {name!r} has no {error.args[0]!r}, which the size depends on"
        ) from error
    except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise UnknownArchitecture(f"config.json of {name!r}: {error}") from error
    if not found:
        raise UnknownArchitecture(f"config.json of {name!r} names no layer that keeps a cache")
    told = (place.get(key) for place in (config, top) for key in ("dtype", "torch_dtype"))
    dtype = next((one for one in told if one is not None), None)
    if dtype is not None and not isinstance(dtype, str):
        raise UnknownArchitecture(f"config.json of {name!r}: its dtype is no text")
    return Architecture(name, found, heads, context, dtype or None)


#: the model_type of the text part where config.json leaves it out
_TEXT_PART = {
    **{name: f"{name}_text" for name in (
        "gemma3", "gemma3n", "gemma4", "llama4", "qwen2_vl", "qwen2_5_vl", "qwen3_vl",
        "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe",
    )},
    "llava": "llama",
    "mistral3": "mistral",
}  # fmt: skip


def _together(layers: list[Layer]) -> tuple[Layer, ...]:
    """Layers alike as one entry, in the order in which they first come."""
    return tuple(
        Layer(**{**one.__dict__, "count": count * one.count})
        for one, count in Counter(layers).items()
    )


def _plain(config: Config) -> list[Layer]:
    """The same attention in every layer; a window, if there is one, in all (vLLM 0.32)."""
    _alike(config)
    return [attention(config, _window(config))] * layer_count(config)


def _alike(config: Config) -> None:
    """Raises ValueError where config.json says that layers differ, and the family has none such."""
    kinds = config.get("layer_types")
    others = set(whole(config, kinds) if kinds is not None else ()) - {"full_attention"}
    if others:
        raise ValueError(f"layers of type {', '.join(sorted(map(str, others)))}: not known here")


def _window(config: Config) -> int | None:
    return maybe(config, "sliding_window") or None


def _full(config: Config) -> list[Layer]:
    """The same in every layer, whatever is said of a window: these models have none."""
    _alike(config)
    return [attention(config)] * layer_count(config)


def _switched_window(config: Config) -> list[Layer]:
    """Qwen2 and 3: no window; vLLM 0.32 refuses one in some of their layers."""
    if config.get("use_sliding_window"):
        raise ValueError("use_sliding_window is set, which vLLM does not take in some layers")
    return _full(config)


def _mixed(every: int | None = None) -> Reader:
    """Windows in some layers: those that layer_types names; else all but every Nth one, which
    sliding_window_pattern says where the family has that key."""

    def read(config: Config) -> list[Layer]:
        if config.get("use_bidirectional_attention"):
            raise ValueError("use_bidirectional_attention is set, with other windows")
        kinds: list[Any] | None = config.get("layer_types")
        if kinds is None:
            pattern = every or number(config, "sliding_window_pattern")
            kinds = [
                "sliding_attention" if (index + 1) % pattern else "full_attention"
                for index in range(layer_count(config))
            ]
        return [of_kind(config, kind) for kind in whole(config, kinds)]

    return read


def _cohere2(config: Config) -> list[Layer]:
    # the window does not count the token itself; vLLM's does
    return _mixed()({**config, "sliding_window": number(config, "sliding_window") + 1})


def _gemma_shared(config: Config) -> list[Layer]:
    """Gemma 3n and 4: the last layers use the cache of earlier ones; 4: two head sizes, and the
    last layer is never one with a window."""
    own = layer_count(config) - (maybe(config, "num_kv_shared_layers") or 0)
    two_sizes, kinds = "global_head_dim" in config, list(whole(config, config["layer_types"]))
    if two_sizes:
        kinds[-1] = "full_attention"
        if config.get("use_bidirectional_attention") == "all":
            raise ValueError("use_bidirectional_attention is set, with other windows")
    found = []
    for kind in kinds[:own]:
        if kind == "full_attention" and two_sizes:
            config_of = {**config, "head_dim": number(config, "global_head_dim")}
            if config.get("attention_k_eq_v") and config.get("num_global_key_value_heads"):
                config_of["num_key_value_heads"] = config["num_global_key_value_heads"]
            found.append(of_kind(config_of, kind))
        else:
            found.append(of_kind(config, kind))
    return found


def _llama4(config: Config) -> list[Layer]:
    """Chunked attention in the layers with rope, which is all but every Nth."""
    kinds = config.get("layer_types")
    if kinds is None:
        every = number(config, "no_rope_layer_interval")
        rope = config.get("no_rope_layers") or [
            int((index + 1) % every != 0) for index in range(layer_count(config))
        ]
        kinds = ["chunked_attention" if one else "full_attention" for one in rope]
    return [of_kind(config, kind) for kind in whole(config, kinds)]


def _multi_query(config: Config) -> list[Layer]:
    """gpt_bigcode and falcon: one KV head if multi_query is set."""
    config = dict(config)
    if config.get("new_decoder_architecture"):
        config["num_key_value_heads"] = maybe(config, "num_kv_heads") or head_count(config)
    else:
        config["num_key_value_heads"] = 1 if config.get("multi_query", True) else head_count(config)
    config["num_kv_heads"] = config["num_key_value_heads"]
    return _full(config)


def _per_layer_heads(config: Config) -> list[Layer]:
    """nemotron-nas: each layer has its own number of KV heads, or none."""
    heads, size = head_count(config), head_size(config)
    found = []
    for block in whole(config, config["block_configs"]):
        attention = block["attention"]
        if not attention.get("no_op") and not attention.get("replace_with_linear"):
            kv = heads // number(attention, "n_heads_in_group")
            found.append(Layer("full", heads=kv, width=2 * size))
    return found


def _two_sizes(config: Config) -> list[Layer]:
    """MiMo v2: windows with heads of their own; K and V differ in size."""
    found = []
    for windowed in whole(config, config["hybrid_layer_pattern"]):
        part = "swa_" if windowed else ""
        heads = number(config, f"{part}num_key_value_heads")
        width = number(config, f"{part}head_dim") + number(config, f"{part}v_head_dim")
        window = number(config, "sliding_window", "sliding_window_size") if windowed else None
        kind: Kind = "window" if windowed else "full"
        found.append(Layer(kind, heads=heads, width=width, window=window))
    return found


def _whisper(config: Config) -> list[Layer]:
    """Each layer of the decoder caches its own tokens and, once, the encoder's."""
    heads = number(config, "decoder_attention_heads")
    width = 2 * (number(config, "d_model") // heads)
    tokens = number(config, "max_source_positions")
    both = [Layer("full", heads=heads, width=width)]
    both.append(Layer("cross", heads=heads, width=width, window=tokens))
    return both * layer_count(config, "decoder_layers")


READERS: dict[str, Reader] = {
    **dict.fromkeys(
        ("llama", "gemma", "granite", "granitemoe", "gpt2", "opt", "gpt_neox", "gptj", "olmo",
         "olmo2", "olmoe", "stablelm", "qwen3_vl_text", "qwen3_vl_moe_text", "cohere", "seed_oss",
         "nemotron", "internlm2", "internlm3"),
        _full,
    ),
    **dict.fromkeys(("mistral", "mixtral", "phi3", "starcoder2"), _plain),
    # qwen2_vl and qwen2_5_vl: their config.json, with the text part's keys at its top
    **dict.fromkeys(
        ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen2_vl_text", "qwen2_5_vl_text",
         "qwen2_vl", "qwen2_5_vl"),
        _switched_window,
    ),
    **dict.fromkeys(("gemma2", "gpt_oss"), _mixed(2)),
    "gemma3_text": _mixed(),
    **dict.fromkeys(("gemma3n_text", "gemma4_text"), _gemma_shared),
    "cohere2": _cohere2,
    "llama4_text": _llama4,
    **dict.fromkeys(("gpt_bigcode", "falcon"), _multi_query),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k2"), latent),
    "nemotron-nas": _per_layer_heads,
    "mimo_v2_flash": _two_sizes,
    "jamba": sizing_state.jamba,
    **dict.fromkeys(("mamba", "falcon_mamba"), sizing_state.pure_mamba1),
    "mamba2": sizing_state.pure_mamba2,
    "granitemoehybrid": sizing_state.granite_hybrid,
    "falcon_h1": sizing_state.falcon_h1,
    "nemotron_h": sizing_state.nemotron_h,
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), sizing_state.gated_delta),
    "lfm2": sizing_state.lfm2,
    "lfm2_moe": sizing_state.lfm2_moe,
    "kimi_linear": sizing_state.kimi_linear,
    "whisper": _whisper,
}  # fmt: skip
