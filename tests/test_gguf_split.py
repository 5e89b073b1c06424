"""A model of llama.cpp that is split into several .gguf files: all of them count, everywhere."""

from __future__ import annotations

import argparse
import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvhost import cli
from kvhost.llama.need import llama_need
from kvhost.onhost import gguf, llama_resolve, model_digest, ollama_model, report
from kvhost.settings import validate_hosts
from tests.settings_cases import refused

pytestmark = pytest.mark.runners
FIRST = "m-00001-of-00003.gguf"
SETTINGS = validate_hosts({"h": {"runner": "llama_server"}}, frozenset())["h"]
U16, U32, I32, TEXT = 2, 4, 5, 8
KEYS: dict[str, tuple[int, Any]] = {
    "general.architecture": (TEXT, "llama"),
    "llama.block_count": (U32, 2),
    "llama.attention.head_count": (U32, 2),
    "llama.embedding_length": (U32, 64),
    "llama.context_length": (U32, 512),
}


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def write(path: Path, keys: dict[str, tuple[int, Any]], elements: int, fill: bytes = b"x") -> None:
    """A file with one tensor of 16 bits an element, or none."""
    head = b"GGUF" + struct.pack("<IQQ", 3, int(elements > 0), len(keys))
    for name, (kind, value) in keys.items():
        layout = gguf.SCALARS.get(kind, "")
        head += text(name) + struct.pack("<I", kind)
        head += text(value) if kind == TEXT else struct.pack(layout, value)
    if elements:
        head += text(f"t{elements}") + struct.pack("<IQIQ", 1, elements, 1, 0)
    path.write_bytes(head + bytes(-len(head) % 32) + fill * (2 * elements))


def part(number: int, count: int = 3, tensors: int = 3) -> dict[str, tuple[int, Any]]:
    split = {"split.no": (U16, number), "split.count": (U16, count)}
    split["split.tensors.count"] = (I32, tensors)
    return {**KEYS, **split} if number == 0 else split


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Three parts: 64, 640 and 1600 bytes of weights."""
    for number, elements in enumerate((32, 320, 800)):
        write(tmp_path / f"m-{number + 1:05d}-of-00003.gguf", part(number), elements)
    return tmp_path / FIRST


WEIGHTS = 64 + 640 + 1600


def digest(path: Path) -> dict[str, Any]:
    return model_digest.file_model(str(path), str(path.parent / "digests.json"), None)


def second(model: Path) -> Path:
    return model.with_name("m-00002-of-00003.gguf")


def test_all_parts_are_counted(model: Path) -> None:
    told = gguf.read_model(str(model))
    assert (told["weights_bytes"], told["tensors"], told["types"]) == (WEIGHTS, 3, {"1": 3})
    assert told["bytes"] == sum(file.stat().st_size for file in model.parent.glob("m-*.gguf"))
    assert [one["name"] for one in told["files"]] == sorted(p.name for p in model.parent.iterdir())
    need = llama_need(told, SETTINGS)
    assert need is not None and need.weights_bytes == WEIGHTS
    size = CliRunner().invoke(cli.main, ["size", str(model), "--json"])
    assert json.loads(size.output)["weights_bytes"] == WEIGHTS


def test_a_first_part_may_hold_no_tensor(model: Path) -> None:
    write(model, part(0, tensors=2), 0)
    assert gguf.read_model(str(model))["weights_bytes"] == WEIGHTS - 64


@pytest.mark.parametrize("number", [1, 2, 3])
def test_every_part_changes_the_digest(number: int, model: Path) -> None:
    before = digest(model)
    assert before["files"] == 3 and before["weights_bytes"] == WEIGHTS
    assert digest(model) == before
    path = model.with_name(f"m-0000{number}-of-00003.gguf")
    path.write_bytes(path.read_bytes()[:-1] + b"y")
    assert digest(model)["digest"] != before["digest"]


def test_a_known_part_is_not_read_again(model: Path) -> None:
    before = digest(model)
    cache = json.loads((model.parent / "digests.json").read_text())
    cache[str(second(model))][4] = "0" * 64
    (model.parent / "digests.json").write_text(json.dumps(cache))
    assert digest(model)["digest"] != before["digest"]
    os.utime(second(model))
    assert digest(model) == before


def test_a_whole_model_has_the_digest_of_its_file(tmp_path: Path) -> None:
    for name, keys in (("one.gguf", KEYS), ("m-00001-of-00001.gguf", part(0, 1, 1))):
        write(tmp_path / name, keys, 32)
        one = model_digest.file_digest(str(tmp_path / name), model_digest.Progress())
        assert digest(tmp_path / name)["digest"] == one


def gone(model: Path) -> Path:
    second(model).unlink()
    return model


def swapped(model: Path) -> Path:
    second(model).write_bytes(model.with_name("m-00003-of-00003.gguf").read_bytes())
    return model


def of_a_split_into_two(model: Path) -> Path:
    write(second(model), part(1, count=2), 320)
    return model


def cut(model: Path) -> Path:
    second(model).write_bytes(second(model).read_bytes()[:-1])
    return model


def whole(model: Path) -> Path:
    write(second(model), KEYS, 320)
    return model


def of_other_tensors(model: Path) -> Path:
    write(model, part(0, tensors=9), 32)
    return model


def renamed(model: Path) -> Path:
    return model.rename(model.with_name("model.gguf"))


def odd(model: Path) -> Path:
    write(model, {**part(0), "split.no": (TEXT, "one")}, 32)
    return model


BROKEN: dict[Callable[[Path], Path], str] = {
    gone: "its part m-00002-of-00003.gguf is not there",
    swapped: "its part m-00002-of-00003.gguf says split.no = 2, split.count = 3, not 1 and 3",
    of_a_split_into_two: "says split.no = 1, split.count = 2, not 1 and 3",
    cut: "its part m-00002-of-00003.gguf: it has",
    whole: "says split.no = None, split.count = None",
    of_other_tensors: "its parts have 3 tensors, and 9 were split",
    second: "it is part 2 of 3 of a split model: name its first part, m-00001-of-00003.gguf",
    renamed: "its name must end in -00001-of-00003.gguf",
    odd: "split.no = 'one' of split.count = 3: the header is damaged",
}


@pytest.mark.parametrize("broken", BROKEN, ids=lambda one: one.__name__)
def test_a_model_that_is_not_whole_is_refused_by_name_everywhere(
    broken: Callable[[Path], Path], model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said, path = BROKEN[broken], broken(model)
    with pytest.raises(SystemExit):
        digest(path)
    assert said in capsys.readouterr().err
    size = CliRunner().invoke(cli.main, ["size", str(path)])
    assert size.exit_code == 1 and said in size.output
    with pytest.raises(gguf.NotGguf) as caught:
        llama_resolve_of(path)
    assert said in str(caught.value)
    told = report.model(str(path), 0, [])
    assert said in told["config"]["why"] and len(told["files"]) == 1


def llama_resolve_of(path: Path) -> dict[str, Any]:
    program = path.parent / "llama-server"
    program.write_text("#!/bin/sh\necho 'version: 0.6.0 (build 11434, commit abc)'\n")
    program.chmod(0o755)
    return llama_resolve.resolve(str(program), str(path), 512)


def test_the_report_of_a_host_has_all_parts_and_those_that_are_closed(model: Path) -> None:
    second(model).chmod(0o600)
    told = report.model(str(model), 12345, [12345])
    assert told["closed"] == [second(model).name]
    assert [one["name"] for one in told["files"]][1] == second(model).name
    assert sum(one["bytes"] for one in told["files"]) == told["config"]["data"]["bytes"]
    assert told["config"]["data"]["weights_bytes"] == WEIGHTS


def test_ollama_is_given_no_part(model: Path) -> None:
    args = argparse.Namespace(gguf=str(model), state="/nonexistent")
    with pytest.raises(ollama_model.Failed, match="llama-gguf-split --merge"):
        ollama_model.name_of(args)
    script = str(Path(str(ollama_model.__file__)))
    argv = [sys.executable, script, "name", "--gguf", str(model)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "a part of a split model" in done.stderr


@pytest.mark.parametrize("name", [FIRST, "m.gguf", "m.GGUF"])
def test_a_file_of_the_controllers_is_not_sent(name: str) -> None:
    told = refused({"model_source": f"controller:/models/{name}"})
    assert "is not sent and must lie on the host" in told["model_source"]
