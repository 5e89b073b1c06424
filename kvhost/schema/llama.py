"""Settings of the runner llama_server: which binary, its slots, the types of its KV, its saving."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator

from kvhost.schema import values as _values
from kvhost.schema.field import Flat, setting

_LLAMA = "llama-server"

#: names that llama-server takes for --cache-type-k and -v (common/arg.cpp, kv_cache_types)
CacheType = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"]
_Binary = Annotated[str, AfterValidator(_values.program_source)]


class LlamaSettings(Flat):
    """They mean something with runner = "llama_server" alone (kvhost/schema/runner_kinds.py)."""

    llama_binary: _Binary | None = setting(
        _LLAMA,
        None,
        "A llama-server of your own in the place of the one that kvhost builds: an absolute path "
        "on the host, or the URL of a binary or a .tar.gz with it, and the digest of that file.",
        example=f"/opt/llama.cpp/bin/llama-server#sha256={'0' * 64}",
    )
    llama_slots: int = setting(
        _LLAMA,
        2,
        "Prompts that llama-server keeps and works on at the same time; each has max_model_len "
        "tokens of KV memory of its own.",
        unit="slots",
        example=4,
        ge=1,
        le=64,
    )
    llama_cache_type_k: CacheType = setting(
        _LLAMA,
        "f16",
        "Type that llama-server keeps K in; another one begins a new cache.",
        example="q8_0",
    )
    llama_cache_type_v: CacheType = setting(
        _LLAMA,
        "f16",
        "Type that llama-server keeps V in; another one begins a new cache.",
        example="q8_0",
    )
    llama_save_interval_s: float = setting(
        _LLAMA,
        300.0,
        "How often slots whose prompt has changed are saved, each as a whole; they are always "
        "saved before llama-server stops.",
        unit="seconds",
        example=60.0,
        ge=1,
        le=86_400,
    )
