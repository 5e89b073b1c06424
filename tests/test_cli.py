"""The command: exit codes, and that a run that reached nobody is no success."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvhost import cli, cli_matrix
from kvhost.matrix import load_matrix
from kvhost.reports import tell_summary


def run(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(cli.main, list(words))
    return done.exit_code, done.output


@pytest.mark.parametrize("command", ["up", "verify", "plan"])
def test_an_inventory_that_is_not_there_is_an_error(command: str) -> None:
    code, text = run(command, "--inventory", "nope.py")
    assert code == 1
    assert "no such inventory" in text
    assert "nope.py" in text


@pytest.mark.parametrize("command", ["up", "verify", "plan", "storage", "purge"])
def test_a_host_is_no_argument(command: str) -> None:
    code, text = run(command, "gpu1")
    assert code == 2
    assert "--limit gpu1" in text


def test_no_lock_of_the_matrix_has_its_name_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, text = run("matrix")
    assert code == 0
    for name in load_matrix(cli_matrix.locks_dir()).locks:
        assert name in text


@pytest.mark.parametrize("words", [("--service", "foo"), ("--level", "loud")])
def test_a_service_or_level_of_no_log_is_wrong_usage(words: tuple[str, str]) -> None:
    code, text = run("logs", *words)
    assert code == 2
    assert words[1] in text


STARTED = {"host": "a"}


def verdict(persisted: str) -> dict[str, str]:
    return {"host": "a", "persisted": persisted, "time": "T"}


RUNS: list[tuple[int, list[dict[str, str]], int, str]] = [
    (0, [STARTED, verdict("PASS")], 0, "a: persisted PASS (T)"),
    (1, [STARTED, verdict("FAIL")], 1, "persisted FAIL"),
    (1, [STARTED, verdict("INCONCLUSIVE")], 2, "INCONCLUSIVE"),
    # a run that went back is a failure, whatever its verdict was
    (1, [STARTED, verdict("INCONCLUSIVE"), {"host": "a", "rolled_back": "why"}], 1, "WENT BACK"),
    (1, [STARTED, {"host": "a", "rolled_back": "no answer"}], 1, "no answer"),
    # one passed, another failed before its verdict
    (1, [STARTED, verdict("PASS"), {"host": "b"}], 1, "a: "),
    (0, [STARTED], 0, "verify is never"),
    (0, [], 1, "the run failed"),
    (1, [STARTED], 1, "the run failed"),
]


@pytest.mark.parametrize("code, told, wanted, words", RUNS)
def test_the_exit_code_is_the_runs_and_the_verdicts(
    monkeypatch: pytest.MonkeyPatch, code: int, told: list[dict[str, str]], wanted: int, words: str
) -> None:
    def pyinfra(inventory: str, deploy: str, args: tuple[str, ...]) -> int:
        for entry in told:
            tell_summary(**entry)
        return code

    monkeypatch.setattr(cli, "pyinfra", pyinfra)
    got, text = run("up")
    assert (got, words in text) == (wanted, True), text


def test_disrupt_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, ...]] = []

    def pyinfra(inventory: str, deploy: str, args: tuple[str, ...]) -> int:
        seen.append((deploy, *args))
        return 0

    monkeypatch.setattr(cli, "pyinfra", pyinfra)
    run("verify", "--disrupt", "--limit", "web")
    assert seen == [("verify.py", "-y", "--data", "disrupt=true", "--limit", "web")]
    run("verify", "--event", "kill", "--event", "both", "--limit", "web")
    events = ("--data", 'verify_events=["kill", "both"]')
    assert seen[1] == ("verify.py", "-y", *events, "--limit", "web")


def test_status_without_a_report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVHOST_REPORTS", str(tmp_path))
    code, text = run("status")
    assert (code, "No verdict yet" in text) == (2, True)
    code, text = run("status", "--json")
    assert (code, json.loads(text)) == (2, {})
