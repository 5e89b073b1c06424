"""Which directory the KV cache lies in: the digest of everything that decides what its bytes mean.

LMCache's own key holds the model's name, the world size and the tokens, and nothing of dtype,
weights or versions; a file of another size loads with success (docs/architecture.md). So each
meaning gets a directory of its own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvhost.services.native import PAGE_BYTES
from kvhost.sizing.kv_bytes import DTYPE_BYTES, attention_bytes


def digest_of(data: object) -> str:
    """sha256 (hex) of canonical JSON."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def input_digest(
    vllm_config: str,
    extra_args: Sequence[str],
    model_digest: str,
    env_digest: str,
    *,
    cache_args: Sequence[str],
) -> str:
    """Names a resolved configuration: the same inputs are checked and resolved once on a host."""
    return digest_of([vllm_config, list(extra_args), model_digest, env_digest, list(cache_args)])


@dataclass(frozen=True)
class Namespace:
    """One namespace of the KV cache."""

    fields: Mapping[str, Any]
    #: bytes of a whole chunk's file, or None where the architecture does not tell it
    chunk_bytes: int | None

    @property
    def digest(self) -> str:
        return digest_of(self.fields)

    def metadata(self, model: str) -> str:
        """Content of the file that describes the namespace beside its data (pruner, sweep, purge).
        ``model``: as model_source names it, for people; the digest in the fields is what counts."""
        data = {
            "schema": 1,
            "model": model,
            "chunk_bytes": self.chunk_bytes,
            "engine_config": self.fields,
        }
        return json.dumps(data, indent=1, sort_keys=True) + "\n"


def namespace_of(
    resolved: Mapping[str, Any],
    *,
    model_digest: str,
    model_revision: str | None,
    chunk_size: int,
    l2_adapter: str,
    extra_args: Sequence[str],
) -> Namespace:
    """From what resolve.py wrote (the engine's own word), never from the settings' "auto".

    ``extra_args`` count as they stand: an argument may change the cache's bytes in a way that none
    of the resolved fields tells of, and a needlessly new namespace is the cheaper mistake.
    """
    fields = {
        "model_digest": model_digest,
        "model_revision": model_revision,
        "chunk_size": chunk_size,
        "l2_adapter": l2_adapter,
        "extra_args": list(extra_args),
        **{
            key: resolved[key]
            for key in (
                "dtype",
                "quantization",
                "kv_cache_dtype",
                "kv_cache_layout",
                "block_size",
                "tensor_parallel",
                "pipeline_parallel",
                "rope",
                "versions",
                "machine",
            )
        },
    }
    size = chunk_bytes(resolved, chunk_size)
    if size is not None and l2_adapter == "native":
        size = -(-size // PAGE_BYTES) * PAGE_BYTES
    return Namespace(fields, size)


def predicted_versions(
    last: Mapping[str, str], *, vllm: str, lmcache: str, torch: str
) -> dict[str, str]:
    """The versions that a lock will give, with the local part (+cpu.…) that vLLM's had last: a lock
    does not tell it, and an upgrade of vLLM alone begins a new namespace too."""
    _, plus, local = last.get("vllm", "").partition("+")
    return {**last, "vllm": f"{vllm}{plus}{local}", "lmcache": lmcache, "torch": torch}


def predicted_fields(
    last: Mapping[str, Any], changes: Mapping[str, Any]
) -> Mapping[str, Any] | None:
    """The namespace's fields after a change of settings, as far as it can be told without asking
    the engine: ``changes`` over the ``last`` ones; None where the last are of another form."""
    if not set(changes) <= set(last):
        return None
    return {**last, **changes}


def kv_bytes_per_token(resolved: Mapping[str, Any]) -> int | None:
    """2 (K and V) x layers x KV heads x head size x element bytes, over all ranks.

    None where that formula does not hold (sliding window, unknown dtype) rather than a guess.
    """
    kv_dtype = resolved["kv_cache_dtype"]
    dtype = resolved["dtype"] if kv_dtype == "auto" else kv_dtype
    if dtype not in DTYPE_BYTES or resolved["sliding_window"] is not None:
        return None
    layers, heads, head_size = (int(resolved[k]) for k in ("layers", "kv_heads", "head_size"))
    return attention_bytes(layers, heads, head_size, dtype)


def chunk_bytes(resolved: Mapping[str, Any], chunk_size: int) -> int | None:
    """Bytes of the file of one chunk of ``chunk_size`` tokens, one rank; None if not known."""
    per_token = kv_bytes_per_token(resolved)
    plain = all(name in PLAIN_ATTENTION for name in resolved["architectures"])
    if per_token is None or not plain or resolved["tensor_parallel"] != 1:
        return None
    return per_token * chunk_size


#: Architectures whose KV cache is the same in every layer (full attention, no MLA, no state).
PLAIN_ATTENTION = frozenset(
    {"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM"}
)
