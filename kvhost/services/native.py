"""vLLM's own tiering (cache_kind native): what vLLM is told of it. Pure functions of settings.

vLLM keeps KV in a memory of its own and copies whole chunks of it to files, of which every lookup
asks anew whether they are there. There is no server, no port and no registration (docs/native.md).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from kvhost.settings import Settings

#: versions of vLLM whose tiering was read and tried; its interface calls itself experimental
VLLM_TRIED = ("0.32.",)
#: files of another size than a whole number of these are no chunk: vLLM rounds up to a page
PAGE_BYTES = 4096
#: module in lib/ with vLLM's own class for a CPU, which stock vLLM refuses
MODULE, CLASS = "kvhost_offload", "KvhostTieringSpec"
#: patterns in /dev/shm of what a killed engine leaves (vllm/v1/kv_offload/cpu)
SHM = "vllm_offload_*.mmap"


def transfer_config(settings: Settings, namespace_dir: str, *, cuda: bool) -> Mapping[str, Any]:
    """vLLM's --kv-transfer-config. It names the namespace, so that it stands in the command line
    and not in vLLM's file: that is rendered before the engine has told the namespace."""
    spec = {"spec_name": "TieringOffloadingSpec"}
    if not cuda:
        spec = {"spec_name": CLASS, "spec_module_path": MODULE}
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            **spec,
            "cpu_bytes_to_use": settings.l1_gib << 30,
            "block_size": settings.chunk_size,
            "secondary_tiers": [{"type": "fs", "root_dir": namespace_dir}],
        },
    }


def transfer_words(settings: Settings, namespace_dir: str, *, cuda: bool) -> tuple[str, ...]:
    """The same as arguments of vllm serve."""
    config = transfer_config(settings, namespace_dir, cuda=cuda)
    return "--kv-transfer-config", json.dumps(config, sort_keys=True)


def too_little_memory(settings: Settings, chunk_bytes: int | None) -> str | None:
    """Why a prompt may hang, by the engine's own word on a chunk's size; None: it cannot, or the
    size is not known. The plan's l1_too_small says it before, where the model is known."""
    if not settings.native or chunk_bytes is None:
        return None
    needed = math.ceil(settings.max_model_len / settings.chunk_size) * chunk_bytes
    if needed <= settings.l1_gib << 30:
        return None
    return (
        f"l1_gib = {settings.l1_gib} holds no whole prompt of max_model_len = "
        f"{settings.max_model_len} tokens, and a request with one would hang: "
        f"l1_gib = {math.ceil(needed / (1 << 30))}, or a smaller max_model_len"
    )


def native_notes(settings: Settings, *, cuda: bool) -> list[str]:
    """What a plan says of it."""
    if not settings.native:
        return []
    how = (
        "vLLM's own class runs it, as its maintainers describe it for GPUs; kvhost has tested it "
        "on CPUs only (docs/testing.md)"
        if cuda
        else "stock vLLM refuses it on a CPU, so that the copying is done by kvhost's "
        f"lib/{MODULE}.py, through the hook that vLLM has for it and calls experimental"
    )
    return [f"The cache is vLLM's own tiering (cache_kind native), without a cache server: {how}."]
