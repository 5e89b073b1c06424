"""What people ask for that kvhost does not do (yet), and what to write instead."""

from __future__ import annotations

from kvhost.schema.problems import Refusal

_LATER = "is not in this version"

_CACHE_KINDS = {
    "local_disk": (
        "local_disk does not survive a restart in any release of LMCache: its index is kept in "
        "memory and starts empty, so files of before are never found, never counted and never "
        "deleted (LMCache#562, #1175, #2273)"
    ),
}
_L2_ADAPTERS = {
    "nixl_store_dynamic": (
        "nixl_store_dynamic never stores again what the pruner removed, until it is restarted "
        "(measured, docs/l2-adapters.md)"
    ),
}

# Keys that are tried and are not settings: what is wrong, and the line to write.
NOT_SETTINGS: dict[str, tuple[str, str]] = {
    "trust_remote_code": (
        "is not a setting: code that comes with a model is never run",
        "nothing; choose a model that vLLM knows itself",
    ),
    "enable_lora": (
        "is not a setting: adapters share the keys of the cache, so that one would read the KV of "
        "another (vllm#44250)",
        "nothing; serve the merged weights by model_source",
    ),
    "swap_space": ("is gone from vLLM since 0.22", "nothing; memory for KV is l1_gib"),
    "local_disk": (f"is not a setting: {_CACHE_KINDS['local_disk']}", "cache_kind = 'mp'"),
    "max_local_disk_size": ("is LMCache's, and not kept to", "cache_limit_gib = 20.0"),
    "quantization": (
        "is not a setting of its own",
        "runner_extra_args = ['--quantization', 'fp8']",
    ),
}
# Names that people know from elsewhere, and the setting that they mean.
OTHER_NAMES: dict[str, str] = {
    "cache_dir": "tier_dir",
    "cache_size": "cache_limit_gib",
    "context_length": "max_model_len",
    "gpu_memory_utilization": "gpu_memory_share",
    "host": "api_host",
    "lock": "engine_lock",
    "model": "model_source",
    "model_name": "served_model_name",
    "port": "api_port",
    "runners": "more_runners",
    "revision": "model_revision",
    "tp": "tensor_parallel_size",
    "user": "service_user",
    "vllm_args": "runner_extra_args",
}


def cache_kind_in_this_version(value: object) -> object:
    """Refuse, with the reason, a kind of cache that is known and not supported."""
    if isinstance(value, str) and value in _CACHE_KINDS:
        raise Refusal(_CACHE_KINDS[value], "mp")
    return value


def l2_adapter_in_this_version(value: object) -> object:
    """Refuse, with the reason, an adapter of LMCache that does not do for kvhost."""
    if isinstance(value, str) and value in _L2_ADAPTERS:
        raise Refusal(_L2_ADAPTERS[value], "fs_native")
    return value
