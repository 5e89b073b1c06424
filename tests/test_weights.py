"""Bytes of a model's weights in memory: which files count, what is missing, in which dtype."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvhost import cli
from kvhost.onhost import report as report_script
from kvhost.plan.memory import weights_bytes as planned
from kvhost.plan.model_need import need_of, weights_bytes
from kvhost.report import ModelDir
from kvhost.settings import Settings
from kvhost.sizing.model import find_model
from tests.plan_cases import FACTS, absent, changed, model_dir, ok, plan

pytestmark = pytest.mark.runners

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "torch_dtype": "bfloat16",
}
INDEX = "model.safetensors.index.json"
SHARDS = [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]


def write(path: Path, dtypes: dict[str, int]) -> None:
    """Tensors of so many bytes, whose data is not there: a header says it all."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for number, (dtype, count) in enumerate(dtypes.items()):
        header[f"t{number}"] = {"dtype": dtype, "shape": [1], "data_offsets": [end, end + count]}
        end += count
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)


def index(folder: Path, names: list[str], total: object = 3000, name: str = INDEX) -> None:
    told = {"weight_map": {f"t{n}": one for n, one in enumerate(names)}}
    (folder / name).write_text(json.dumps({**told, "metadata": {"total_size": total}}))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Three shards of 1000 bytes each and their index."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    for shard in SHARDS:
        write(tmp_path / shard, {"BF16": 1000})
    index(tmp_path, SHARDS)
    return tmp_path


def seen(folder: Path) -> ModelDir:
    """As the report of a host has it."""
    return ModelDir.model_validate(report_script.model(str(folder), 0, []))


def both(folder: Path, dtype: str = "auto") -> int | None:
    """The bytes by the plan, which are those of `kvhost size` where it asks the same."""
    settings = Settings.model_validate({"dtype": dtype})
    found = weights_bytes(seen(folder), settings)
    if dtype == "auto":
        assert find_model(str(folder)).weights_bytes == found
    return found


def size(folder: Path, *words: str) -> dict[str, Any]:
    done = CliRunner().invoke(cli.main, ["size", str(folder), "--json", *words])
    told: dict[str, Any] = json.loads(done.output)
    return told


def test_a_consolidated_file_beside_shards_is_not_counted_too(model: Path) -> None:
    assert both(model) == 3000
    write(model / "consolidated.safetensors", {"BF16": 2990})
    assert both(model) == 2990  # which vLLM then loads, and the shards not


def test_of_files_beside_those_of_the_index_none_counts(model: Path) -> None:
    write(model / "adapter.safetensors", {"BF16": 500})
    assert both(model) == 3000
    (model / INDEX).unlink()
    assert both(model) == 3500
    (model / INDEX).write_text("[]")
    assert both(model) == 3500


def test_of_missing_shards_the_index_tells_the_size(model: Path) -> None:
    for shard in SHARDS[1:]:
        (model / shard).unlink()
    assert both(model) == 3000
    told = size(model)
    assert told["weights_bytes"] == 3000
    assert f"missing ({SHARDS[1]}, {SHARDS[2]})" in told["notes"][0]
    need = need_of(LLAMA, weights_bytes(seen(model), Settings()), Settings())
    assert need is not None and need.weights_bytes == 3000


def test_of_missing_shards_without_a_total_nothing_is_claimed(model: Path) -> None:
    (model / SHARDS[0]).unlink()
    index(model, SHARDS, total="x")
    assert size(model)["weights_bytes"] is None
    assert "missing" in size(model)["notes"][0]


def test_the_plan_refuses_a_model_of_which_files_are_missing(model: Path) -> None:
    (model / SHARDS[2]).unlink()
    row = {**report_script.model(str(model), 0, []), "files": [{"name": "config.json", "bytes": 1}]}
    got = plan({"model": ok(row)}, model_source="/m")
    assert [one.code for one in got.refusals] == ["no_model"]
    assert f"1 file not there: {SHARDS[2]}" in str(got.refusals[0])
    write(model / SHARDS[2], {"BF16": 1})
    whole = {**row, "weights": report_script.model(str(model), 0, [])["weights"]}
    assert plan({"model": ok(whole)}, model_source="/m").refusals == ()


@pytest.mark.parametrize(
    ("dtypes", "dtype", "config", "expected"),
    [
        ({"F32": 1000}, "auto", {}, 500),
        ({"F32": 1000}, "float16", {}, 500),
        ({"F32": 1000}, "float32", {}, 1000),
        ({"BF16": 1000}, "float32", {}, 2000),
        ({"F16": 1000}, "auto", {"torch_dtype": "float32"}, 1000),  # config.json is not asked
        ({"F32": 1000, "BF16": 100, "I64": 8}, "auto", {}, 608),
        ({"F64": 1000}, "auto", {}, 250),
        ({"F32": 8, "U8": 1000}, "auto", {"quantization_config": {"quant_method": "x"}}, 1008),
        ({"F8_E4M3": 1000}, "auto", {}, 1000),
    ],
)
def test_floats_count_in_the_dtype_that_they_are_loaded_in(
    dtypes: dict[str, int], dtype: str, config: dict[str, Any], expected: int, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **config}))
    write(tmp_path / "model.safetensors", dtypes)
    assert both(tmp_path, dtype) == expected


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"torch_dtype": "float32"}, 1500),
        ({"torch_dtype": "bfloat16"}, 3000),
        ({"torch_dtype": None, "dtype": "torch.float32"}, 1500),
        ({"torch_dtype": "float32", "quantization_config": {}}, 3000),
    ],
)
def test_an_index_alone_is_of_the_dtype_of_the_config(
    config: dict[str, Any], expected: int, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **config}))
    index(tmp_path, SHARDS)
    assert find_model(str(tmp_path)).weights_bytes == expected


@pytest.mark.parametrize(
    "content", [b"x" * 100, b"", struct.pack("<Q", 4) + b"[[[[" + bytes(92), struct.pack("<Q", 9)]
)
def test_a_file_without_a_header_counts_as_it_lies_there(content: bytes, model: Path) -> None:
    (model / SHARDS[0]).write_bytes(content)
    assert both(model) == 2000 + len(content)


def test_weights_of_an_architecture_that_is_not_known_count_the_same_way(model: Path) -> None:
    write(model / "adapter.safetensors", {"BF16": 500})
    host = changed({"model": ok(report_script.model(str(model), 0, []))})
    facts = replace(FACTS, model=None)
    assert planned(Settings(), host, facts) == 3000
    # of what was not looked at the files count
    files = [{"name": "a.safetensors", "bytes": 70}, {"name": "config.json", "bytes": 5}]
    host = changed({"model": model_dir(files=files, weights=absent())})
    assert planned(Settings(), host, facts) == 70


def test_how_an_older_model_of_modelopt_is_quantised_lies_beside_its_config(model: Path) -> None:
    old = {"producer": {"name": "modelopt"},
           "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}  # fmt: skip
    (model / "hf_quant_config.json").write_text(json.dumps(old))
    assert size(model)["kv_dtype"] == "fp8_e4m3"
    assert seen(model).config.data == {**LLAMA, "quantization_config": old}
    (model / "config.json").write_text(json.dumps({**LLAMA, "quantization_config": {}}))
    assert size(model)["kv_dtype"] == "bfloat16"
