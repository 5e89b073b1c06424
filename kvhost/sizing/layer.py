"""One layer's cache, and how config.json's keys are read: for the readers of each family. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Config = Mapping[str, Any]
Reader = Callable[[Config], list["Layer"]]
#: full: every token is kept. window: the last ``window`` tokens. latent: one vector for all heads
#: (MLA), the same on every rank. cross: the encoder's tokens. state: a fixed size for a sequence.
Kind = Literal["full", "window", "latent", "cross", "state"]


class UnknownArchitecture(ValueError):
    """Says what of a config.json is not known here, and what to do."""


@dataclass(frozen=True)
class Layer:
    """``count`` layers alike.

    Attention: ``heads`` KV heads of ``width`` elements each, K and V together, for a token.
    State: ``convolution`` and ``recurrent`` elements for a sequence, whatever its length, and
    ``groups`` of ``group`` elements more, which several ranks hold one each of if they are fewer.
    """

    kind: Kind
    count: int = 1
    heads: int = 0
    width: int = 0
    #: tokens: of a window, or of the encoder (cross)
    window: int | None = None
    convolution: int = 0
    recurrent: int = 0
    groups: int = 0
    group: int = 0
    #: the recurrent state's dtype where the model or the engine fixes it
    recurrent_dtype: str | None = None


#: no model has a larger size of anything, and none has so many layers
_LARGEST, _MOST_LAYERS = 10**9, 10_000


def maybe(config: Config, *names: str) -> int | None:
    """The first of these keys that is there and not null. Raises ValueError if it is no number of
    0 and more: what is there and not understood is never taken for what is not there."""
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(f"{name} is of type {type(value).__name__}, and must be whole")
        if not 0 <= value <= _LARGEST:
            raise ValueError(f"{name} is {'below 0' if value < 0 else f'above {_LARGEST}'}")
        return value
    return None


def number(config: Config, *names: str) -> int:
    """As maybe, above zero. Raises KeyError too."""
    value = maybe(config, *names)
    if value is None:
        raise KeyError(names[0])
    if value <= 0:
        raise ValueError(f"{names[0]} = {value}, which is not above zero")
    return value


def layer_count(config: Config, *names: str) -> int:
    names = names or ("num_hidden_layers", "n_layer", "num_layers")
    count = number(config, *names)
    if count > _MOST_LAYERS:
        raise ValueError(f"{names[0]} is {count}, which no model has")
    return count


def head_count(config: Config) -> int:
    return number(config, "num_attention_heads", "n_head")


def head_size(config: Config) -> int:
    """Elements of one head; hidden size over heads where config.json names none."""
    told = maybe(config, "head_dim", "attention_head_dim")
    if told is not None:
        return number(config, "head_dim", "attention_head_dim")
    hidden, heads = number(config, "hidden_size", "n_embd"), head_count(config)
    if hidden % heads:
        raise ValueError(f"hidden size {hidden} is no multiple of {heads} heads, and no head_dim")
    return hidden // heads


def attention(config: Config, window: int | None = None) -> Layer:
    """MHA, GQA or MQA, with K and V of one size. What a family has where config.json says nothing
    was filled in before (defaults.py): KV heads that are not named now are those of the query."""
    heads = maybe(config, "num_key_value_heads", "num_kv_heads")
    if heads is None:
        heads = head_count(config)
    queries = maybe(config, "num_attention_heads", "n_head")
    if not heads or (queries and queries % heads):
        raise ValueError(f"{queries} attention heads cannot share {heads} KV heads")
    kind: Kind = "full" if window is None else "window"
    return Layer(kind, heads=heads, width=2 * head_size(config), window=window)


def of_kind(config: Config, kind: str) -> Layer:
    """A layer by its name in layer_types."""
    if kind in ("full_attention", "attention"):
        return attention(config)
    if kind == "sliding_attention":
        return attention(config, number(config, "sliding_window"))
    if kind == "chunked_attention":
        return attention(config, number(config, "attention_chunk_size"))
    raise ValueError(f"a layer of type {kind!r}, which is not known here")


def whole(config: Config, kinds: list[Any]) -> list[Any]:
    if len(kinds) != layer_count(config):
        raise ValueError(f"{len(kinds)} kinds of layers for {layer_count(config)} layers")
    return kinds


def latent(config: Config) -> list[Layer]:
    """MLA: the latent vector and the rotated part, one of each a token, for all heads."""
    width = number(config, "kv_lora_rank") + number(config, "qk_rope_head_dim")
    return [Layer("latent", heads=1, width=width)] * layer_count(config)
