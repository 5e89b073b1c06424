"""What a model's directory says of itself, for report.py and `kvhost size`. Reads headers alone.

Which files count is vLLM 0.32's rule (model_loader/default_loader.py): consolidated*.safetensors
where there are any, else all *.safetensors; of these, those that their index names if it is there.
"""

from __future__ import annotations

import json
import os
from typing import Any

Data = dict[str, Any]
OLD_QUANTIZATION = "hf_quant_config.json"
SUFFIX, CONSOLIDATED = ".safetensors", "consolidated"
#: bytes: of a header that is read, of an index
MOST_HEADER, MOST_INDEX = 1 << 25, 1 << 27


def config_of(path: str) -> Any:
    """The config.json at this path. ModelOpt's older form has a file beside it for how the model is
    quantised, which vLLM reads where config.json says nothing of that. Raises OSError, ValueError,
    RecursionError."""
    config = _json(path)
    beside = os.path.join(os.path.dirname(path), OLD_QUANTIZATION)
    silent = isinstance(config, dict) and config.get("quantization_config") is None
    if silent and os.path.isfile(beside):
        config["quantization_config"] = _json(beside)
    return config


def weights_of(folder: str) -> Data:
    """{"dtypes": {dtype as safetensors names it: bytes}, "missing": [file], "total_size": bytes as
    the index says them, or None}. "?" are the bytes of files whose header cannot be read. An index
    that makes no sense counts as none. Raises OSError."""
    there = {name for name in os.listdir(folder) if name.endswith(SUFFIX) and name[0] != "."}
    consolidated = {name for name in there if name.startswith(CONSOLIDATED)}
    used = consolidated or there
    kind = CONSOLIDATED if consolidated else "model"
    wanted, total = _index(os.path.join(folder, f"{kind}.safetensors.index.json"))
    dtypes: dict[str, int] = {}
    for name in sorted(used & wanted if wanted else used):
        for dtype, count in _dtypes(os.path.join(folder, name)).items():
            dtypes[dtype] = dtypes.get(dtype, 0) + count
    return {"dtypes": dtypes, "missing": sorted(wanted - used), "total_size": total}


def _json(path: str) -> Any:
    with open(path, encoding="utf-8") as handle:
        return json.load(handle)


def _index(path: str) -> tuple[set[str], int | None]:
    """The files that it names, and the bytes of all tensors."""
    try:
        if os.stat(path).st_size > MOST_INDEX:
            return set(), None
        told = _json(path)
        names = {str(name) for name in told["weight_map"].values()} if "weight_map" in told else ()
        total = (told.get("metadata") or {}).get("total_size")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return set(), None
    if not isinstance(total, (int, float)) or isinstance(total, bool) or not 0 < total < 2**63:
        return set(names), None
    return set(names), int(total)


def _dtypes(path: str) -> dict[str, int]:
    """Bytes of its tensors by dtype. Raises OSError."""
    size = os.stat(path).st_size
    with open(path, "rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        if not 2 <= length <= min(MOST_HEADER, size):
            return {"?": size}
        text = handle.read(length)
    found: dict[str, int] = {}
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        for tensor in header.values():
            begin, end = (int(place) for place in tensor["data_offsets"])
            dtype = str(tensor["dtype"])
            if not 0 <= begin <= end < 2**63:
                return {"?": size}
            found[dtype] = found.get(dtype, 0) + end - begin
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return {"?": size}
    return found
