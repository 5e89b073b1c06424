"""Bytes that a model's weights take in memory, from what model_look.py found of its files. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from kvhost.sizing.kv_bytes import DTYPE_BYTES

#: bytes of an element: what vLLM loads in the dtype that it computes in
_FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
#: as config.json names them
_NAMED = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
#: config.json's keys of a model that is quantised: its dtypes are kept as they are
_QUANTIZED = ("quantization_config", "compression_config")


def weights_in_memory(told: Mapping[str, Any], config: Mapping[str, Any], dtype: str) -> int | None:
    """``dtype``: what the engine computes in. None where it cannot be told: there are none, or some
    are missing and no index says how large all are."""
    stored = sum(told["dtypes"].values())
    share = _share(told["dtypes"], config, dtype)
    if told["missing"] or not stored:
        return None if told["total_size"] is None else int(told["total_size"] * share)
    return int(stored * share)


def _share(stored: Mapping[str, int], config: Mapping[str, Any], dtype: str) -> Fraction:
    """Bytes in memory for each that is stored."""
    text = config.get("text_config")
    places = (config, text if isinstance(text, Mapping) else {})
    if any(place.get(key) is not None for place in places for key in _QUANTIZED):
        return Fraction(1)
    if not sum(stored.values()):  # an index alone: they are what config.json says
        named = [place.get(key) for place in places for key in ("dtype", "torch_dtype")]
        name = next((str(one).removeprefix("torch.") for one in named if one is not None), "")
        stored = {_NAMED.get(name, "?"): 1}
    loaded = sum(
        Fraction(count * DTYPE_BYTES[dtype], _FLOATS[kind]) if kind in _FLOATS else count
        for kind, count in stored.items()
    )
    return Fraction(loaded) / sum(stored.values())
