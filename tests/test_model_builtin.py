"""The model that kvhost builds itself: the same bytes everywhere, whole or not there at all."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvhost.onhost import model_builtin

SCRIPT = Path(model_builtin.__file__)
NOBODY = 65534
PYTHONS = ["3.9", "3.10", "3.11", "3.12", "3.13", "3.14"]


def run(*arguments: str | Path, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    command = [python, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, text=True, capture_output=True, check=False)


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that every user can enter (tmp_path is closed to others)."""
    path = Path(tempfile.mkdtemp(prefix="kvhost-model-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One good model for the tests that only read."""
    out = tmp_path_factory.mktemp("made") / "model"
    assert run("--out", out).returncode == 0
    return out


def names(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()]


def digest(directory: Path) -> str:
    """The digest as the docs define it, computed apart from the script."""
    lines = [
        f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n"
        for path in sorted(directory.iterdir())
    ]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def header(directory: Path) -> tuple[dict[str, Any], bytes]:
    raw = (directory / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def test_pinned_digest_is_that_of_the_files(made: Path) -> None:
    assert digest(made) == run("--digest").stdout.strip() == model_builtin.DIGEST


@pytest.mark.parametrize("version", PYTHONS)
def test_every_python_makes_the_same_bytes(
    place: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setenv("PYENV_VERSION", version)  # for pyenv's shims; no other Python minds
    python = shutil.which(f"python{version}")
    if python is None or subprocess.run([python, "-c", ""], check=False).returncode:
        pytest.skip(f"no Python {version} here")
    done = run("--out", place / "model", python=python)
    assert done.returncode == 0, done.stderr
    assert digest(place / "model") == model_builtin.DIGEST


def test_second_run_keeps_what_is_good(place: Path) -> None:
    first = json.loads(run("--out", place / "model").stdout)
    inode = (place / "model").stat().st_ino
    second = json.loads(run("--out", place / "model").stdout)
    assert (first["built"], second["built"]) == (True, False)
    assert (place / "model").stat().st_ino == inode


def test_safetensors_parses_and_covers_its_data(made: Path) -> None:
    tensors, data = header(made)
    assert tensors.pop("__metadata__") == {"format": "pt"}
    at = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1]["data_offsets"]):
        count = 1
        for side in tensor["shape"]:
            count *= side
        assert tensor["dtype"] == "BF16", name
        assert tensor["data_offsets"] == [at, at + 2 * count], name
        at += 2 * count
    assert at == len(data)


def test_shapes_agree_with_config(made: Path) -> None:
    config = json.loads((made / "config.json").read_text())
    tensors, _ = header(made)
    hidden, head = config["hidden_size"], config["head_dim"]
    last = f"model.layers.{config['num_hidden_layers'] - 1}."
    assert f"model.layers.{config['num_hidden_layers']}.mlp.up_proj.weight" not in tensors
    for name, shape in {
        "model.embed_tokens.weight": [config["vocab_size"], hidden],
        "lm_head.weight": [config["vocab_size"], hidden],
        last + "self_attn.q_proj.weight": [config["num_attention_heads"] * head, hidden],
        last + "self_attn.k_proj.weight": [config["num_key_value_heads"] * head, hidden],
        last + "self_attn.o_proj.weight": [hidden, config["num_attention_heads"] * head],
        last + "mlp.down_proj.weight": [hidden, config["intermediate_size"]],
    }.items():
        assert tensors[name]["shape"] == shape, name


def test_weights_have_the_spread_asked_for(made: Path) -> None:
    tensors, data = header(made)
    for tensor in model_builtin.tensors():
        begin, end = tensors[tensor.name]["data_offsets"]
        words = struct.unpack(f"<{(end - begin) // 2}H", data[begin:end])
        count = len(words)
        values = struct.unpack(f"<{count}f", struct.pack(f"<{count}I", *(w << 16 for w in words)))
        if tensor.std == 0:
            assert set(values) == {1.0}, tensor.name
            continue
        filled = count if tensor.rows is None else count * len(tensor.rows) // tensor.shape[0]
        std = (sum(v * v for v in values) / filled) ** 0.5
        assert std == pytest.approx(tensor.std, rel=0.02), tensor.name
        assert abs(sum(values) / filled) < 0.02 * tensor.std, tensor.name


def test_only_printable_bytes_can_be_generated(made: Path) -> None:
    tensors, data = header(made)
    begin, _ = tensors["lm_head.weight"]["data_offsets"]
    rows, width = tensors["lm_head.weight"]["shape"]
    filled = [
        i for i in range(rows) if any(data[begin + 2 * i * width : begin + 2 * (i + 1) * width])
    ]
    assert filled == list(range(0x20, 0x7F))


def test_tokenizer_has_one_symbol_for_each_byte(made: Path) -> None:
    tokenizer = json.loads((made / "tokenizer.json").read_text())
    config = json.loads((made / "config.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    assert sorted(vocab.values()) == list(range(config["vocab_size"]))
    assert tokenizer["model"]["merges"] == []
    assert all(vocab[chr(byte)] == byte for byte in range(0x21, 0x7F))
    assert vocab["\u0120"] == 0x20  # how byte-level tokenizers write a space
    assert vocab["</s>"] == config["eos_token_id"]


def test_describe_gives_what_a_plan_needs(made: Path) -> None:
    facts = json.loads(run("--describe").stdout)
    config = json.loads((made / "config.json").read_text())
    size = (made / "model.safetensors").stat().st_size
    assert facts["digest"] == model_builtin.DIGEST
    assert facts["dtype"] == "float32"
    assert 0 < size - facts["weights_bytes"] < 10_000
    assert facts["weights_memory_bytes"] == 2 * facts["weights_bytes"]
    kv = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] * 4
    assert facts["kv_bytes_per_token"] == kv == 16 * 1024
    assert facts["context_tokens"] == config["max_position_embeddings"] >= 32768


@pytest.mark.parametrize("name", sorted(model_builtin.MANIFEST))
def test_check_finds_one_wrong_byte(place: Path, made: Path, name: str) -> None:
    shutil.copytree(made, place / "model")
    with (place / "model" / name).open("r+b") as file:
        file.seek(-2, os.SEEK_END)
        byte = file.read(1)
        file.seek(-2, os.SEEK_END)
        file.write(bytes([byte[0] ^ 1]))
    done = run("--check", place / "model")
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert found["ok"] is False
    assert found["digest"] != model_builtin.DIGEST
    assert len(found["problems"]) == 1
    assert found["problems"][0].startswith(f"{name} has sha256")


def damage_missing(model: Path) -> None:
    (model / "tokenizer.json").unlink()


def damage_extra(model: Path) -> None:
    (model / "model-00002.safetensors").write_bytes(b"")


def damage_link(model: Path) -> None:
    (model / "config.json").rename(model.parent / "config.json")
    (model / "config.json").symlink_to(model.parent / "config.json")


def damage_file_mode(model: Path) -> None:
    (model / "model.safetensors").chmod(0o600)


def damage_directory_mode(model: Path) -> None:
    model.chmod(0o700)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (damage_missing, "tokenizer.json is missing"),
        (damage_extra, "model-00002.safetensors is not the model's"),
        (damage_link, "config.json is not a regular file"),
        (damage_file_mode, "model.safetensors is closed to the service's user: chmod 0644"),
        (damage_directory_mode, "is closed to the service's user: chmod 0755"),
    ],
)
def test_check_names_other_damage(place: Path, made: Path, damage: Any, said: str) -> None:
    shutil.copytree(made, place / "model")
    damage(place / "model")
    done = run("--check", place / "model")
    assert done.returncode == 1
    (problem,) = json.loads(done.stdout)["problems"]
    assert problem.endswith(said)


def test_out_mends_a_damaged_model(place: Path, made: Path) -> None:
    shutil.copytree(made, place / "model")
    (place / "model" / "config.json").write_text("{}")
    done = run("--out", place / "model")
    assert done.returncode == 0
    assert json.loads(done.stdout)["built"] is True
    assert digest(place / "model") == model_builtin.DIGEST
    assert names(place) == ["model"]


def test_out_refuses_a_directory_of_someone_else(place: Path) -> None:
    (place / "model").mkdir()
    (place / "model" / "thesis.txt").write_text("years of work")
    done = run("--out", place / "model")
    assert done.returncode == 1
    assert "holds what is not the model's (thesis.txt)" in done.stderr
    assert (place / "model" / "thesis.txt").read_text() == "years of work"
    assert names(place) == ["model"]


def test_check_says_what_cannot_be_read(place: Path) -> None:
    (place / "file").write_text("")
    for path, why in (("absent", "No such file or directory"), ("file", "Not a directory")):
        done = run("--check", place / path)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith(f"error: cannot read {place / path}: {why}")


def test_out_says_what_cannot_be_written(place: Path) -> None:
    done = run("--out", place / "absent" / "model")
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: cannot use {place / 'absent'}: No such file")
    assert names(place) == []


def check_as_nobody(place: Path) -> subprocess.CompletedProcess[str]:
    """--check of place/model by another user, with the system's Python and a copy of the script:
    the checkout and its environment may be closed to others."""
    script = place / "script.py"
    shutil.copy(SCRIPT, script)
    script.chmod(0o755)
    ids = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    argv = [*ids, "/usr/bin/python3", str(script), "--check", str(place / "model")]
    return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.skipif(os.geteuid() != 0, reason="takes another user: run as root")
def test_another_user_can_read_the_model_whatever_the_umask(place: Path) -> None:
    before = os.umask(0o077)
    try:
        assert run("--out", place / "model").returncode == 0
    finally:
        os.umask(before)
    done = check_as_nobody(place)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ok"] is True


@pytest.mark.skipif(os.geteuid() != 0, reason="takes another user: run as root")
def test_check_by_a_user_who_may_not_read(place: Path, made: Path) -> None:
    shutil.copytree(made, place / "model")
    (place / "model" / "config.json").chmod(0o600)
    done = check_as_nobody(place)
    path = place / "model" / "config.json"
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: cannot read {path}: Permission denied")


# Ends itself with SIGKILL at the n-th call that makes something last.
KILLED = """
import os, pathlib, signal, sys
sys.path.insert(0, os.path.dirname(sys.argv[1]))
import model_builtin
left = [int(sys.argv[3])]
def deadly(real):
    def call(*arguments):
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments)
    return call
os.fsync = deadly(os.fsync)
pathlib.Path.rename = deadly(pathlib.Path.rename)
model_builtin.build(pathlib.Path(sys.argv[2]))
"""


@pytest.mark.parametrize("damaged", [False, True], ids=["nothing_there", "damaged_one_there"])
def test_killed_at_every_step_leaves_nothing_accepted(place: Path, damaged: bool) -> None:
    killed = 0
    for step in range(1, 50):
        out = place / str(step) / "model"
        out.parent.mkdir()
        if damaged:
            out.mkdir()
            (out / "config.json").write_text("{}")
        command = [sys.executable, "-c", KILLED, str(SCRIPT), str(out), str(step)]
        code = subprocess.run(command, check=False).returncode
        if code == 0:
            break
        assert code == -signal.SIGKILL
        killed += 1
        checked = run("--check", out)
        if checked.returncode == 0:  # only ever the whole model
            assert digest(out) == model_builtin.DIGEST
        assert run("--out", out).returncode == 0
        assert digest(out) == model_builtin.DIGEST
        assert names(out.parent) == ["model"]
    # Six files and their directory, the rename (two where one is moved away), the parent.
    assert killed == (10 if damaged else 9)


def test_other_bytes_than_the_pinned_are_not_kept(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(model_builtin, "SEED", b"another seed")
    assert model_builtin.main(["--out", str(place / "model")]) == 1
    assert "is not the pinned model (model.safetensors differ)" in capsys.readouterr().err
    assert names(place) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk_leaves_nothing(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(directory: Path) -> dict[str, str]:
        (directory / "config.json").write_text("half")
        with Path("/dev/full").open("w") as file:
            file.write("x")
        return {}

    monkeypatch.setattr(model_builtin, "write_files", full)
    assert model_builtin.main(["--out", str(place / "model")]) == 1
    said = capsys.readouterr().err
    assert f"cannot write the model in {place / 'model'}: " in said
    assert "No space left on device" in said
    assert names(place) == []
