"""ollama_look.py against a server that answers like Ollama, and what the judge makes of it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvhost.ollama.facts import OllamaFacts, parse_facts
from kvhost.ollama.verdict import judge_kv

pytestmark = pytest.mark.runners
REPO = Path(__file__).parents[1]
DOUBLE, LOOK = REPO / "tests/doubles/ollama.py", REPO / "kvhost/onhost/ollama_look.py"


class Server:
    def __init__(self, folder: Path, port: int) -> None:
        self.log, self.url = folder / "log", f"http://127.0.0.1:{port}"

    def pull(self, name: str) -> None:
        body = json.dumps({"model": name}).encode()
        with urllib.request.urlopen(f"{self.url}/api/pull", body, timeout=10) as answer:
            assert json.load(answer)["status"] == "success"

    def look(self, name: str, *words: str) -> OllamaFacts:
        argv = [sys.executable, str(LOOK), "--url", self.url, "--model", name, *words]
        done = subprocess.run([*argv, "--log", str(self.log)], capture_output=True, text=True,
                              check=True, timeout=60)  # fmt: skip
        return parse_facts(done.stdout)


@contextlib.contextmanager
def server(folder: Path, form: str, **env: str) -> Iterator[Server]:
    (folder / "bin").mkdir()
    (folder / "lib/ollama").mkdir(parents=True)
    (folder / "lib/ollama/double.json").write_text(json.dumps({"form": form}))
    (folder / "bin/ollama").write_text(DOUBLE.read_text())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    here = Server(folder, port)
    given = {"OLLAMA_HOST": f"127.0.0.1:{port}", "OLLAMA_MODELS": str(folder / "models")}
    with here.log.open("wb") as log:
        child = subprocess.Popen([sys.executable, str(folder / "bin/ollama"), "serve"], stderr=log,
                                 env={**os.environ, **given, **env})  # fmt: skip
    try:
        deadline = time.monotonic() + 20
        while b"Listening" not in here.log.read_bytes():
            assert child.poll() is None and time.monotonic() < deadline, here.log.read_text()
            time.sleep(0.05)
        yield here
    finally:
        child.terminate()
        child.wait(10)


@pytest.mark.parametrize("form", ["request", "llama-server"])
def test_the_type_that_was_asked_for_is_found(tmp_path: Path, form: str) -> None:
    asked = {"OLLAMA_KV_CACHE_TYPE": "q8_0", "OLLAMA_FLASH_ATTENTION": "1"}
    with server(tmp_path, form, **asked) as here:
        here.pull("qwen3:0.6b")
        before = here.look("qwen3:0.6b")
        assert judge_kv(before, "q8_0").in_force == "unknown"
        assert before.loaded.status == "absent"
        verdict = judge_kv(here.look("qwen3:0.6b", "--load"), "q8_0")
    assert (verdict.found, verdict.in_force) == ("q8_0", "yes")
    assert verdict.token_bytes == 2 * 28 * 8 * 128 * 34 // 32
    if form == "llama-server":
        assert verdict.token_bytes_log == verdict.token_bytes


def test_a_model_without_flash_attention_is_found_out(tmp_path: Path) -> None:
    asked = {"OLLAMA_KV_CACHE_TYPE": "q8_0", "OLLAMA_FLASH_ATTENTION": "1"}
    with server(tmp_path, "request", **asked) as here:
        here.pull("odd:1b")
        verdict = judge_kv(here.look("odd:1b", "--load"), "q8_0")
    assert (verdict.found, verdict.in_force) == ("f16", "no")
    assert "architecture" in verdict.why


def test_a_model_that_is_not_there_is_absent(tmp_path: Path) -> None:
    with server(tmp_path, "request") as here:
        facts = here.look("qwen3:0.6b", "--load")
    assert facts.model.status == "absent"
    assert judge_kv(facts, "f16").in_force == "unknown"


def test_a_name_without_a_tag_is_the_latest(tmp_path: Path) -> None:
    with server(tmp_path, "request") as here:
        here.pull("qwen3:0.6b")
        assert here.look("qwen3").model.status == "absent"


def test_no_server_is_said(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("nothing of a server\n")
    facts = Server(tmp_path, 1).look("qwen3:0.6b")
    assert (facts.api.status, facts.log.status) == ("unreadable", "absent")
    assert "does not answer" in judge_kv(facts, "f16").why
