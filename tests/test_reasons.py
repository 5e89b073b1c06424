"""Why a host failed, in short: in the summary of the run, in its JSON, and never with a secret."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvhost import working_copy
from kvhost.commands import up as cli_up
from kvhost.commands.care import ask_all
from kvhost.commands.run_log import secrets_of_env
from kvhost.records import journal
from kvhost.records.journal import read_journal, tell
from tests.copy_tools import Copy
from tests.e2e_tools import REPO

pytestmark = pytest.mark.fleet

ENV_KEY, FILE_KEY = "sk-7d1b6a0c2f", "word-of-a-file-51"
INVENTORY = """
from pyinfra.connectors.local import LocalConnector

LocalConnector.make_names_data = staticmethod(lambda name=None: iter([(name, {}, [])]))
hosts = [f"@local/{name}" for name in ("told", "named", "last", "mute", "shown", "late", "good")]
"""
#: each host fails in its own way, after a step in which a command failed and the host did not
DEPLOY = f"""
from pyinfra import host
from pyinfra.api import FunctionCommand, StringCommand, operation

from deploys.common.journal import keep_journal
from deploys.common.operations import refuse, shown
from deploys.common.reasons import hide
from kvhost.secrets import Secret

keep_journal()
hide([None, Secret("{FILE_KEY}")])
HOW = {{
    "told": refuse("no room, the key is {ENV_KEY}\\n  and {FILE_KEY}: " + "x" * 300),
    "named": StringCommand(
        "echo progress >&2; echo 'engine: it does not load' >&2; echo '  torch {ENV_KEY}' >&2; "
        "echo 'The rest is as it was.' >&2; echo out; exit 3"
    ),
    "last": StringCommand("echo 'some line'; echo 'E: no such package'; exit 100"),
    "mute": StringCommand("false"),
    "shown": shown("echo 'hint: no' >&2; echo 'apt: gone' >&2; echo 'note: see' >&2; exit 1"),
    "late": StringCommand("sleep 9", _timeout=1),
    "good": StringCommand("true"),
}}


def asks(state, host):
    host.run_shell_command("echo 'old: nothing' >&2; false")
    return True


@operation(is_idempotent=False)
def before():
    yield FunctionCommand(asks, (), {{}})


@operation(is_idempotent=False)
def step(how):
    yield how


before(name="before: all is well")
step(name="stage: the step", how=HOW[host.name])
"""


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The journal of a run of pyinfra over these hosts."""
    path = tmp_path_factory.mktemp("copy")
    working_copy.make(path)
    (path / "many.py").write_text(INVENTORY)
    (path / "fails.py").write_text(DEPLOY)
    kept = path / "journal"
    env = {journal.VARIABLE: str(kept), "KVHOST_API_KEY": ENV_KEY}
    code, text = Copy(path).pyinfra("many.py", "fails.py", **env)
    assert code == 1, text
    return kept


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("told", "no room, the key is ******** and ********: xxx"),
        ("named", "engine: it does not load torch ******** The rest is as it was."),
        ("last", "E: no such package"),
        ("mute", "stage: the step: the run's log says more"),
        ("shown", "apt: gone note: see"),
        ("late", "TimeoutError"),
    ],
)
def test_a_host_that_failed_says_why(kept: Path, name: str, why: str) -> None:
    row = read_journal(kept).rows[name]
    assert (row.result, row.step) == ("failed", "stage: the step")
    assert row.why is not None and row.why.startswith(why), row.why
    assert len(row.why) <= 200


def test_no_secret_is_kept_and_a_host_that_did_not_fail_has_no_reason(kept: Path) -> None:
    assert ENV_KEY not in kept.read_text() and FILE_KEY not in kept.read_text()
    good = read_journal(kept).rows["good"]
    assert (good.result, good.why) == ("changed", None)


def test_every_variable_of_a_secret_is_masked() -> None:
    from kvhost import basics

    names = {value for name, value in vars(basics).items() if name.endswith("_VARIABLE")}
    names -= {basics.SUMMARY_VARIABLE}
    assert secrets_of_env({name: f"of {name}" for name in names} | {"PATH": "/"}) == [
        f"of {name}" for name in ("KVHOST_API_KEY", "HF_TOKEN", "KVHOST_SHARED_PASSWORD")
    ]


def fails(args: tuple[str, ...]) -> int:
    """Stands for a run of pyinfra: of three hosts one fails at a step, one before any."""
    tell("hosts", names=["a", "b", "c"], unreachable=[])
    tell("step", host="a", name="engine: tools")
    tell("error", host="a", name="engine: tools", why="engine: \x1b[31mno space is left")
    tell("failed", host="b", why=None)
    tell("untested", host="c")
    tell("done", host="c", changed=0)
    return 1


def test_the_summary_and_its_json_say_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVHOST_RUNS", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    ended = cli_up.up(lambda *_: 0, fails, "i.py", (), cli_up.Rolling())
    assert ended.code == 1
    told = capsys.readouterr().out
    assert "engine: \ufffd[31mno space is left" in told
    assert "it failed before its first step: the run's log says more" in told
    rows = {row["host"]: row["why"] for row in json.loads(cli_up.as_json(ended))["hosts"]}
    assert rows == {
        "a": "engine: \x1b[31mno space is left",
        "b": "it failed before its first step: the run's log says more",
        "c": None,
    }


def test_what_came_first_is_the_reason(tmp_path: Path) -> None:
    """A run that went back says so; that its step then failed is what follows from it."""
    kept = str(tmp_path / "j")
    tell("why", kept, host="a", why="went back to what passed last: no PASS")
    tell("error", kept, host="a", name="verify: the test", why="WENT BACK to envs/0")
    tell("failed", kept, host="a", why="another")
    assert read_journal(Path(kept)).rows["a"].why == "went back to what passed last: no PASS"


def test_a_host_without_an_answer_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(inventory: str, deploy: str, args: tuple[str, ...]) -> int:
        assert os.environ[journal.VARIABLE]
        return fails(args)

    _, _, silent = ask_all(run, "i.py", "deploys/logs.py", (), {})
    assert silent["a"] == "it gave no answer: engine: \x1b[31mno space is left"
    assert silent["c"] == "it gave no answer"


def test_the_end_of_a_log_is_no_reason() -> None:
    """ready.py shows it behind the reason. In a process of its own: it imports pyinfra."""
    why = "not ready after 20 s; missing: vLLM: timed out"
    said = [
        "  ... 10 s, waiting for vLLM", why, "last lines of /b/log/runner.log:",
        "  | INFO 11-30 Engine 000: 0.0 tokens/s",
    ]  # fmt: skip
    code = f"from deploys.common.reasons import last_words; print(last_words({said!r}))"
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, cwd=REPO, text=True, capture_output=True, check=True)
    assert done.stdout.strip() == why


@pytest.mark.parametrize("more", [590, 596, 599])
def test_what_a_look_said_is_masked_before_it_is_cut(more: int) -> None:
    code = (
        "from deploys.common.looks import json_of\n"
        f"print(json_of({{'exit': 1, 'out': {ENV_KEY!r} + 'x' * {more}}})['why'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[1], text=True, check=True,
        env={**os.environ, "KVHOST_API_KEY": ENV_KEY}, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert not set(done.stdout.strip()) - {"*", "x"}
