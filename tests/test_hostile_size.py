"""`kvhost size` on config.json files of no sense: refused with the reason, never a guess."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvhost import cli
from kvhost.sizing.arch import architecture_of
from kvhost.sizing.kv_bytes import SizeError, size_of
from kvhost.sizing.layer import UnknownArchitecture
from kvhost.sizing.model import find_model
from tests.sizing_tools import PUBLIC, TINY

pytestmark = pytest.mark.runners

LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "torch_dtype": "bfloat16",
}  # fmt: skip
NONSENSE: list[Any] = [-1, 0, 1.5, "8", True, 10**30, 10**400, [], {}, [1], float("nan"), "\ud800"]


@pytest.mark.parametrize("key", [key for key in LLAMA if key != "torch_dtype"])
def test_a_size_that_is_none_is_refused(key: str) -> None:
    """What is there and not understood is not taken for what is not there."""
    for value in NONSENSE:
        with pytest.raises(UnknownArchitecture):
            architecture_of({**LLAMA, key: value})


ODD: dict[str, list[Any]] = {
    "head_dim": [-1, 0, "x", 10**30],
    "num_key_value_heads": [7, 33],
    "torch_dtype": [0, [], {}, -1],
    "text_config": ["x", [], 5],
    "layer_types": [["full_attention"] * 31, ["x"] * 32, 5, [None] * 32],
    "model_type": [None, 5, [], "unheard-of"],
    "num_hidden_layers": [10_001],
    "max_position_embeddings": [-5],
}
MORE: list[dict[str, Any]] = [{key: odd} for key, every in ODD.items() for odd in every]
WINDOWS: list[Any] = [-1, "x", 10**30]
MORE += [{"model_type": "mistral", "sliding_window": window} for window in WINDOWS]


@pytest.mark.parametrize("change", MORE, ids=str)
def test_more_of_no_sense(change: dict[str, Any]) -> None:
    with pytest.raises(UnknownArchitecture):
        architecture_of({**LLAMA, **change})


def configs() -> dict[str, dict[str, Any]]:
    return {**{name: row["config"] for name, row in PUBLIC.items()}, **TINY}


@pytest.mark.parametrize("name", configs())
def test_every_family_refuses_or_has_a_size(name: str) -> None:
    """Each key away, and each of another kind: an error of ours or a size above zero."""
    config = configs()[name]
    part = config.get("text_config", config)
    began = time.monotonic()
    for key in part:
        for value in [None, *NONSENSE]:
            changed = {**part, key: value}
            whole = {**config, "text_config": changed} if part is not config else changed
            try:
                size = size_of(architecture_of(whole), "bfloat16", state_dtype="bfloat16")
            except (UnknownArchitecture, SizeError):
                continue
            assert size.sequence(1) > 0, (key, value)
    assert time.monotonic() - began < 20


FILES = ["", "null", "[]", "5", "{", "[" * 100_000, '{"a":' * 5000, '{"a": ' + "9" * 6000 + "}"]
FILES += ["\udcff\udcfe", "\0"]


@pytest.mark.parametrize("text", FILES, ids=range(len(FILES)))
def test_files_that_are_no_config(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(SizeError):
        find_model(str(tmp_path))


def test_places_that_are_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    refs = tmp_path / "models--org--name" / "refs"
    refs.mkdir(parents=True)
    for text in (b"../../../../etc", b"", b"..", b"\xff"):
        (refs / "main").write_bytes(text)
        with pytest.raises(SizeError):
            find_model("org/name")
    for name in ("~nobody-here/x", "a" * 5000, "/dev/zero", "org/other"):
        with pytest.raises(SizeError):
            find_model(name)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    index = tmp_path / "model.safetensors.index.json"
    for size in ("Infinity", "NaN", "-5", "true", '"x"', "1e400", "[]"):
        index.write_text(f'{{"metadata": {{"total_size": {size}}}}}')
        assert find_model(str(tmp_path)).weights_bytes is None


@pytest.mark.parametrize(
    "option", ["--gpu-gib inf", "--ram-gib nan", "--drive-gib 1e300", "--context 9999999999999"]
)
def test_amounts_of_no_sense(option: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    result = CliRunner().invoke(cli.main, ["size", str(tmp_path), *option.split()])
    assert (result.exit_code, type(result.exception)) == (2, SystemExit)
