"""What a config.json leaves out is what transformers fills in, or a refusal: never a guess."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvhost.sizing.arch import READERS, Architecture, architecture_of
from kvhost.sizing.defaults import DEFAULTS, STRANGE
from kvhost.sizing.layer import UnknownArchitecture
from tests.sizing_tools import FIXTURES

pytestmark = pytest.mark.runners
SCRIPT = Path(__file__).parents[1] / "bench" / "config_defaults.py"
RECORD: dict[str, Any] = json.loads((FIXTURES / "defaults.json").read_text())
FAMILIES: dict[str, Any] = {name: one for name, one in RECORD["families"].items() if one}
#: told in "wider", by the names that a family has for them
SIZE = ("hidden_size", "num_attention_heads", "n_embd", "n_head")
#: what a family's own default configuration lacks that its real ones have
MORE: dict[str, dict[str, Any]] = {
    "lfm2": {"conv_dim": 2560},
    "nemotron_h": {"hybrid_override_pattern": "ME*-"},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "granitemoehybrid": {"layer_types": ["mamba"] * 31 + ["full_attention"]},
}
#: whose own default is of a newer form than is read here: refused, whatever is left out
NEWER = {"mimo_v2_flash", "kimi_linear"}


def cases() -> dict[str, tuple[str, dict[str, Any]]]:
    return {
        f"{name}-{way}": (name, {**one[way], "model_type": name, **MORE.get(name, {})})
        for name, one in FAMILIES.items()
        for way in ("default", "wider")
        if one[way]
    }


def told(config: dict[str, Any]) -> Architecture | None:
    try:
        return architecture_of(config)
    except UnknownArchitecture:
        return None


@pytest.mark.parametrize("case", cases())
def test_a_key_that_is_left_out_is_the_familys_default_or_a_refusal(case: str) -> None:
    name, config = cases()[case]
    whole = told(config)
    assert (whole is None) == (name in NEWER)
    for key in config:
        assert told({k: v for k, v in config.items() if k != key}) in (whole, None), key


@pytest.mark.parametrize("case", cases())
def test_a_part_of_another_config_has_but_what_differs(case: str) -> None:
    name, config = cases()[case]
    size = SIZE if case.endswith("-wider") else ()
    kept = ("model_type", *size, *MORE.get(name, {}))
    found = told({"text_config": {key: config[key] for key in kept if key in config}})
    assert found == told(config) or (found is None and name not in ABSENT)


#: KV heads, head size and window where config.json says nothing, of heads of 64 and 8192 wide
ABSENT: dict[str, tuple[int, int, int | None]] = {
    "llama": (64, 128, None),
    "mistral": (8, 128, 4096),
    "mixtral": (8, 128, None),
    "gpt_oss": (8, 64, 128),
    "gemma": (16, 256, None),
    "gemma2": (4, 256, 4096),
    "gemma3_text": (4, 256, 4096),
    "cohere2": (64, 128, 4097),
    "llama4_text": (8, 128, 8192),
    "qwen2": (32, 128, None),
    "qwen2_moe": (16, 128, None),
    "qwen2_vl_text": (8, 128, None),
    "qwen3": (32, 128, None),
    "qwen3_moe": (4, 128, None),
    "qwen3_vl_text": (32, 128, None),
    "qwen3_vl_moe_text": (16, 128, None),
    "seed_oss": (8, 128, None),
    "stablelm": (32, 128, None),
    "starcoder2": (2, 128, None),
    "phi3": (64, 128, None),
}


@pytest.mark.parametrize("family", ABSENT)
def test_kv_heads_and_windows_that_are_not_named(family: str) -> None:
    size = {"hidden_size": 8192, "num_attention_heads": 64, "num_hidden_layers": 12}
    found = architecture_of({"model_type": family, **size}).layers
    heads, head, window = ABSENT[family]
    assert {(layer.heads, layer.width) for layer in found} == {(heads, 2 * head)}
    assert {layer.window for layer in found} - {None} == ({window} if window else set())


@pytest.mark.parametrize("family", ["mistral", "mixtral", "qwen3_moe", "starcoder2"])
def test_what_is_null_stays_null(family: str) -> None:
    size = {"hidden_size": 8192, "num_attention_heads": 64, "num_hidden_layers": 12}
    null = {"num_key_value_heads": None, "sliding_window": None, "max_position_embeddings": None}
    found = architecture_of({"model_type": family, **size, **null})
    assert [(one.kind, one.heads) for one in found.layers] == [("full", 64)]
    assert found.context is None


def test_families_of_one_kind_of_mamba_and_gemma() -> None:
    falcon = {**FAMILIES["falcon_h1"]["default"], "model_type": "falcon_h1"}
    del falcon["mamba_d_ssm"]
    states = [one for one in architecture_of(falcon).layers if one.kind == "state"]
    assert states[0].convolution == 1024 * 3
    gemma = {"hidden_size": 2048, "num_attention_heads": 8, "num_hidden_layers": 30}
    kinds = (["sliding_attention"] * 4 + ["full_attention"]) * 6
    own = architecture_of({"model_type": "gemma3n_text", **gemma, "layer_types": kinds})
    assert sum(one.count for one in own.layers) == 15  # the last 15 use the cache of these
    both = architecture_of({"model_type": "gemma4_text", **gemma, "layer_types": kinds})
    assert {one.kind: one.width for one in both.layers} == {"window": 512, "full": 1024}
    # transformers makes the last one full
    last = architecture_of(
        {"model_type": "gemma4_text", **gemma, "layer_types": ["sliding_attention"] * 30}
    )
    assert [(one.kind, one.count) for one in last.layers] == [("window", 29), ("full", 1)]


@pytest.mark.parametrize("family", STRANGE)
def test_of_a_family_that_the_engine_has_no_defaults_of_nothing_is_filled_in(family: str) -> None:
    assert family not in DEFAULTS
    size = {"hidden_size": 8192, "num_attention_heads": 64, "num_hidden_layers": 12}
    for nested in (False, True):
        config = {"model_type": family, **size}
        with pytest.raises(UnknownArchitecture, match="has no "):
            architecture_of({"text_config": config} if nested else config)


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_dtype_of_a_part_is_that_of_the_whole_where_it_has_none(key: str) -> None:
    config: dict[str, Any] = {"model_type": "llava", "text_config": {}, key: "float16"}
    assert architecture_of(config).dtype == "float16"
    config["text_config"] = {"torch_dtype": "bfloat16"}
    assert architecture_of(config).dtype == "bfloat16"


def test_every_family_is_in_the_tables() -> None:
    assert set(READERS) == set(FAMILIES) | set(STRANGE) == set(DEFAULTS) | set(STRANGE)
    assert not set(DEFAULTS) & set(STRANGE)


@pytest.mark.engine
@pytest.mark.full
def test_the_engine_still_has_these_defaults(engine: Path, tmp_path: Path) -> None:
    out = tmp_path / "defaults.json"
    words = [str(engine / "bin" / "python"), str(SCRIPT), "--out", str(out), *RECORD["families"]]
    subprocess.run(words, check=True, timeout=300)
    assert json.loads(out.read_text()) == RECORD
