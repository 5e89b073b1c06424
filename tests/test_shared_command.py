"""`kvhost shared` as a command: which deploys it runs on which hosts, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvhost import cli, working_copy
from kvhost.commands import asking
from kvhost.records import journal
from tests.copy_tools import Copy
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


MANY = """
from pyinfra.connectors.local import LocalConnector

LocalConnector.make_names_data = staticmethod(lambda name=None: iter([(name, {}, [])]))
store = {"shared_store_address": "127.0.0.1", "shared_store_memory_gib": 1, "base_dir": "/none/b"}
hosts = [
    ("@local/secret", {**store, "shared_tier_password_file": "/nonexistent"}),
    ("@local/odd", {**store, "shared_tier_password_file": "pw"}),
    ("@local/late", {}),
]
"""
#: shared.py, where each host is at fault in its own way but the last
ODD = """
import time
from pathlib import Path

from pyinfra import host

from deploys.common import store

store.look = lambda settings: {}["what nobody thought of"]
if host.name == "late":
    time.sleep(2)
exec(Path("shared.py").read_text())
"""


def test_what_is_wrong_with_one_host_is_no_reason_against_another(tmp_path: Path) -> None:
    working_copy.make(tmp_path)
    (tmp_path / "many.py").write_text(MANY)
    (tmp_path / "odd.py").write_text(ODD)
    (tmp_path / "pw").write_text("0123456789abcdef" * 4)
    (tmp_path / "pw").chmod(0o600)
    kept = tmp_path / "journal"
    code, text = Copy(tmp_path).pyinfra("many.py", "odd.py", **{journal.VARIABLE: str(kept)})
    assert code == 1
    rows = journal.read_journal(kept).rows
    assert {name: (row.result, row.why) for name, row in rows.items()} == {
        "secret": ("refused", "controller"),
        "odd": ("refused", "plan_failed"),
        "late": ("unchanged", None),
    }, text


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
