"""`kvhost shared` as a command: which deploys it runs on which hosts, and its exit codes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner

from kvhost import cli
from kvhost.commands import asking
from tests.test_shared_verdict import healthy

pytestmark = pytest.mark.fleet


class Hosts:
    """In the place of pyinfra: notes what it is asked, answers as the two hosts would."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        a, b = healthy()
        self.answers: dict[str, dict[str, Any] | None] = {
            "write": {**a, "chunks": ["1:0:ab"]}, "read": {**b, "chunks": []},
        }  # fmt: skip
        self.ran: list[tuple[str, tuple[str, ...]]] = []
        self.asked: list[dict[str, Any]] = []
        monkeypatch.setattr(cli, "pyinfra", self.run)

    def run(self, inventory: str, deploy: str, args: tuple[str, ...]) -> int:
        self.ran.append((deploy, args))
        asked = asking.question()
        if not asked:
            return 0
        self.asked.append(asked)
        found = self.answers[asked["step"]]
        if found is None:
            return 1
        asking.answer(args[args.index("--limit") + 1], found)
        return 0


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Hosts:
    return Hosts(monkeypatch)


def run(*words: str, typed: str = "") -> tuple[int, str]:
    line = ["shared", "--inventory", "inventory.py", *words]
    done = CliRunner().invoke(cli.main, line, input=typed)
    return done.exit_code, done.output


def test_a_check_is_one_step_on_each_and_a_verdict(hosts: Hosts) -> None:
    code, text = run("--check", "gpu-1", "gpu-2", "-v")
    assert code == 0, text
    assert "gpu-1 -> gpu-2: shared PASS" in text
    deploy = "deploys/shared_check.py"
    assert hosts.ran == [(deploy, ("-y", "--limit", name, "-v")) for name in ("gpu-1", "gpu-2")]
    first, second = hosts.asked
    assert (first["step"], second["step"]) == ("write", "read")
    assert first["seed"] == second["seed"]
    assert len(first["seed"]) == 64
    assert second["chunks"] == ["1:0:ab"]


def test_the_verdict_is_the_exit_code(hosts: Hosts) -> None:
    answer = hosts.answers["read"]
    assert answer is not None
    answer["namespace"] = "ns-2"
    code, text = run("--check", "a", "b", "--json")
    told = json.loads(text)
    assert (code, told["shared"], told["a"], told["b"]) == (2, "INCONCLUSIVE", "a", "b")
    answer["requests"]["again"]["output_tokens"] = [9]
    assert run("--check", "a", "b")[0] == 1


def test_a_first_step_that_fails_is_the_end(hosts: Hosts) -> None:
    hosts.answers["write"] = None
    assert run("--check", "a", "b")[0] == 1
    assert len(hosts.ran) == 1


@pytest.mark.parametrize("words", [
    ("--check", "a", "a"), ("--check", "a", "b", "--remove"), ("--json",), ("--check", "a"),
])  # fmt: skip
def test_what_cannot_be_meant(hosts: Hosts, words: tuple[str, ...]) -> None:
    assert run(*words)[0] == 2
    assert not hosts.ran


def test_making_and_taking_away(hosts: Hosts) -> None:
    assert run("--limit", "store")[0] == 0
    assert hosts.ran.pop() == ("shared.py", ("-y", "--limit", "store"))
    code, text = run("--remove")
    assert (code, "add -y" in text) == (1, True)
    assert not hosts.ran
    assert run("--remove", "-y")[0] == 0
    assert hosts.ran == [("deploys/shared_remove.py", ("-y",))]
