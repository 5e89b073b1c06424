"""Settings that mean nothing for the chosen runner: given, they are refused, never ignored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from kvhost.schema.llama import LlamaSettings
from kvhost.schema.ollama import OllamaSettings
from kvhost.schema.ollama_combinations import MEANINGLESS
from kvhost.schema.problems import Problem, short

if TYPE_CHECKING:
    from kvhost.schema.settings import Settings

_Found = Iterator[tuple[frozenset[str], Problem]]

#: settings of vLLM and of its cache server -> why they mean nothing to llama-server
NOT_LLAMA: Mapping[str, str] = {
    "engine_wheel": "it is vLLM's wheel; llama_binary takes a llama-server of your own",
    "engine_bundle": "bundles hold vLLM, in this version",
    "engine_kv_gib": "its KV memory is max_model_len times llama_slots",
    "dtype": "a .gguf file holds its types",
    "kv_cache_dtype": "its KV has llama_cache_type_k and llama_cache_type_v",
    "hf_token_file": "models are not fetched from the hub for it in this version",
    "hf_endpoint": "models are not fetched from the hub for it in this version",
    "model_revision": "models are not fetched from the hub for it in this version",
    "cache_kind": "it keeps its KV in files of its slots",
    "l2_adapter": "it has no cache server, its files are written by itself",
    "chunk_size": "its cache has whole prompts, no chunks",
    "cache_port": "it has no cache server",
    "cache_http_port": "it has no cache server",
    "heartbeat_s": "it has no cache server",
    "mq_timeout_s": "it has no cache server",
    **dict.fromkeys(
        (
            *("shared_tier", "shared_tier_ca_file", "shared_tier_timeout_s"),
            *("shared_tier_access_key", "shared_tier_region"),
        ),
        "it has no cache server",
    ),
    "drain_s": "it ends requests at once when it is stopped",
    "tensor_parallel_size": "GPUs are not in this version for it",
    "gpus": "GPUs are not in this version for it",
    "gpu_memory_share": "GPUs are not in this version for it",
    "more_runners": "one llama-server a host; llama_slots is how many prompts it works on",
    "verify_runner": "there is one runner",
    **dict.fromkeys(
        ("monitoring", "monitoring_textfile_dir"),
        "its figures are of vLLM and its cache server, in this version",
    ),
    **dict.fromkeys(
        (
            *("driver_install", "driver_reboot", "driver_version"),
            *("driver_repository", "driver_repository_key"),
        ),
        "GPUs are not in this version for it",
    ),
    "reboot_local": "of the restart test's events it has no reboot",
}
#: what is written of a runner -> settings that mean nothing with it
_NOTHING_WITH: Mapping[str, frozenset[str]] = {
    "vLLM": frozenset({*LlamaSettings.model_fields, *OllamaSettings.model_fields}),
    "llama-server": frozenset({*NOT_LLAMA, *OllamaSettings.model_fields}),
    "Ollama": frozenset({*MEANINGLESS, *LlamaSettings.model_fields}),
}
#: of the restart test
LLAMA_EVENTS = ("both", "kill")


def runners_with(key: str) -> tuple[str, ...]:
    """The runners that a setting means something with, as people call them; with another one it is
    refused. Empty: with every one."""
    found = tuple(title for title, nothing in _NOTHING_WITH.items() if key not in nothing)
    return () if len(found) == len(_NOTHING_WITH) else found


def kind_problems(s: Settings) -> _Found:
    """Yield the keys that a rule looks at, and what is wrong with them together."""
    # a default that is written out asks for nothing
    fields = type(s).model_fields
    given = {key for key in s.model_fields_set if getattr(s, key) != fields[key].default}
    if s.runner != "llama_server":
        for key in sorted(set(LlamaSettings.model_fields) & given):
            yield _found(
                (key, "runner"),
                f"is a setting of llama-server, and runner is {s.runner}",
                f"{key} left out, or runner = 'llama_server'",
            )
        return
    for key in sorted(set(NOT_LLAMA) & given):
        what = f"means nothing with runner = 'llama_server': {NOT_LLAMA[key]}"
        yield _found((key, "runner"), what, f"{key} left out")
    yield from _model(s)
    yield from _events(s)


def _model(s: Settings) -> _Found:
    source = s.model_source
    if source != "builtin" and not (source.startswith("/") and source.endswith(".gguf")):
        yield _found(
            ("model_source", "runner"),
            f"llama-server reads a .gguf file, and {short(source)} is no path of one on the host",
            "model_source = '/srv/models/llama-8b-q4_k_m.gguf', or 'builtin'",
        )


def _events(s: Settings) -> _Found:
    wrong = [event for event in s.verify_events if event not in LLAMA_EVENTS]
    if wrong:
        yield _found(
            ("verify_events", "runner"),
            f"has {', '.join(wrong)}; of llama-server there are {', '.join(LLAMA_EVENTS)}",
            "verify_events = ['both']",
        )


def _found(keys: tuple[str, ...], what: str, write: str) -> tuple[frozenset[str], Problem]:
    return frozenset(keys), Problem(", ".join(keys), what, write)
