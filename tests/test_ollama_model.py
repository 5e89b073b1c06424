"""What a GGUF is called in Ollama, its digest read once, and what a pull that fails says."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[1]
SCRIPT = REPO / "kvhost/onhost/ollama_model.py"
pytestmark = pytest.mark.runners


def run(*words: object) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, str(SCRIPT), *map(str, words)]
    return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)


def name_of(path: Path, state: Path) -> str:
    done = run("name", "--gguf", path, "--state", state)
    assert done.returncode == 0, done.stderr
    return str(json.loads(done.stdout)["name"])


NAMES = {
    "Llama-3.2-3B-Q4_K_M.gguf": "llama-3.2-3b-q4_k_m",
    "a b (1).GGUF": "a-b-1",
    "\u4e2d.gguf": "model",
}


@pytest.mark.parametrize("file", NAMES)
def test_a_gguf_is_called_by_its_name_and_its_bytes(tmp_path: Path, file: str) -> None:
    path = tmp_path / file
    path.write_bytes(b"GGUF one")
    digest = hashlib.sha256(b"GGUF one").hexdigest()[:12]
    assert name_of(path, tmp_path) == f"{NAMES[file]}:{digest}"


def test_other_bytes_are_another_model_and_the_same_are_read_once(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF one")
    first = name_of(path, tmp_path)
    note = tmp_path / "ollama-gguf.json"
    known = json.loads(note.read_text())
    note.write_text(json.dumps({**known, "sha256": "f" * 64}))
    assert name_of(path, tmp_path) == "m:ffffffffffff", "it is remembered, not read again"
    path.write_bytes(b"GGUF two")
    os.utime(path, (1, 1))
    assert name_of(path, tmp_path) not in (first, "m:ffffffffffff")


def test_for_a_look_that_changes_nothing_a_gguf_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF one")
    done = run("name", "--gguf", path, "--state", tmp_path, "--remembered")
    assert (done.returncode, list(tmp_path.iterdir())) == (1, [path])
    assert "not as it was when its digest was taken" in done.stderr
    name = name_of(path, tmp_path)
    done = run("name", "--gguf", path, "--state", tmp_path, "--remembered")
    assert json.loads(done.stdout)["name"] == name


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04"])
def test_what_is_no_gguf_is_said(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    done = run("name", "--gguf", path, "--state", tmp_path)
    assert done.returncode == 1
    assert "is no GGUF" in done.stderr
    assert "No such file" in run("name", "--gguf", tmp_path / "none").stderr


def test_no_server_is_said_in_one_line() -> None:
    done = run("check", "--model", "qwen3:0.6b", "--url", "http://127.0.0.1:1")
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "refused" in done.stderr
