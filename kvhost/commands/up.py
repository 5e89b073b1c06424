"""`kvhost up` over many hosts: batches, a canary first, a gate between, and what became of each."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from time import sleep as pause
from typing import Any, TextIO

import click

from kvhost.basics import counted, printable
from kvhost.commands.run import program
from kvhost.commands.running import heard_by
from kvhost.records import journal
from kvhost.records.journal import RESULTS, Row, Told

#: runs a deploy file: (inventory, deploy, arguments) -> exit code
Runner = Callable[[str, str, tuple[str, ...]], int]
#: runs the deploy over some hosts and tells their verdicts: arguments of pyinfra -> exit code
Batch = Callable[[tuple[str, ...]], int]
INTERRUPTED = 130


@dataclass(frozen=True)
class Rolling:
    """How a run is cut: ``batch`` hosts at a time, ``canary`` (a host, or how many) before all."""

    batch: int | None = None
    canary: str | None = None
    wait_s: int = 0

    @property
    def asked(self) -> bool:
        return self.batch is not None or self.canary is not None

    @property
    def words(self) -> list[str]:
        """The options, as they are typed."""
        words = ["--batch", str(self.batch)] if self.batch is not None else []
        words += ["--canary", self.canary] if self.canary is not None else []
        return words + (["--wait", str(self.wait_s)] if self.wait_s else [])


@dataclass(frozen=True)
class Ended:
    """A run that ended: its exit code, its own journal, and what that says."""

    code: int
    journal: Path
    told: Told


def batches(names: Sequence[str], rolling: Rolling) -> list[list[str]]:
    """Hosts in the order of their turn. Raises ValueError if the canary is none of them.

    >>> batches(["a", "b", "c", "d"], Rolling(batch=2, canary="c"))
    [['c'], ['a', 'b'], ['d']]
    """
    first: list[str] = []
    if rolling.canary is not None and rolling.canary.isdecimal():
        first = list(names[: int(rolling.canary)])
    elif rolling.canary is not None:
        if rolling.canary not in names:
            raise ValueError(rolling.canary)
        first = [rolling.canary]
    rest = [name for name in names if name not in first]
    size = rolling.batch or max(len(rest), 1)
    parts = [rest[at : at + size] for at in range(0, len(rest), size)]
    return [first, *parts] if first else parts


def limits(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(word for name in names for word in ("--limit", name))


def up(
    run: Runner,
    one: Batch,
    inventory: str,
    args: tuple[str, ...],
    rolling: Rolling,
    typed: Sequence[str] | None = None,
) -> Ended:
    """Runs, shows what became of every host, and how to retry.

    ``run``: any deploy file; ``one``: the deploy over some hosts; ``typed``: the command, and what
    is to be typed again, if that is not `up` with all this.
    """
    folder = journal.runs_dir()
    tell_of_the_last(folder)
    words = typed or ["up", "--inventory", inventory, *rolling.words, *args]
    try:
        path = journal.begin(folder, [program(), *words])
    except OSError as error:
        raise click.ClickException(f"no journal can be written in {folder}: {error}") from error
    goes_on = True

    def stop(*_: Any) -> None:
        """Between the runs of pyinfra, which hear it themselves. The end is told in any case."""
        nonlocal goes_on
        if goes_on:
            goes_on = False
            raise KeyboardInterrupt

    with heard_by(stop):
        try:
            os.environ[journal.VARIABLE] = str(path)
            code = _roll(run, one, inventory, args, rolling, path) if rolling.asked else one(args)
        except KeyboardInterrupt:
            code = INTERRUPTED
            click.echo("BROKEN OFF: nothing more is begun on any host.")
        finally:
            goes_on = False
            os.environ.pop(journal.VARIABLE, None)
        return _ended(code, path)


def _ended(code: int, path: Path) -> Ended:
    told = journal.read_journal(path)
    rows = list(told.rows.values())
    if any(row.result == "broken off" for row in rows):
        code = INTERRUPTED
    journal.tell("end", str(path), code=code)
    if len(rows) > 1 or any(not row.good for row in rows) or (not rows and code == INTERRUPTED):
        show(told)
    return Ended(code, path, told)


def _heed(code: int) -> int:
    """Raises KeyboardInterrupt where a run of pyinfra was broken off."""
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    return code


def _roll(
    run: Runner, one: Batch, inventory: str, args: tuple[str, ...], rolling: Rolling, path: Path
) -> int:
    """One plan over all, then batch by batch; stops at the first that is not as it should be.

    Raises KeyboardInterrupt where it is broken off, and has told the journal nothing then of hosts
    that did not fail.
    """
    rest = tuple(journal.drop_limits(args))
    ready = _ready(run, inventory, args, path)
    if ready is None:
        return 1
    try:
        parts = batches(ready, rolling)
    except ValueError as error:
        click.echo(
            f"the canary {error} is not among the hosts that can be run ({', '.join(ready)}): "
            "nothing was done. Mend it, or name another."
        )
        return 1
    code = int(any(not row.good for row in journal.read_journal(path).rows.values()
                   if row.host not in ready))  # fmt: skip
    for number, names in enumerate(parts, 1):
        click.echo(f"--> Batch {number} of {len(parts)}: {', '.join(names)}")
        code = max(code, _heed(one((*rest, *limits(names)))), key=_gravity)
        rows = journal.read_journal(path).rows
        bad = [rows[name] for name in names if name in rows and not rows[name].good]
        bad += [Row(name) for name in names if name not in rows]
        if not bad and number < len(parts):
            bad = _unhealthy(run, inventory, rest, names, rolling.wait_s, path)
        if bad:
            _stopped(bad, sum(map(len, parts[number:])))
            return code if code in (1, 2) else 1
    return code


def _gravity(code: int) -> int:
    """A failure outweighs a verdict that is inconclusive."""
    return {0: 0, 2: 1}.get(code, 2)


def _ready(run: Runner, inventory: str, args: tuple[str, ...], path: Path) -> list[str] | None:
    """The hosts that can be reached and are not refused; the others are told to the journal.

    None when nothing could be planned. Raises KeyboardInterrupt.
    """
    with tempfile.TemporaryDirectory() as folder:
        planned = Path(folder, "plan.jsonl")
        os.environ[journal.VARIABLE] = str(planned)
        try:
            code = run(inventory, "deploys/plan.py", ("-y", *args))
        finally:
            os.environ[journal.VARIABLE] = str(path)
        told = journal.read_journal(planned) if planned.exists() else journal.Told()
    rows = told.rows
    if not rows and code != INTERRUPTED:
        click.echo("no host was asked: see above")
        return None
    away = [row.host for row in rows.values() if row.result == "unreachable"]
    if told.listed or code != INTERRUPTED:
        journal.tell("hosts", names=list(rows), unreachable=away)
    for row in rows.values():
        if row.result == "unreachable" and row.why:
            journal.tell("unreachable", host=row.host, why=row.why)
    _heed(code)  # what it broke off is no plan: nothing is said against these hosts
    for row in rows.values():
        if row.result == "refused":
            journal.tell("refused", host=row.host, why=row.why)
        elif row.result not in (*journal.GOOD, "unreachable"):
            journal.tell("error", host=row.host, name=row.step or "plan", why=row.why)
    ready = [row.host for row in rows.values() if row.result in journal.GOOD]
    if not ready:
        click.echo(f"nothing was done: {none_done(rows.values())}")
        return None
    return ready


def none_done(rows: Iterable[Row]) -> str:
    """Why a run gave no verdict, from what became of its hosts."""
    results = {row.result for row in rows}
    if results == {"unreachable"}:
        return "no host could be reached, see above"
    if results and results <= {"unreachable", "refused"}:
        return "every host that was reached is refused, see above"
    return "the run failed, see above"


def _unhealthy(
    run: Runner,
    inventory: str,
    args: tuple[str, ...],
    names: Sequence[str],
    wait_s: int,
    path: Path,
) -> list[Row]:
    """The gate: of a batch that passed, the hosts that are not well any more.

    Raises KeyboardInterrupt.
    """
    if wait_s:
        click.echo(f"--> Waiting {wait_s} s before the next batch")
        pause(wait_s)
    os.environ.pop(journal.VARIABLE, None)  # its operations are no steps of the run
    try:
        from kvhost.commands.care import ask

        code, found = ask(run, inventory, "deploys/health.py", (*args, *limits(names)), {})
    finally:
        os.environ[journal.VARIABLE] = str(path)
    _heed(code)  # what it broke off is no answer: they passed
    why = dict.fromkeys(names, "it gave no answer") | {row["host"]: row["why"] for row in found}
    for name, reason in why.items():
        if reason is not None:
            journal.tell("error", host=name, name="health after the batch", why=reason)
    rows = journal.read_journal(path).rows
    return [rows[name] for name, reason in why.items() if reason is not None]


def _stopped(bad: Sequence[Row], untouched: int) -> None:
    which = ", ".join(f"{row.host} ({_what(row)})" for row in bad)
    left = f"{counted(untouched, 'host')} {'was' if untouched == 1 else 'were'} not begun"
    click.echo(f"STOPPED: {which}. {left}, and nothing was changed there.")


def _what(row: Row) -> str:
    if row.result in journal.GOOD and not row.good:
        return f"persisted {row.persisted or 'not known'}"
    return row.result


def tell_of_the_last(folder: Path) -> None:
    """Where the last run stood, if it was killed or its controller lost."""
    path = journal.newest(folder)
    if path is None:
        return
    try:
        told = journal.read_journal(path)
    except OSError as error:
        click.echo(f"the journal of the last run cannot be read: {error}", err=True)
        return
    if told.ended or not told.rows:
        return
    if told.alive:
        click.echo(
            f"Another run from here goes on, process {told.pid}, since {told.time}: hosts that it "
            "works on are refused."
        )
        return
    click.echo(f"The last run from here, of {told.time}, did not end. It stood here:")
    show(told)


def show(told: Told) -> None:
    """A row a host, the counts, and the command that runs again what is not done."""
    rows = list(told.rows.values())
    if rows:
        _table(rows)
    again = journal.retry_of(told)
    if again is not None:
        stopped = all(row.result in ("broken off", "not started") for row in rows if not row.good)
        when = "To go on" if stopped else "Once that is mended"
        when = "When they may be disturbed" if journal.only_in_use(rows) else when
        which = "for these hosts alone" if told.listed else "for all that were asked for"
        click.echo(f"{when}, {which}:\n  {again}")


def _table(rows: Sequence[Row]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for name in ("host", "result", "verdict", "at", "why"):
        table.add_column(name, overflow="fold")
    for row in rows:
        verdict = row.persisted or ("not asked for" if row.untested else "")
        table.add_row(
            *map(printable, (row.host, row.result, verdict, row.step or "", row.why or ""))
        )
    Console().print(table)
    counts = [(sum(row.result == result for row in rows), result) for result in RESULTS]
    click.echo(", ".join(f"{count} {result}" for count, result in counts if count))


@contextmanager
def stdout_kept() -> Iterator[TextIO]:
    """What this process and its children print goes to stderr; yields the stdout of before."""
    if sys.stdout is None:
        raise click.ClickException("--json needs a stdout, and it is closed")
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with os.fdopen(os.dup(kept), "w", encoding="utf-8") as stdout:
            yield stdout
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def as_json(ended: Ended) -> str:
    """{"exit", "time", "journal", "hosts": [a row each], "retry"}: of this run, whatever other runs
    the same working copy has begun since."""
    rows = list(ended.told.rows.values())
    return json.dumps(
        {
            "exit": ended.code,
            "time": ended.told.time,
            "journal": str(ended.journal),
            "hosts": [{**asdict(row), "good": row.good} for row in rows],
            "retry": journal.retry_of(ended.told),
        }
    )
