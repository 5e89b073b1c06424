"""The journal of a run and what `kvhost up` makes of it: batches, where it stops, what it says."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvhost import cli
from kvhost.commands import run_log
from kvhost.commands import up as cli_up
from kvhost.commands.asking import answer
from kvhost.commands.up import Ended, Rolling, batches
from kvhost.records import journal, receipts
from kvhost.records.journal import Row, read_journal, tell

HOSTS = ["a", "b", "c", "d", "e"]


@pytest.mark.parametrize(
    ("rolling", "expected"),
    [
        (Rolling(batch=2), [["a", "b"], ["c", "d"], ["e"]]),
        (Rolling(canary="c"), [["c"], ["a", "b", "d", "e"]]),
        (Rolling(canary="2", batch=2), [["a", "b"], ["c", "d"], ["e"]]),
        (Rolling(canary="b", batch=3), [["b"], ["a", "c", "d"], ["e"]]),
        (Rolling(canary="9"), [HOSTS]),
    ],
)
def test_batches(rolling: Rolling, expected: list[list[str]]) -> None:
    assert batches(HOSTS, rolling) == expected


def test_every_host_comes_once() -> None:
    for size in range(1, 7):
        for canary in (None, "1", "3", "d"):
            parts = batches(HOSTS, Rolling(size, canary))
            assert sorted(name for part in parts for name in part) == HOSTS
            assert all(parts)


def test_no_password_is_written_down(tmp_path: Path) -> None:
    words = ["up", "--ssh-password", "pw-one", "--ssh-key-password=pw-two", "--use-sudo-password",
             "--limit", "a"]  # fmt: skip
    path = journal.begin(tmp_path / "runs", words)
    text = path.read_text()
    assert "pw-one" not in text
    assert "pw-two" not in text
    assert read_journal(path).command[-3:] == ["--use-sudo-password", "--limit", "a"]
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "word",
    [
        "shared_tier=redis://u:geheim123@10.0.0.5:6379", "shared_tier=redis://:geheim123@h",
        "api_key=geheim123", "--data=shared_tier=redis://u:geheim123@h", "redis://u:geh/geheim123@h",
        'runner_extra_args=["--api-key","geheim123"]', "note=Bearer geheim123",
    ],
)  # fmt: skip
def test_no_secret_of_a_setting_is_written_or_shown(tmp_path: Path, word: str) -> None:
    path = journal.begin(tmp_path, ["kvhost", "up", "--data", word])
    assert "geheim123" not in path.read_text()
    again = journal.retry_command(["kvhost", "up", "--data", word], [Row("a", "failed")])
    assert again is not None
    assert "geheim123" not in again
    assert "***" in again


def test_what_is_no_secret_stays_in_the_command(tmp_path: Path) -> None:
    words = ["kvhost", "up", "--data", "api_key_file=secrets/key", "--data=chunk_size=64",
             "--data", "verify_prompt_tokens=900",
             "--data", "shared_tier=redis://h:6379"]  # fmt: skip
    assert read_journal(journal.begin(tmp_path, words)).command == words


def test_old_journals_go(tmp_path: Path) -> None:
    made = [journal.begin(tmp_path, ["up"]) for _ in range(journal.KEPT + 3)]
    assert sorted(tmp_path.glob("*.jsonl")) == made[3:]
    assert journal.newest(tmp_path) == made[-1]


@pytest.mark.parametrize("event", ["why", "refused", "unreachable", "failed", "error"])
def test_no_secret_is_in_a_reason(
    event: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVHOST_API_KEY", "geheim/123")
    monkeypatch.setattr(run_log, "_hidden", set())
    run_log.hide(["sesame1"])
    why = "no sesame1, no geheim%2F123 at https://geheim456@h"
    path = tmp_path / "journal"
    tell(event, str(path), host="sesame1", name="a step", why=why)
    (row,) = read_journal(path).rows.values()
    assert row.why == "no ********, no ******** at https://********@h"
    assert row.host == "sesame1"  # by which it is known


def told(path: Path, *events: dict[str, object]) -> dict[str, Row]:
    for event in events:
        tell(str(event.pop("event")), str(path), **event)
    return read_journal(path).rows


def test_a_killed_run_says_at_which_step(tmp_path: Path) -> None:
    path = tmp_path / "j"
    rows = told(
        path,
        {"event": "hosts", "names": ["a", "b", "c"], "unreachable": ["c"]},
        {"event": "refused", "host": "b", "why": "path_taken"},
        {"event": "step", "host": "a", "name": "one"},
        {"event": "step", "host": "b", "name": "refused: see the plan above"},
        {"event": "error", "host": "b", "name": "refused: see the plan above"},
        {"event": "step", "host": "a", "name": "two"},
    )
    with path.open("a") as file:
        file.write('{"event": "step", "host": "a", "na')  # cut off
    again = read_journal(path).rows
    assert again == rows
    assert [(r.host, r.result, r.step) for r in rows.values()] == [
        ("a", "broken off", "two"), ("b", "refused", None), ("c", "unreachable", None),
    ]  # fmt: skip
    again_words = journal.retry_command(["kvhost", "up", "--limit", "old"], rows.values())
    assert again_words == "kvhost up --limit a --limit b --limit c"


def test_a_host_that_is_not_reached_has_its_reason_and_its_place(tmp_path: Path) -> None:
    away: dict[str, object] = {"event": "unreachable", "host": "b", "why": "no route"}
    rows = told(tmp_path / "j", away)  # nobody else was asked, and no deploy began
    assert list(rows.values()) == [Row("b", "unreachable", why="no route")]
    hosts: dict[str, object] = {"event": "hosts", "names": ["a", "b"], "unreachable": ["b"]}
    rows = told(tmp_path / "j", dict(hosts))
    assert list(rows.values()) == [Row("a"), Row("b", "unreachable", why="no route")]
    rows = told(tmp_path / "j", hosts | {"unreachable": []})  # it came back
    assert list(rows.values()) == [Row("a"), Row("b")]


@pytest.mark.parametrize(
    ("row", "good"),
    [
        (Row("a", "changed", persisted="PASS"), True),
        (Row("a", "unchanged", persisted="PASS"), True),
        (Row("a", "unchanged", untested=True), True),
        (Row("a", "changed", persisted="INCONCLUSIVE"), False),
        (Row("a", "changed", persisted="FAIL"), False),
        (Row("a", "changed"), False),
        (Row("a", "failed", persisted="PASS"), False),
        (Row("a", "refused", untested=True), False),
        (Row("a", "not started"), False),
    ],
)
def test_only_a_pass_is_good(row: Row, good: bool) -> None:
    assert row.good is good


class Run:
    """Stands for pyinfra: tells the journal what a run of these hosts would."""

    def __init__(self, *, refused: str = "", away: str = "", sick: str = "",
                 verdicts: dict[str, str] | None = None) -> None:  # fmt: skip
        self.refused, self.away, self.sick = refused, away, sick
        self.verdicts = verdicts or {}
        self.ran: list[list[str]] = []
        self.asked: list[list[str]] = []

    def names(self, args: tuple[str, ...]) -> list[str]:
        given = [args[n + 1] for n, word in enumerate(args) if word == "--limit"]
        return given or HOSTS

    def deploy_file(self, inventory: str, deploy: str, args: tuple[str, ...]) -> int:
        names = self.names(args)
        if deploy == "deploys/health.py":
            self.asked.append(names)
            for name in names:
                answer(name, {"why": "the runner is FATAL" if name in self.sick else None})
            return int(any(name in self.sick for name in names))
        assert deploy == "deploys/plan.py"
        tell("hosts", names=names, unreachable=[n for n in names if n in self.away])
        for name in names:
            if name in self.refused:
                tell("refused", host=name, why="no_space")
            elif name not in self.away:
                tell("done", host=name, changed=0)
        return int(bool(self.refused or self.away))

    def one(self, args: tuple[str, ...]) -> int:
        names = self.names(args)
        self.ran.append(names)
        tell("hosts", names=names, unreachable=[])
        verdicts = [self.verdicts.get(name, "PASS") for name in names]
        for name, verdict in zip(names, verdicts, strict=True):
            tell("step", host=name, name="verify")
            if verdict == "cut":
                continue
            tell("verdict", host=name, persisted=verdict)
            tell("done" if verdict == "PASS" else "error", host=name, name="verify", changed=2)
        return 1 if set(verdicts) & {"FAIL", "cut"} else 2 if "INCONCLUSIVE" in verdicts else 0

    def ended(self, *args: str, **rolling: str | int) -> Ended:
        try:
            return cli_up.up(self.deploy_file, self.one, "i.py", args, Rolling(**rolling))  # type: ignore[arg-type]
        except KeyboardInterrupt:  # it would end pytest
            pytest.fail("up() was left without a word")

    def up(self, *args: str, **rolling: str | int) -> int:
        return self.ended(*args, **rolling).code


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVHOST_RUNS", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


def results(runs: Path) -> dict[str, str]:
    path = journal.newest(runs)
    assert path is not None
    return {row.host: row.result for row in read_journal(path).rows.values()}


def test_all_batches_with_the_gate_between(runs: Path) -> None:
    run = Run()
    assert run.up(batch=2, canary="c") == 0
    assert run.ran == [["c"], ["a", "b"], ["d", "e"]]
    assert run.asked == [["c"], ["a", "b"]]  # after the last there is nothing to hold back
    assert set(results(runs).values()) == {"changed"}
    assert journal.VARIABLE not in os.environ


@pytest.mark.parametrize(("verdict", "code"), [("FAIL", 1), ("INCONCLUSIVE", 2)])
def test_it_stops_at_a_verdict_that_is_not_pass(
    runs: Path, capsys: pytest.CaptureFixture[str], verdict: str, code: int
) -> None:
    run = Run(verdicts={"b": verdict})
    assert run.up("--data", "verify=always", batch=2) == code
    assert run.ran == [["a", "b"]]
    assert results(runs) == {"a": "changed", "b": "failed", **dict.fromkeys("cde", "not started")}
    said = capsys.readouterr().out
    assert "STOPPED: b (failed)" in said
    assert "3 hosts were not begun" in said
    assert (
        "kvhost up --inventory i.py --batch 2 --data verify=always "
        "--limit b --limit c --limit d --limit e" in said
    )


def test_a_host_that_fell_ill_after_its_verdict_stops_it(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(sick="a")
    assert run.up(canary="a") == 1
    assert run.ran == [["a"]]
    assert results(runs)["a"] == "failed"
    assert "the runner is FATAL" in capsys.readouterr().out


def test_refused_and_unreachable_hosts_are_left_out_and_the_others_done(runs: Path) -> None:
    run = Run(refused="b", away="d")
    assert run.up(batch=3) == 1
    assert run.ran == [["a", "c", "e"]]
    assert results(runs) == {
        "a": "changed", "b": "refused", "c": "changed", "d": "unreachable", "e": "changed",
    }  # fmt: skip


def test_a_canary_that_cannot_be_run_stops_all(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(refused="b")
    assert run.up(canary="b") == 1
    assert run.ran == []
    assert "nothing was done" in capsys.readouterr().out


def test_hosts_that_are_chosen_stay_so(runs: Path) -> None:
    run = Run()
    assert run.up("--limit", "b", "--limit", "d", batch=1) == 0
    assert run.ran == [["b"], ["d"]]


def test_a_run_without_batches_is_one_run(runs: Path) -> None:
    run = Run()
    assert run.up() == 0
    assert (run.ran, run.asked) == ([HOSTS], [])


def interrupted(number: int) -> None:
    """As the process that the run is in hears it, between two runs of pyinfra."""
    os.kill(os.getpid(), number)
    time.sleep(0)  # Python's handlers run between two of its own instructions


@pytest.mark.parametrize(
    ("phase", "passed", "left"),
    [
        ("plan", "", "abcde"),
        ("batch", "ab", "cde"),  # the second, before its first operation
        ("gate", "ab", "cde"),
        ("between", "ab", "cde"),
    ],
)
def test_broken_off_in_any_phase_it_says_where_it_stood(
    runs: Path, capsys: pytest.CaptureFixture[str], phase: str, passed: str, left: str
) -> None:
    """Nobody failed: what had passed stays so, and the rest is what the next run is for."""

    class Cut(Run):
        def deploy_file(self, inventory: str, deploy: str, args: tuple[str, ...]) -> int:
            if phase == "plan":  # broken off before any host had its plan
                tell("hosts", names=HOSTS, unreachable=[])
                return cli_up.INTERRUPTED
            if deploy == "deploys/health.py" and phase == "gate":
                answer("a", {"why": "its services could not be asked for"})  # asked by what ended
                return cli_up.INTERRUPTED
            return super().deploy_file(inventory, deploy, args)

        def one(self, args: tuple[str, ...]) -> int:
            if phase == "batch" and self.ran:
                self.ran.append(self.names(args))
                tell("hosts", names=self.names(args), unreachable=[])
                return cli_up.INTERRUPTED
            if phase == "between" and self.ran:
                raise KeyboardInterrupt
            return super().one(args)

    run = Cut()
    ended = run.ended(batch=2)
    assert ended.code == cli_up.INTERRUPTED
    assert len(run.ran) == {"plan": 0, "batch": 2}.get(phase, 1)
    assert results(runs) == {
        **dict.fromkeys(passed, "changed"), **dict.fromkeys(left, "not started")
    }  # fmt: skip
    limits = " ".join(f"--limit {name}" for name in left)
    retry = f"kvhost up --inventory i.py --batch 2 {limits}"
    assert retry in capsys.readouterr().out
    told = json.loads(cli_up.as_json(ended))
    assert (told["exit"], told["retry"]) == (cli_up.INTERRUPTED, retry)
    assert json.loads(ended.journal.read_text().splitlines()[-1]) == {"event": "end", "code": 130}
    assert journal.VARIABLE not in os.environ


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_wait_between_batches_is_broken_off(
    runs: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    heard: list[int] = []
    before = signal.signal(number, lambda *_: heard.append(number))  # who ran the command
    monkeypatch.setattr(cli_up, "pause", lambda _: interrupted(number))
    try:
        run = Run()
        assert run.up(batch=4, wait_s=86_400) == cli_up.INTERRUPTED
        assert (run.ran, heard) == ([["a", "b", "c", "d"]], [])
        assert results(runs)["e"] == "not started"
        interrupted(number)
        assert heard == [number]
    finally:
        signal.signal(number, before)


def test_a_second_interrupt_does_not_take_the_end(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    show = cli_up.show

    def again(told: journal.Told) -> None:
        interrupted(signal.SIGINT)
        show(told)

    monkeypatch.setattr(cli_up, "pause", lambda _: interrupted(signal.SIGINT))
    monkeypatch.setattr(cli_up, "show", again)
    assert Run().up(batch=4, wait_s=9) == cli_up.INTERRUPTED
    assert "--limit e" in capsys.readouterr().out


@pytest.mark.parametrize("away", ["", "b"])
def test_broken_off_before_its_hosts_are_known_all_of_it_is_left(
    runs: Path, capsys: pytest.CaptureFixture[str], away: str
) -> None:
    """What is known then are at most hosts that were seen to be away."""

    def deploy_file(*_: object) -> int:
        if away:
            tell("unreachable", host=away, why="no route")
        return cli_up.INTERRUPTED

    rolling = Rolling(batch=2, canary="c")
    words = ("--limit", "b", "--limit", "c")
    ended = cli_up.up(deploy_file, Run().one, "i.py", words, rolling)
    assert (ended.code, list(ended.told.rows)) == (cli_up.INTERRUPTED, list(away))
    retry = "kvhost up --inventory i.py --batch 2 --canary c --limit b --limit c"
    assert retry in capsys.readouterr().out
    assert json.loads(cli_up.as_json(ended))["retry"] == retry


def test_a_canary_that_passed_is_no_canary_of_the_next_run() -> None:
    words = ["kvhost", "up", "--canary", "a", "--batch", "2"]
    again = journal.retry_command(words, [Row("a", "changed", persisted="PASS"), Row("b")])
    assert again == "kvhost up --batch 2 --limit b"
    assert journal.retry_command(words, [Row("a"), Row("b")]) == (
        "kvhost up --canary a --batch 2 --limit a --limit b"
    )


def test_a_rebuild_is_gone_on_with_by_rebuild(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`up` would leave another receipt, and compare it with nothing."""
    monkeypatch.setattr(
        cli, "run_and_tell", lambda *words: Run(verdicts={"a": "FAIL"}).one(words[2])
    )
    monkeypatch.setenv("KVHOST_RECEIPTS", str(runs))
    receipts.keep(runs, "a", {}, None)
    words = ["rebuild", "--inventory", "i.py", "a", "--data", "chunk_size=64"]
    result = CliRunner().invoke(cli.main, words)
    assert result.exit_code == 1
    assert f"\n  kvhost {' '.join(words)}\n" in result.output
    path = journal.newest(runs)
    assert path is not None
    path.write_text(path.read_text().splitlines()[0] + "\n")  # killed before its hosts were known
    assert journal.retry_of(read_journal(path)) == f"kvhost {' '.join(words)}"


def test_the_json_is_of_this_run_whatever_was_begun_meanwhile(runs: Path) -> None:
    class Slow(Run):
        def one(self, args: tuple[str, ...]) -> int:
            code = super().one(args)
            path = journal.begin(runs, ["kvhost", "up", "--limit", "b"])  # another terminal's
            tell("hosts", str(path), names=["b"], unreachable=[])
            return code

    told = json.loads(cli_up.as_json(Slow(verdicts={"a": "FAIL"}).ended("--limit", "a")))
    assert (told["exit"], [row["host"] for row in told["hosts"]]) == (1, ["a"])
    assert told["retry"] == "kvhost up --inventory i.py --limit a"
    assert journal.newest(runs) != Path(told["journal"])


def test_the_next_run_says_where_the_last_stood(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(verdicts={"a": "cut"})
    assert run.up(batch=1) == cli_up.INTERRUPTED
    path = journal.newest(runs)
    assert path is not None
    lines = path.read_text().splitlines()
    child = subprocess.Popen(["true"])
    child.wait()
    first = lines[0].replace(f'"pid": {os.getpid()}', f'"pid": {child.pid}')
    path.write_text("\n".join([first, *lines[1:-1]]) + "\n")  # without its end
    capsys.readouterr()
    assert Run().up() == 0
    said = capsys.readouterr().out
    assert "did not end" in said
    assert "broken off" in said
    assert "verify" in said
    capsys.readouterr()
    Run().up()
    assert "did not end" not in capsys.readouterr().out


def test_where_only_a_test_was_left_out_the_next_step_is_to_disturb() -> None:
    """A run again alone would leave it out again, for ever."""
    in_use = Row("a", "failed", persisted="INCONCLUSIVE", in_use=True)
    good = Row("b", "unchanged", persisted="PASS")
    assert journal.only_in_use([in_use, good])
    again = journal.retry_command(["kvhost", "up", "--data", "k=v"], [in_use, good])
    assert again == "kvhost up --data k=v --data disrupt=true --limit a"
    assert not journal.only_in_use([in_use, Row("c", "failed")])
    again = journal.retry_command(["kvhost", "up"], [in_use, Row("c", "failed")])
    assert again == "kvhost up --limit a --limit c"


def test_what_a_journal_says_of_a_test_that_was_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    events = [{"event": "hosts", "names": ["a"], "unreachable": []},
              {"event": "in_use", "host": "a"}]  # fmt: skip
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    assert journal.read_journal(path).rows["a"].in_use
