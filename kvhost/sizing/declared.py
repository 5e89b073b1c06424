"""The KV dtype that a checkpoint declares, which is what vLLM 0.32 makes of "auto". Pure.

By utils/torch_utils.py (resolve_kv_cache_dtype_string: ModelOpt), model_executor/layers/attention/
attention.py and quantization/compressed_tensors (a kv_cache_scheme), and transformers_utils/
model_arch_config_convertor.py (how the method is called).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvhost.sizing.arch import Architecture
from kvhost.sizing.layer import Config, UnknownArchitecture

#: quant_algo of ModelOpt's older form -> the method's name
_OLD_MODELOPT = {
    **dict.fromkeys(("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO"), "modelopt"),
    "NVFP4": "modelopt_fp4",
}
#: what to do about one that is not known
_INSTEAD = "say which KV dtype is served (--kv-dtype, kv_cache_dtype)"


def declared_kv_dtype(config: Config, found: Architecture) -> str | None:
    """None where nothing is declared: the cache is kept in the dtype of the computation then.

    Raises UnknownArchitecture for a scheme that vLLM refuses, or that is not known here.
    """
    top = _object(config, "quantization_config")
    if top is not None and _method(top).startswith("modelopt"):
        return _of_modelopt(top)
    told = top
    if told is None and isinstance(config.get("text_config"), Mapping):
        told = _object(config["text_config"], "quantization_config")
    if told is None:
        told = _object(config, "compression_config")
    # of MLA vLLM heeds ModelOpt's word alone
    latent = any(layer.kind == "latent" for layer in found.layers)
    if told is None or _method(told) != "compressed-tensors" or latent:
        return None
    return _of_compressed_tensors(told)


def _object(config: Config, key: str) -> Config | None:
    found = config.get(key)
    if not isinstance(found, Mapping | None):
        raise UnknownArchitecture(f"{key} of config.json is no object")
    return found


def _method(quantization: Config) -> str:
    producer = _object(quantization, "producer") or {}
    inner = quantization.get("quantization")
    old = isinstance(inner, Mapping) and "modelopt_quant_config" in inner
    if producer.get("name") == "modelopt" or old:
        algorithm = inner.get("quant_algo") if isinstance(inner, Mapping) else None
        if algorithm is not None:
            if str(algorithm).upper() not in _OLD_MODELOPT:
                raise UnknownArchitecture(f"quant_algo {algorithm!r:.40} of ModelOpt: not known")
            return _OLD_MODELOPT[str(algorithm).upper()]
    method = str(quantization.get("quant_method") or "").lower()
    return method.replace("compressed_tensors", "compressed-tensors")


def _of_modelopt(quantization: Config) -> str | None:
    inner = quantization.get("quantization", quantization)
    places = (inner if isinstance(inner, Mapping) else {}, quantization)
    told = (
        place.get(key) for key in ("kv_cache_scheme", "kv_cache_quant_algo") for place in places
    )
    scheme = next((one for one in told if one), None)
    if scheme is None:
        return None
    if isinstance(scheme, Mapping):
        kind = (scheme.get("num_bits"), scheme.get("type"))
        if kind == (8, "float") and scheme.get("dynamic") is False:
            scheme = "fp8"
    if isinstance(scheme, str) and scheme.lower() == "fp8":
        return "fp8_e4m3"
    raise _unknown(scheme)


def _of_compressed_tensors(quantization: Config) -> str | None:
    scheme = _object(quantization, "kv_cache_scheme")
    if scheme is None:
        return None
    kind = (scheme.get("num_bits"), scheme.get("type"))
    fine = kind == (8, "float") and scheme.get("strategy") in ("tensor", "attn_head")
    if not fine or not scheme.get("symmetric"):
        raise _unknown(dict(scheme))
    return "fp8"


def _unknown(scheme: Any) -> UnknownArchitecture:
    return UnknownArchitecture(
        f"its checkpoint declares a KV cache of {str(scheme)[:120]!r}, which is not known here: "
        + _INSTEAD
    )
