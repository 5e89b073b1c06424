"""--dry: changes nothing, and ends as the run would whose plan it shows."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvhost import cli, working_copy
from tests.copy_tools import Copy
from tests.e2e_tools import free_ports

pytestmark = pytest.mark.fleet
HERE = ("--inventory", "inventory.py")
BASE = Path("/var/lib/kvhost-dry")
#: with free ports: this machine may serve already
PORTS = dict(zip(("api_port", "cache_port", "cache_http_port"), free_ports(3), strict=True))
DATA = tuple(
    word
    for key, value in {"base_dir": BASE, **PORTS}.items()
    for word in ("--data", f"{key}={value}")
)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    path = tmp_path_factory.mktemp("copy")
    working_copy.make(path)
    return Copy(path)


@pytest.fixture
def taken() -> Iterator[str]:
    """A port that somebody else listens on: the plan of a host that wants it holds a refusal."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        yield str(held.getsockname()[1])


def kvhost(copy: Copy, *words: str) -> tuple[int, str]:
    code, text = copy.kvhost(words[0], *HERE, *DATA, *words[1:])
    assert not BASE.exists()
    return code, text


def test_a_refusal_is_exit_code_1_dry_or_not(copy: Copy, taken: str) -> None:
    port = ("--data", f"api_port={taken}")
    for words in (("up", "--dry"), ("verify", "--dry"), ("plan",), ("plan", "--dry"), ("up",)):
        code, text = kvhost(copy, *words, *port)
        assert (code, "port_taken" in text) == (1, True), text
    code, text = copy.pyinfra("inventory.py", "deploy.py", "--dry", *DATA, *port)
    assert (code, "port_taken" in text) == (1, True), text


def test_without_a_refusal_it_is_0(copy: Copy) -> None:
    code, text = kvhost(copy, "up", "--dry")
    assert code == 0, text
    assert "host: directories" in text


def test_what_is_known_to_fail_without_a_plan_is_1_too(copy: Copy) -> None:
    code, text = kvhost(copy, "storage", "--dry")
    assert code == 1, text
    assert "storage: the drive" in text.partition("Detected changes:")[2]
    code, text = kvhost(copy, "verify", "--dry")
    assert (code, "not provisioned" in text) == (1, True), text


@pytest.mark.parametrize(
    "words", [("drives",), ("plan",), ("logs",), ("remove", "--dry"), ("up", "--dry")]
)
def test_a_host_that_gives_no_answer_is_1_and_said(
    words: tuple[str, ...], copy: Copy, tmp_path: Path
) -> None:
    python = tmp_path / "python3"
    python.write_text("#!/bin/sh\necho no python here\n")
    python.chmod(0o755)
    argv = [sys.executable, "-m", "kvhost.cli", words[0], *HERE, *words[1:], *DATA]
    code, text = copy.run(*argv, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert (code, "no python here" in text) == (1, True), text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("up", "--dry", "--json"), "kvhost plan --json"),
        (("rebuild", "@local", "--dry"), "kvhost up --dry --limit HOST"),
        (("purge", "--dry"), "no host be asked"),
        (("logs", "--dry"), "no host be asked"),
        (("logs", "web", "--dry"), "no host be asked"),
        (("drives", "--measure", "--write-gib", "1", "--dry"), "no host be asked"),
        (("monitoring", "scrape", "--dry"), "no host be asked"),
        (("shared", "--check", "a", "b", "--dry"), "no host be asked"),
    ],
)
def test_where_it_could_not_answer_it_is_wrong_usage(
    words: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "pyinfra", lambda *_: pytest.fail("a host was asked"))
    done = CliRunner().invoke(cli.main, [*words, *HERE])
    assert (done.exit_code, said in done.output) == (2, True), done.output


@pytest.mark.parametrize("command", ["storage", "release", "grow", "shared"])
def test_it_lists_the_operations(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With -y pyinfra looks for no change, and has none to list."""
    seen: list[tuple[str, ...]] = []

    def pyinfra(inventory: str, deploy: str, args: tuple[str, ...]) -> int:
        seen.append(args)
        return 0

    monkeypatch.setattr(cli, "pyinfra", pyinfra)
    for words in ((), ("--dry",)):
        assert CliRunner().invoke(cli.main, [command, *HERE, *words]).exit_code == 0
    assert seen == [("-y",), ("--dry",)]
