"""One namespace of the KV cache is one meaning of its bytes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvhost.services import namespace

RESOLVED: dict[str, Any] = {
    "dtype": "float32",
    "quantization": None,
    "kv_cache_dtype": "auto",
    "kv_cache_layout": "NHD",
    "block_size": 128,
    "tensor_parallel": 1,
    "pipeline_parallel": 1,
    "architectures": ["LlamaForCausalLM"],
    "layers": 8,
    "kv_heads": 4,
    "head_size": 64,
    "sliding_window": None,
    "rope": {"rope_theta": 10000.0},
    "max_model_len": 32768,
    "versions": {"vllm": "0.32.0", "lmcache": "0.5.6", "torch": "2.13.0+cpu"},
    "machine": "x86_64",
}
GIVEN: dict[str, Any] = {
    "model_digest": "m" * 64,
    "model_revision": None,
    "chunk_size": 256,
    "l2_adapter": "fs_native",
    "extra_args": [],
}


def made(**changes: Any) -> namespace.Namespace:
    """The namespace after ``changes`` of what the engine says or of what was given."""
    given = {key: changes.pop(key, value) for key, value in GIVEN.items()}
    assert set(changes) <= set(RESOLVED)
    return namespace.namespace_of({**RESOLVED, **changes}, **given)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_digest", "n" * 64),
        ("model_revision", "a" * 40),
        ("chunk_size", 512),
        ("l2_adapter", "fs"),
        ("extra_args", ["--x"]),
        ("dtype", "bfloat16"),
        ("quantization", "fp8"),
        ("kv_cache_dtype", "fp8"),
        ("kv_cache_layout", "HND"),
        ("block_size", 64),
        ("tensor_parallel", 2),
        ("pipeline_parallel", 2),
        ("rope", {"rope_theta": 10001.0}),
        ("rope", None),
        ("versions", {**RESOLVED["versions"], "lmcache": "0.5.7"}),
        ("versions", {**RESOLVED["versions"], "torch": "2.13.1+cpu"}),
        ("machine", "aarch64"),
    ],
)
def test_each_field_that_decides_the_bytes_changes_the_digest(key: str, value: Any) -> None:
    assert made(**{key: value}).digest != made().digest


def test_what_does_not_decide_the_bytes_keeps_the_cache() -> None:
    assert made(max_model_len=4096).digest == made().digest
    turned = dict(reversed(RESOLVED.items()))
    assert namespace.namespace_of(turned, **GIVEN).digest == made().digest


def test_a_field_that_the_engine_did_not_tell_is_an_error_not_a_shared_namespace() -> None:
    for key in ("dtype", "kv_cache_layout", "versions", "machine", "rope"):
        less = {k: v for k, v in RESOLVED.items() if k != key}
        with pytest.raises(KeyError, match=key):
            namespace.namespace_of(less, **GIVEN)


@pytest.mark.parametrize(
    ("changes", "per_token"),
    [
        ({}, 2 * 8 * 4 * 64 * 4),
        ({"dtype": "bfloat16"}, 2 * 8 * 4 * 64 * 2),
        ({"dtype": "float16"}, 2 * 8 * 4 * 64 * 2),
        ({"kv_cache_dtype": "fp8"}, 2 * 8 * 4 * 64),
        ({"kv_cache_dtype": "fp8_e5m2"}, 2 * 8 * 4 * 64),
        ({"layers": 16, "kv_heads": 2}, 2 * 16 * 2 * 64 * 4),
        ({"sliding_window": 4096}, None),
        ({"dtype": "float8"}, None),
    ],
)
def test_bytes_of_a_token(changes: dict[str, Any], per_token: int | None) -> None:
    assert namespace.kv_bytes_per_token({**RESOLVED, **changes}) == per_token


@pytest.mark.parametrize(
    ("changes", "known"),
    [
        ({}, True),
        ({"architectures": ["DeepseekV3ForCausalLM"]}, False),
        ({"architectures": ["LlamaForCausalLM", "Other"]}, False),
        ({"tensor_parallel": 2}, False),
        ({"sliding_window": 4096}, False),
    ],
)
def test_bytes_of_a_chunk_are_told_only_where_they_are_certain(
    changes: dict[str, Any], known: bool
) -> None:
    # seen with the real engine: 8,200 tokens are 32 chunks of 2 MiB for 512 bytes x 16 a token
    expected = 256 * 2 * 8 * 4 * 64 * 4 if known else None
    assert made(**changes).chunk_bytes == expected
    assert made(chunk_size=512).chunk_bytes == 512 * 2 * 8 * 4 * 64 * 4


def test_the_file_beside_the_data_tells_all_of_it() -> None:
    one = made()
    text = one.metadata("builtin")
    assert text.endswith("\n")
    data = json.loads(text)
    assert data["schema"] == 1
    assert data["model"] == "builtin"
    assert data["chunk_bytes"] == one.chunk_bytes
    fields = next(value for value in data.values() if isinstance(value, dict))
    assert namespace.digest_of(fields) == one.digest


def test_a_digest_of_data_is_of_its_meaning_not_of_its_order() -> None:
    assert namespace.digest_of({"a": 1, "b": "ä"}) == namespace.digest_of({"b": "ä", "a": 1})
    assert namespace.digest_of({"a": 1}) != namespace.digest_of({"a": "1"})
    assert namespace.digest_of([1, 2]) != namespace.digest_of([2, 1])


def test_the_same_inputs_are_resolved_once() -> None:
    first = namespace.input_digest("config", ["--a"], "model", "env", cache_args=["-c"])
    assert namespace.input_digest("config", ["--a"], "model", "env", cache_args=["-c"]) == first
    others = {
        namespace.input_digest("config2", ["--a"], "model", "env", cache_args=["-c"]),
        namespace.input_digest("config", ["--b"], "model", "env", cache_args=["-c"]),
        namespace.input_digest("config", ["--a"], "model2", "env", cache_args=["-c"]),
        namespace.input_digest("config", ["--a"], "model", "env2", cache_args=["-c"]),
        namespace.input_digest("config--a", [], "model", "env", cache_args=["-c"]),
        namespace.input_digest("config", ["--a"], "model", "env", cache_args=["-d"]),
    }
    assert len(others) == 6
    assert first not in others


def test_an_upgrade_of_vllm_alone_is_predicted_as_another_namespace() -> None:
    last = {"vllm": "0.32.0+cpu.kvhost", "lmcache": "0.5.6", "torch": "2.13.0+cpu"}
    same = {"vllm": "0.32.0", "lmcache": "0.5.6", "torch": "2.13.0+cpu"}
    assert namespace.predicted_versions(last, **same) == last
    newer = namespace.predicted_versions(last, **{**same, "vllm": "0.33.0"})
    assert newer == {**last, "vllm": "0.33.0+cpu.kvhost"}
