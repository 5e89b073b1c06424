"""Models with layers that keep a state of fixed size: state-space models, linear attention. Pure.

The shapes are those of vLLM 0.32 (model_executor/layers/mamba/mamba_utils.py and the models).
"""

from __future__ import annotations

from kvhost.sizing.layer import (
    Config,
    Layer,
    attention,
    latent,
    layer_count,
    maybe,
    number,
    of_kind,
    whole,
)


def _mamba1(inner: int, state: int, kernel: int) -> Layer:
    return Layer("state", convolution=inner * (kernel - 1), recurrent=inner * state)


def _mamba2(config: Config, inner: int, names: tuple[str, str, str, str, str]) -> Layer:
    """``names``: of heads, head size, groups, state size, kernel."""
    heads, size, groups, state, kernel = (number(config, name) for name in names)
    return Layer(
        "state",
        heads=heads,
        convolution=inner * (kernel - 1),
        recurrent=heads * size * state,
        groups=groups,
        group=2 * state * (kernel - 1),
    )


_MAMBA2 = ("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv")


def jamba(config: Config) -> list[Layer]:
    inner = number(config, "mamba_expand") * number(config, "hidden_size")
    state = _mamba1(inner, number(config, "mamba_d_state"), number(config, "mamba_d_conv"))
    period, offset = number(config, "attn_layer_period"), int(config["attn_layer_offset"])
    return [
        attention(config) if index % period == offset else state
        for index in range(layer_count(config))
    ]


def pure_mamba1(config: Config) -> list[Layer]:
    inner = maybe(config, "intermediate_size") or (
        number(config, "expand") * number(config, "hidden_size", "d_model")
    )
    state = _mamba1(inner, number(config, "state_size"), number(config, "conv_kernel"))
    return [state] * layer_count(config)


def pure_mamba2(config: Config) -> list[Layer]:
    inner = number(config, "expand") * number(config, "hidden_size")
    names = ("num_heads", "head_dim", "n_groups", "state_size", "conv_kernel")
    return [_mamba2(config, inner, names)] * layer_count(config)


def granite_hybrid(config: Config) -> list[Layer]:
    inner = number(config, "mamba_expand") * number(config, "hidden_size")
    state = _mamba2(config, inner, _MAMBA2)
    return [
        state if kind in ("mamba", "linear_attention") else of_kind(config, kind)
        for kind in whole(config, config["layer_types"])
    ]


def falcon_h1(config: Config) -> list[Layer]:
    """Attention and a state in every layer, side by side."""
    inner = maybe(config, "mamba_d_ssm") or (
        number(config, "mamba_expand") * number(config, "hidden_size")
    )
    return [attention(config), _mamba2(config, inner, _MAMBA2)] * layer_count(config)


def nemotron_h(config: Config) -> list[Layer]:
    """A letter a layer: M a state, * attention, - and E neither (MLP, experts)."""
    inner = number(config, "mamba_num_heads") * number(config, "mamba_head_dim")
    names = ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel")
    state = _mamba2(config, inner, names)
    dtype = str(config.get("mamba_ssm_cache_dtype") or "float32")  # vLLM's default for it
    state = Layer(**{**state.__dict__, "recurrent_dtype": dtype})
    found = []
    for letter in str(config["hybrid_override_pattern"]):
        if letter == "M":
            found.append(state)
        elif letter == "*":
            found.append(attention(config))
        elif letter not in "-E":
            raise ValueError(f"hybrid_override_pattern has {letter!r}, which is not known here")
    return found


def gated_delta(config: Config) -> list[Layer]:
    """Qwen3-Next and 3.5: gated delta net in the layers that are not full attention."""
    keys, values = (
        number(config, "linear_num_key_heads"),
        number(config, "linear_num_value_heads"),
    )
    key, value = number(config, "linear_key_head_dim"), number(config, "linear_value_head_dim")
    kernel = number(config, "linear_conv_kernel_dim")
    dtype = config.get("mamba_ssm_dtype")
    state = Layer(
        "state",
        heads=values,
        convolution=(2 * keys * key + values * value) * (kernel - 1),
        recurrent=values * value * key,
        recurrent_dtype=str(dtype) if dtype else None,
    )
    kinds = config.get("layer_types")
    if kinds is None:
        every = number(config, "full_attention_interval")
        kinds = [
            "linear_attention" if (index + 1) % every else "full_attention"
            for index in range(layer_count(config))
        ]
    return [
        state if kind == "linear_attention" else of_kind(config, kind)
        for kind in whole(config, kinds)
    ]


def lfm2(config: Config) -> list[Layer]:
    return _short_convolution(config, number(config, "conv_dim"))


def lfm2_moe(config: Config) -> list[Layer]:
    return _short_convolution(config, number(config, "hidden_size"))


def _short_convolution(config: Config, channels: int) -> list[Layer]:
    """A short convolution keeps its last inputs, and nothing else."""
    state = Layer("state", convolution=channels * (number(config, "conv_L_cache") - 1))
    kinds = config.get("layer_types")
    if kinds is None:
        attending = {int(index) for index in config["full_attn_idxs"]}
        kinds = ["full_attention" if i in attending else "conv" for i in range(layer_count(config))]
    return [state if kind == "conv" else of_kind(config, kind) for kind in whole(config, kinds)]


def kimi_linear(config: Config) -> list[Layer]:
    """Kimi Delta Attention with its recurrent state in float32 (vLLM), and MLA; counted from 1."""
    linear = config["linear_attn_config"]
    heads, size = number(linear, "num_heads"), number(linear, "head_dim")
    state = Layer(
        "state",
        heads=heads,
        convolution=3 * heads * size * (number(linear, "short_conv_kernel_size") - 1),
        recurrent=heads * size * size,
        recurrent_dtype="float32",
    )
    attending = {int(index) for index in linear["full_attn_layers"]}
    full = latent(config)[0]
    return [full if i + 1 in attending else state for i in range(layer_count(config))]
