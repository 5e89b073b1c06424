"""Settings that mean nothing with the runner Ollama, or with another one, or not together."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from kvhost.schema.ollama import OllamaSettings
from kvhost.schema.problems import Problem
from kvhost.schema.values import is_loopback, is_ollama_name

if TYPE_CHECKING:
    from kvhost.schema.settings import Settings

_Found = Iterator[tuple[frozenset[str], Problem]]
_NO_TIER = "Ollama keeps no KV on disk, so that there is no tier"
_NO_SERVER = "there is no cache server beside Ollama"
_VLLM = "it is of vLLM's"
_ONE = "Ollama is one server for all of its models"
_SHARED = "Ollama keeps no KV that hosts could share"
_GPU = "Ollama shares out the GPUs itself"
_NO_TEST = "nothing of a restart is tested: Ollama keeps no KV on disk"
#: setting -> why it means nothing
MEANINGLESS = {
    **dict.fromkeys(
        ("tier_dir", "cache_limit_gib", "cache_high_watermark", "cache_low_watermark"), _NO_TIER
    ),
    **dict.fromkeys(("free_floor_gib", "pruner_interval_s", "cache_kind", "l2_adapter"), _NO_TIER),
    **dict.fromkeys(
        ("l1_gib", "chunk_size", "cache_port", "cache_http_port", "heartbeat_s", "mq_timeout_s"),
        _NO_SERVER,
    ),
    **dict.fromkeys(
        ("runner_extra_args", "engine_lock", "engine_wheel", "engine_bundle", "python", "drain_s"),
        _VLLM,
    ),
    "engine_kv_gib": "Ollama takes memory for KV by context length and ollama_num_parallel",
    "dtype": "the GGUF decides it",
    "kv_cache_dtype": "with Ollama it is ollama_kv_cache_type",
    "model_revision": "with Ollama it is ollama_model_digest",
    "hf_token_file": "the model is pulled by Ollama",
    "hf_endpoint": "the model is pulled by Ollama",
    "api_key_file": "Ollama's API asks for no key",
    "served_model_name": "clients ask Ollama for the model's own name",
    "more_runners": _ONE,
    "verify_runner": _ONE,
    **dict.fromkeys(("gpus", "gpu_memory_share", "tensor_parallel_size"), _GPU),
    **dict.fromkeys(
        (
            "shared_tier",
            "shared_tier_ca_file",
            "shared_tier_access_key",
            "shared_tier_region",
            "shared_tier_timeout_s",
        ),
        _SHARED,
    ),
    "shared_tier_password_file": f"{_SHARED}, and this host has no store for others "
    "(shared_store_address)",
    **dict.fromkeys(
        ("monitoring", "monitoring_textfile_dir"),
        "its figures are of vLLM, the cache server and the tier",
    ),
    "accelerator": "Ollama chooses itself what it computes on",
    **dict.fromkeys(
        (
            *("driver_install", "driver_reboot", "driver_version"),
            *("driver_repository", "driver_repository_key"),
        ),
        "kvhost installs no driver for it in this version",
    ),
    "remove_cache": _NO_TIER,
    "reboot_local": _NO_TEST,
    "retry_failed": "an archive that does not come up is not gone back from",
    **dict.fromkeys(("verify_prompt_tokens", "verify_min_hit", "verify_events"), _NO_TEST),
}


def ollama_problems(s: Settings) -> _Found:
    """Yield the keys that a rule looks at, and what is wrong with them together."""
    if s.runner != "ollama":
        yield from _of_another_runner(s)
        return
    of_a_store = {"shared_tier_password_file"} if s.shared_store_address is not None else set()
    for key in given(s, MEANINGLESS.keys() - of_a_store):
        yield _found(("runner", key), f"{key} means nothing: {MEANINGLESS[key]}", f"{key} left out")
    yield from _model(s)
    yield from _flash(s)
    yield from _open(s)


def given(s: Settings, keys: Iterable[str]) -> list[str]:
    """Those that were given; a default that is written out asks for nothing."""
    there = s.model_fields_set & set(keys)
    return sorted(key for key in there if getattr(s, key) != type(s).model_fields[key].default)


def _of_another_runner(s: Settings) -> _Found:
    for key in given(s, OllamaSettings.model_fields):
        what = f"{key} means nothing with runner = {s.runner!r}"
        yield _found(("runner", key), what, f"{key} left out, or runner = 'ollama'")
    if is_ollama_name(s.model_source):
        what = f"{s.model_source!r} is a model of Ollama's library"
        yield _found(("runner", "model_source"), what, "runner = 'ollama', or org/name on the hub")


#: a part of a split model, as llama.cpp names them
_PART = re.compile(r"-\d{5}-of-(?!00001\.)\d{5}\.gguf$", re.IGNORECASE)


def _model(s: Settings) -> _Found:
    if s.model_source.startswith("/") and _PART.search(s.model_source):
        yield _found(
            ("runner", "model_source"),
            "a part of a split model is named, and Ollama makes a model of one file",
            "one file: llama-gguf-split --merge puts them together; or runner = 'llama_server'",
        )
    if is_ollama_name(s.model_source) or s.model_source.startswith("/"):
        return
    named = "builtin (the default)" if s.model_source == "builtin" else repr(s.model_source)
    yield _found(
        ("runner", "model_source"),
        f"{named} is no model for Ollama, which takes a name of its library with a tag, or a GGUF",
        "model_source = 'llama3.2:3b', or the absolute path of a GGUF on the host",
    )


def _flash(s: Settings) -> _Found:
    if s.ollama_flash_attention == "off" and s.ollama_kv_cache_type != "f16":
        yield _found(
            ("ollama_flash_attention", "ollama_kv_cache_type"),
            f"a KV of {s.ollama_kv_cache_type} needs flash attention; Ollama would go back to f16",
            "ollama_flash_attention = 'on', or ollama_kv_cache_type = 'f16'",
        )


def _open(s: Settings) -> _Found:
    if not is_loopback(s.api_host) and not s.ollama_open:
        yield _found(
            ("api_host", "ollama_open"),
            f"on {s.api_host} everybody who reaches it may use, pull and delete models: Ollama "
            "asks for no key",
            "api_host = '127.0.0.1' and a proxy or tunnel in front, or ollama_open = true",
        )


def _found(keys: tuple[str, ...], what: str, write: str) -> tuple[frozenset[str], Problem]:
    return frozenset(keys), Problem(", ".join(keys), what, write)
