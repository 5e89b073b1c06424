"""model_digest.py: what counts, what is refused, and who must be able to read it."""

from __future__ import annotations

import functools
import json
import os
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvhost.onhost import model_digest

SCRIPT = str(Path(model_digest.__file__))
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="other users need root")


def weights(data: bytes = b"\x01\x02") -> bytes:
    tensor = {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}
    header = json.dumps({"__metadata__": {"format": "pt"}, "t": tensor}).encode()
    return struct.pack("<Q", len(header)) + header + data


@pytest.fixture
def model() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as above:  # tmp_path lets no other user in
        Path(above).chmod(0o755)
        yield make_model(Path(above) / "model")


def make_model(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(weights())
    (folder / "README.md").write_text("hello")
    return folder


def run(model: Path, *more: str, rc: int = 0) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, SCRIPT, "--model", str(model), "--cache", str(cache_of(model)), *more]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == rc, done.stderr
    return done


def cache_of(model: Path) -> Path:
    return model.parent / "digests.json"


def answer(model: Path, *more: str) -> Any:
    return json.loads(run(model, *more).stdout)


def refused(model: Path, *more: str) -> str:
    done = run(model, *more, rc=1)
    assert "Traceback" not in done.stderr
    return done.stderr


def test_every_file_that_counts_changes_the_digest_and_no_other(model: Path) -> None:
    first = answer(model)
    sizes = [(model / name).stat().st_size for name in ("config.json", "tokenizer.json")]
    assert first["files"] == 3
    assert first["weights_bytes"] == len(weights())
    assert first["bytes"] == len(weights()) + sum(sizes)
    seen = {first["digest"]}
    for name, content in (
        ("config.json", b'{"a": 1}'),
        ("tokenizer.json", b'{"b": 1}'),
        ("model.safetensors", weights(b"\x01\x03")),
        ("chat_template.jinja", b"x"),
    ):
        (model / name).write_bytes(content)
        seen.add(answer(model)["digest"])
    assert len(seen) == 5
    (model / "README.md").write_text("other")
    (model / "pytorch_model.bin").write_bytes(b"beside safetensors it is never loaded")
    assert answer(model)["digest"] in seen


def test_a_name_is_part_of_the_digest(model: Path) -> None:
    first = answer(model)["digest"]
    (model / "tokenizer.json").rename(model / "vocab.json")
    assert answer(model)["digest"] != first


def test_a_known_file_is_not_read_again_and_a_touched_one_is(model: Path) -> None:
    first = answer(model)
    path = str(model / "model.safetensors")
    cache = json.loads(cache_of(model).read_text())
    cache[path][4] = "0" * 64  # a planted digest shows whether the file is read
    cache["/another/model.safetensors"] = cache[path]
    cache_of(model).write_text(json.dumps(cache))
    assert answer(model)["digest"] != first["digest"]
    os.utime(path)
    assert answer(model) == first
    assert "/another/model.safetensors" in json.loads(cache_of(model).read_text())


@pytest.mark.parametrize("text", ["", "[]", '{"x": 1}', None])
def test_a_broken_cache_only_costs_time(model: Path, text: str | None) -> None:
    first = answer(model)
    broken = {key: ["x"] for key in json.loads(cache_of(model).read_text())}
    cache_of(model).write_text(json.dumps(broken) if text is None else text)
    assert answer(model) == first


def test_a_snapshot_of_the_hub_is_links_to_blobs(model: Path) -> None:
    first = answer(model)
    blobs = model.parent / "blobs"
    blobs.mkdir()
    for name in ("config.json", "model.safetensors"):
        (model / name).rename(blobs / name)
        (model / name).symlink_to(f"../blobs/{name}")
    assert answer(model) == first
    (blobs / "model.safetensors").unlink()
    said = refused(model)
    assert f"{model}/model.safetensors is a link to ../blobs/model.safetensors" in said


def shard(model: Path) -> None:
    (model / "model.safetensors").unlink()
    names = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    index = {"weight_map": {f"t{n}": name for n, name in enumerate(names)}}
    (model / model_digest.INDEX).write_text(json.dumps(index))
    for name in names:
        (model / name).write_bytes(weights())


def test_shards_are_all_there_or_the_missing_one_is_named(model: Path) -> None:
    shard(model)
    assert answer(model)["weights_bytes"] == 2 * len(weights())
    (model / "model-00002-of-00002.safetensors").unlink()
    assert "lacks 1 shards, model-00002-of-00002.safetensors" in refused(model)
    (model / model_digest.INDEX).write_text("[]")
    assert "cannot be read as an index" in refused(model)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (weights()[:-1], "its header says"),
        (weights() + b"x", "its header says"),
        (weights()[:20], "its header cannot be read"),
        (b"<html>404</html>", "not a safetensors file"),
        (b"", "not a safetensors file"),
    ],
)
def test_weights_that_are_not_whole_are_refused(model: Path, content: bytes, said: str) -> None:
    (model / "model.safetensors").write_bytes(content)
    message = refused(model)
    assert said in message
    assert f"{model}/model.safetensors" in message


def test_what_is_no_model_is_refused(model: Path, tmp_path: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    assert "pytorch_model.bin: pickles" in refused(model)
    (model / "pytorch_model.bin").unlink()
    assert "no .safetensors weights\n" in refused(model)
    (model / "config.json").unlink()
    assert "no config.json" in refused(model)
    assert f"{tmp_path}/none" in refused(tmp_path / "none")
    assert "there is no user nobody-of-that" in refused(model, "--user", "nobody-of-that")


def test_a_file_that_changes_while_it_is_read_is_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = model / "config.json"

    class Writer(model_digest.Progress):
        def tell(self, path_: str, done: int) -> None:
            path.write_text('{"changed": true}')

    with pytest.raises(SystemExit):
        model_digest.file_digest(str(path), Writer())
    assert "changed while it was read" in capsys.readouterr().err


@root_only
def test_the_directory_that_keeps_the_service_user_out_is_named(model: Path) -> None:
    answer(model, "--user", "nobody")
    (model / "model.safetensors").chmod(0o600)
    assert f"nobody cannot read {model}/model.safetensors: give it r on" in refused(
        model, "--user", "nobody"
    )
    (model / "model.safetensors").chmod(0o644)
    model.parent.chmod(0o700)
    assert f"give it x on the directory {model.parent}\n" in refused(model, "--user", "nobody")
    answer(model)  # without a user nobody is asked for


@root_only
def test_a_closed_directory_of_blobs_is_named(model: Path) -> None:
    blobs = model.parent / "blobs"
    blobs.mkdir()
    (model / "config.json").rename(blobs / "b1")
    (model / "config.json").symlink_to(blobs / "b1")
    blobs.chmod(0o700)
    said = refused(model, "--user", "nobody")
    assert f"cannot read {model}/config.json: give it x on the directory {blobs}\n" in said


def test_what_is_remembered_is_the_digest_without_a_read(model: Path) -> None:
    digest = answer(model)["digest"]
    known = functools.partial(model_digest.remembered_model, str(model), str(cache_of(model)))
    assert known() == {"digest": digest, "changed": []}
    (model / "README.md").write_text("another")  # decides nothing
    assert known()["digest"] == digest
    (model / "model.safetensors").write_bytes(weights(b"\x03\x04"))  # as long
    assert known() == {"digest": None, "changed": ["model.safetensors"]}
    assert answer(model)["digest"] != digest
    assert known() == {"digest": answer(model)["digest"], "changed": []}
    (model / "tokenizer.json").unlink()
    assert known()["digest"] not in (None, digest)
    (model / "more.json").symlink_to("/nonexistent")
    assert known()["changed"] == ["more.json"]
    before = cache_of(model).read_bytes()
    cache_of(model).unlink()
    assert known()["changed"] == ["config.json", "model.safetensors", "more.json"]
    assert not cache_of(model).exists() and before
