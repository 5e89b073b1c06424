"""The command: exit codes, and that a run that reached nobody is no success."""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from kvhost import cli
from kvhost.basics import EXIT_CODES, counted, up_command
from kvhost.commands import drift as cli_drift
from kvhost.commands import matrix as cli_matrix
from kvhost.commands import run as cli_run
from kvhost.commands.up import INTERRUPTED
from kvhost.engine.matrix import load_matrix
from kvhost.onhost.evidence_steps import run_step
from kvhost.records import journal
from kvhost.reports.kept import make_report, tell_summary, write_report
from kvhost.sizing.kv_bytes import DTYPES, SizeError, dtype_named
from kvhost.verdict.foreign import judge_foreign
from kvhost.verdict.foreign_evidence import parse_foreign
from tests import foreign_cases
from tests.report_cases import NOON, PASSING, keep

ROOT = Path(__file__).parents[1]


def run(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(cli.main, list(words))
    return done.exit_code, done.output


def groups(command: click.Command, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words of the command and of all below it that have commands."""
    if isinstance(command, click.Group):
        yield words
        context = click.Context(command)
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from groups(found, (*words, name))


def test_no_help_has_a_sentence_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    every = list(groups(cli.main))
    assert {(), ("inventory",), ("monitoring",)} <= set(every)
    for words in every:
        done = CliRunner().invoke(
            cli.main, [*words, "--help"], prog_name="kvhost", max_content_width=80
        )
        assert "..." not in done.output.partition("Commands:")[2], done.output
        assert max(map(len, done.output.splitlines())) <= 80


def commands(command: click.Command, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words of every command that does something."""
    if not isinstance(command, click.Group):
        yield words
        return
    context = click.Context(command)
    for name in command.list_commands(context):
        found = command.get_command(context, name)
        assert found is not None
        yield from commands(found, (*words, name))


@pytest.mark.parametrize("words", list(commands(cli.main)), ids=" ".join)
def test_every_help_tells_its_exit_codes(words: tuple[str, ...]) -> None:
    text = " ".join(run(*words, "--help")[1].split())
    told = text.partition("Exit: ")[2]
    assert "Exit: 0" in text and re.search(r"\b1\b", told), text
    if "--inventory" in text:
        assert "130" in told or words == ("inventory", "add"), text
        assert "--limit HOST" in text, text


@pytest.mark.parametrize("command", ["purge", "remove", "shared", "drives"])
def test_what_asks_takes_the_same_word_for_yes(command: str) -> None:
    assert "-y, --yes" in run(command, "--help")[1]


@pytest.mark.parametrize("words", [("--write-gib", "5"), ("--seconds", "60"), ("--yes",)])
def test_what_only_a_measurement_needs_is_not_ignored(words: tuple[str, ...]) -> None:
    code, text = run("drives", "--inventory", "inventory.py", *words)
    assert (code, f"{words[0]}: of --measure alone" in text) == (2, True), text


def test_the_readme_names_every_command() -> None:
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    for name in cli.main.list_commands(click.Context(cli.main)):
        assert re.search(rf"(kvhost|bin/|;) ?{name}\b", text), name


@pytest.mark.parametrize("command", ["up", "verify"])
def test_the_help_of_a_run_tells_every_exit_code(command: str) -> None:
    text = " ".join(run(command, "--help")[1].split())
    for code in (*EXIT_CODES.values(), INTERRUPTED):
        assert f" {code} " in text.partition("Exit:")[2], text


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


def test_a_dtype_is_called_by_the_names_that_the_help_says() -> None:
    told = " ".join(run("size", "--help")[1].split()).partition("; of llama.cpp")[0]
    for name in re.findall(r"[a-z]+[0-9]+", told.partition("--kv-dtype TEXT ")[2]):
        assert dtype_named(name) in DTYPES
    with pytest.raises(SizeError, match=re.escape("one of bf16 (or bfloat16), fp16 (float16), ")):
        dtype_named("int3")
    assert "bf16 (or bfloat16), fp16 (float16)" in told


@pytest.mark.parametrize("words", [("--service", "foo"), ("--level", "loud")])
def test_a_service_or_level_of_no_log_is_wrong_usage(words: tuple[str, str]) -> None:
    code, text = run("logs", *words)
    assert code == 2
    assert words[1] in text


@pytest.mark.parametrize(
    ("shown", "line"),
    [
        ({"ttft_s": 8.754, "usage_cached_tokens": 0}, "8.75 s, 0 cached tokens"),
        ({"ttft_s": 0.5, "usage_cached_tokens": None}, "0.50 s"),
        (
            {"busy": 1, "foreign": 0, "own": 3},
            "1 request now, 0 requests of others, 3 requests of kvhost's own",
        ),
        ({"removed": 69, "bytes": 7_000_000, "left": 0, "why": None}, "69 removed, 7.0 MB, 0 left"),
        ({"expected_files": 2, "sizes": [1], "waited_s": 1.21, "timed_out": False},
         "2 expected files, waited 1.2 s, not timed out"),
        ({"exit_code": 0, "ready_s": 12.0}, "exit code 0, ready 12.0 s"),
        (None, ""),
        ("a word", "a word"),
    ],
)  # fmt: skip
def test_a_step_of_the_test_is_told_in_words(
    shown: object, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_step([], "cold request", lambda: shown, None)
    assert capsys.readouterr().err == f"cold request ... 0.0 s  {line}".rstrip() + "\n"


def test_a_count_of_one_is_singular() -> None:
    assert [counted(n, "drive") for n in (0, 1, 2)] == ["0 drives", "1 drive", "2 drives"]
    row = {"part": "file", "what": "/var/lib/kvhost/etc/vllm.yaml", "wanted": "a", "found": "b"}
    assert cli_drift.at_slashes(row["what"], 20) == "/var/lib/kvhost/etc/\nvllm.yaml"


@pytest.mark.parametrize("columns", [80, 200])
def test_drift_breaks_a_path_at_its_slashes(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    path = "/var/lib/kvhost/bin/evidence_foreign_parts.py"
    row = {"part": "file", "what": path, "wanted": "kvhost 600", "found": "kvhost 644"}
    away = {"status": "unreadable", "rows": [], "unreadable": ["it could not be reached"]}
    cli_drift.show({"web-1": {"status": "drift", "rows": [row], "unreadable": []}, "b": away})
    text = capsys.readouterr().out
    assert "evidence_foreign_parts.py" in text and max(map(len, text.splitlines())) <= columns
    assert (path in text) == (columns == 200)
    assert "web-1: DRIFT, 1 difference\n" in text
    assert "b: not known: it could not be reached\n" in text


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
    (INTERRUPTED, [STARTED, verdict("PASS")], INTERRUPTED, "broken off"),
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


API = {"host": "@local", "api": "http://127.0.0.1:8000/v1", "model": "kvhost-builtin"}


@pytest.mark.parametrize(
    ("code", "command", "told", "said"),
    [
        (0, "up", [API, verdict("PASS")], True),
        (0, "up", [API], True),  # verify = never
        (1, "up", [API, verdict("FAIL")], False),
        (1, "up", [API, verdict("PASS"), {"host": "b"}], False),
    ],
)
def test_a_good_run_says_where_the_api_answers(
    monkeypatch: pytest.MonkeyPatch, code: int, command: str, told: list[dict[str, str]], said: bool
) -> None:
    def pyinfra(inventory: str, deploy: str, args: tuple[str, ...]) -> int:
        for entry in told:
            tell_summary(**entry)
        return code

    monkeypatch.setattr(cli, "pyinfra", pyinfra)
    lines = run(command)[1].splitlines()
    line = "API: http://127.0.0.1:8000/v1 (model kvhost-builtin)"
    assert lines.count(line) == int(said), lines
    told[0] = API | {"host": "web"}
    assert (line.replace("API", "API on web") in run(command)[1]) == said
    told[:1] = [API | {"host": f"h{n}"} for n in range(5)]
    assert "API" not in run(command)[1]


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


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder with fleet.yaml and reports: one PASS of "one", one not good of another's server."""
    monkeypatch.setattr(cli_run, "root", lambda: tmp_path)
    monkeypatch.setenv("KVHOST_REPORTS", str(tmp_path / "reports"))
    keep(tmp_path / "reports", PASSING, "one")
    raw = foreign_cases.evidence_of("mp")
    foreign_cases.no_cache_metrics(raw)
    evidence = parse_foreign(json.dumps(raw))
    report = make_report("127.0.0.1:8000", [(judge_foreign(evidence), evidence)], NOON)
    assert report.persisted == "INCONCLUSIVE"
    write_report(tmp_path / "reports", report)
    return tmp_path


def fleet_of(folder: Path, *names: str) -> None:
    rows = [f"  {name}: {{address: {name}.example}}\n" for name in names]
    (folder / "fleet.yaml").write_text("".join(["hosts:\n", *rows]))


@pytest.mark.parametrize("names", [(), ("one",)])
def test_status_counts_servers_of_others_only_where_asked_to(
    judged: Path, names: tuple[str, ...]
) -> None:
    fleet_of(judged, *names)
    code, text = run("status")
    assert code == 0
    apart = text.partition("--all counts them")[2]
    assert "127.0.0.1:8000" in apart and "one" not in apart
    done = CliRunner().invoke(cli.main, ["status", "--json"])
    assert (done.exit_code, list(json.loads(done.stdout))) == (0, ["one"])
    assert "127.0.0.1:8000" in done.stderr
    code, text = run("status", "--all")
    assert (code, "Not counted" in text) == (2, False)


def test_status_names_a_host_that_was_never_tested(
    judged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(judged)
    (judged / "fleet.yaml").write_text(
        'hosts:\n  one: {address: a}\n  two: {address: b}\n  "@local": {address: "@local"}\n'
    )
    code, text = run("status")
    assert code == 2
    assert "two: no verdict yet" in text and "@local: no verdict yet" in text
    assert "one: no verdict yet" not in text
    done = CliRunner().invoke(cli.main, ["status", "--json"])
    told = json.loads(done.stdout)
    assert (done.exit_code, told["two"], told["one"]["persisted"]) == (2, None, "PASS")
    (judged / "fleet.yaml").write_text("hosts: [\n")
    code, text = run("status")
    assert code == 2 and "fleet.yaml:2" in text


def test_what_provisions_is_named_as_it_is_here(tmp_path: Path) -> None:
    assert up_command(ROOT) == "bin/up"
    assert up_command(tmp_path) == "kvhost up"


def test_no_message_names_bin_up_by_itself() -> None:
    """A copy that `kvhost init` made has none; basics.up_command() knows."""
    texts = (*ROOT.glob("kvhost/**/*.py"), *ROOT.glob("deploys/**/*.py"), *ROOT.glob("*.py"))
    found = {
        path.name
        for path in texts
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and "bin/up" in str(node.value)
    }
    assert found <= {"basics.py", "run.py"}


def test_a_verify_that_was_refused_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(inventory: str, deploy: str, args: tuple[str, ...]) -> int:
        journal.tell("hosts", names=["h"], unreachable=[])
        journal.tell("refused", host="h", why="run_lock")
        return 1

    monkeypatch.delenv(journal.VARIABLE, raising=False)
    monkeypatch.setattr(cli, "pyinfra", refuse)
    code, text = run("verify", "--inventory", "inventory.py")
    assert (code, text) == (1, "no verdict: every host that was reached is refused, see above\n")
    assert journal.VARIABLE not in os.environ


def test_init_of_a_copy_that_is_up_to_date_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, text = run("init", str(tmp_path))
    assert (code, "files written. Next: cd " in text) == (0, True)
    monkeypatch.chdir(tmp_path)
    code, text = run("init", ".")
    assert (code, text.startswith(".: up to date. Next: kvhost ")) == (0, True), text
