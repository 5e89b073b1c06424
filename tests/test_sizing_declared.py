"""KV that a checkpoint declares in FP8: what `auto` is, by the rules of vLLM 0.32."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from kvhost import cli
from kvhost.onhost.resolve import kv_dtype
from kvhost.plan.model_need import need_of
from kvhost.settings import Settings
from kvhost.sizing.arch import architecture_of
from kvhost.sizing.declared import declared_kv_dtype
from kvhost.sizing.layer import UnknownArchitecture
from tests.sizing_tools import LLAMA, PUBLIC

pytestmark = pytest.mark.runners

BF16 = {**LLAMA, "torch_dtype": "bfloat16"}
#: as llm-compressor and ModelOpt write them
SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
COMPRESSED = {"quant_method": "compressed-tensors", "kv_cache_scheme": SCHEME}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8"}
OLD = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}


def scheme(**changes: Any) -> dict[str, Any]:
    return {**COMPRESSED, "kv_cache_scheme": {**SCHEME, **changes}}


def old(**changes: Any) -> dict[str, Any]:
    return {**OLD, "quantization": {**OLD["quantization"], **changes}}


def quantized(quantization: Any, key: str = "quantization_config") -> dict[str, Any]:
    return {**BF16, key: quantization}


def declared(config: dict[str, Any]) -> str | None:
    return declared_kv_dtype(config, architecture_of(config))


@pytest.mark.parametrize(
    ("quantization", "dtype"),
    [
        (COMPRESSED, "fp8"),
        ({**COMPRESSED, "quant_method": "compressed_tensors"}, "fp8"),
        (scheme(strategy="attn_head"), "fp8"),
        ({**COMPRESSED, "kv_cache_scheme": None}, None),
        ({"quant_method": "compressed-tensors"}, None),
        ({"quant_method": "fp8", "kv_cache_scheme": SCHEME}, None),  # of weights alone
        ({"quant_method": "gptq", "bits": 4}, None),
        (MODELOPT, None),
        ({**MODELOPT, "kv_cache_quant_algo": "FP8"}, "fp8_e4m3"),
        ({**MODELOPT, "quant_method": "modelopt_fp4", "kv_cache_scheme": SCHEME}, "fp8_e4m3"),
        (old(kv_cache_quant_algo="FP8"), "fp8_e4m3"),
        (old(kv_cache_quant_algo=None), None),
        (old(quant_algo=None, kv_cache_quant_algo="FP8"), None),  # no method, as vLLM has it
        (None, None),
    ],
)
def test_what_is_declared_is_what_the_engine_takes(quantization: Any, dtype: str | None) -> None:
    config = quantized(quantization)
    assert declared(config) == dtype
    need = need_of(config, 5, Settings.model_validate({}))
    assert need is not None and need.kv_bytes_per_token == (65536 if dtype else 131072)


def test_a_text_part_and_a_compression_config_count_as_in_the_engine() -> None:
    assert declared(quantized(COMPRESSED, "compression_config")) == "fp8"
    nested = {"model_type": "llava", "text_config": quantized(COMPRESSED)}
    assert declared(nested) == "fp8"
    modelopt = quantized({**MODELOPT, "kv_cache_quant_algo": "FP8"})
    assert declared({"model_type": "llava", "text_config": modelopt}) is None


def test_of_mla_only_the_word_of_modelopt_counts() -> None:
    latent = PUBLIC["DeepSeek-V3"]["config"]
    assert declared({**latent, "quantization_config": COMPRESSED}) is None
    modelopt = {**MODELOPT, "kv_cache_quant_algo": "FP8"}
    assert declared({**latent, "quantization_config": modelopt}) == "fp8_e4m3"


@pytest.mark.parametrize(
    "quantization",
    [
        scheme(num_bits=4),
        scheme(type="int"),
        scheme(strategy="channel"),
        scheme(symmetric=False),
        {**COMPRESSED, "kv_cache_scheme": "fp8"},
        {**MODELOPT, "kv_cache_quant_algo": "NVFP4"},
        {**MODELOPT, "kv_cache_quant_algo": "INT8"},
        {**MODELOPT, "kv_cache_scheme": {**SCHEME, "dynamic": True}},
        old(quant_algo="INT4_AWQ"),
        [1],
    ],
)
def test_a_scheme_that_is_not_known_is_refused(quantization: Any, tmp_path: Path) -> None:
    config = quantized(quantization)
    with pytest.raises(UnknownArchitecture):
        declared(config)
    assert need_of(config, 5, Settings.model_validate({})) is None
    # and not where it is said which is served
    (tmp_path / "config.json").write_text(json.dumps(config))
    for words, code in (((), 1), (("--kv-dtype", "fp8"), 0)):
        done = CliRunner().invoke(cli.main, ["size", str(tmp_path), *words])
        assert done.exit_code == code and "Traceback" not in done.output
    told = need_of(config, 5, Settings.model_validate({"kv_cache_dtype": "fp8"}))
    assert told is not None and told.kv_bytes_per_token == 65536


def test_size_takes_it_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(quantized(COMPRESSED)))
    told = json.loads(CliRunner().invoke(cli.main, ["size", str(tmp_path), "--json"]).output)
    assert (told["bytes_per_token"], told["kv_dtype"]) == (65536, "fp8")
    assert "declares its KV in fp8" in told["notes"][0]
    words = ["size", str(tmp_path), "--json", "--kv-dtype", "bf16"]
    told = json.loads(CliRunner().invoke(cli.main, words).output)
    assert told["bytes_per_token"] == 131072 and "declares" not in str(told["notes"])


@pytest.mark.parametrize(
    ("resolved", "declares", "mla", "dtype"),
    [
        ("auto", True, False, "fp8"),
        ("auto", True, True, "auto"),
        ("auto", False, False, "auto"),
        ("fp8_e4m3", True, False, "fp8_e4m3"),
        ("bfloat16", True, False, "bfloat16"),
    ],
)
def test_the_namespace_has_the_dtype_that_its_files_will_have(
    resolved: str, declares: bool, mla: bool, dtype: str
) -> None:
    quantization = SimpleNamespace(kv_cache_scheme=SCHEME if declares else None)
    assert kv_dtype(resolved, quantization, mla=mla) == dtype
    assert kv_dtype(resolved, None, mla=mla) == resolved
