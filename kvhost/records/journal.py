"""The journal of a run over several hosts: a line of JSON for each thing that happened.

It lies in runs/ of the working copy, is written while the run goes on, and so says where a run
stood that was killed. `read_journal` makes of it one row a host.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import stat
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, get_args

from kvhost.commands.run_log import of_process
from kvhost.schema.problems import holds_a_secret, names_a_secret
from kvhost.working_copy import root

#: names the file to which a run of pyinfra appends
VARIABLE = "KVHOST_JOURNAL"
#: as many journals are kept
KEPT = 50
#: ends of the names of settings that hold no secret although they speak of one
_NO_SECRET = ("_file", "_tokens", "driver_repository_key")
#: a program's flag for a secret, inside of a setting with arguments
#: a URL with a password
_SECRET_URL = re.compile(r"://[^\s/@:]*:[^\s@]+@")
_SECRET_FLAG = re.compile(r"-(api-?key|password|passphrase|secret|token)\b", re.IGNORECASE)

Result = Literal[
    "changed", "unchanged", "refused", "failed", "unreachable", "broken off", "not started"
]
RESULTS: tuple[Result, ...] = get_args(Result)
GOOD = ("changed", "unchanged")


def runs_dir() -> Path:
    """Where journals are kept on the controller: runs/ of the working copy, or KVHOST_RUNS."""
    given = os.environ.get("KVHOST_RUNS")
    return Path(given) if given else root() / "runs"


def tell(event: str, path: str | None = None, **data: Any) -> None:
    """Appends one event; nothing happens when no journal is kept. No secret that this process knows
    of, or that looks like one, is in its reason, ``why``.

    One that cannot be written is said on stderr and stops nothing: what is done to the hosts goes
    on, and a host whose end is not in the journal does not count as done.
    """
    name = path or os.environ.get(VARIABLE)
    try:
        if name:
            if isinstance(data.get("why"), str):
                data["why"] = of_process(os.environ)(data["why"])
            _append(name, event, data)
    except OSError as error:
        with suppress(OSError):
            print(f"the journal of this run lacks a line: {error}", file=sys.stderr)


def _append(name: str, event: str, data: Mapping[str, Any]) -> None:
    """Raises OSError."""
    line = (json.dumps({"event": event, **data}) + "\n").encode()
    # one write, so that two processes do not mix their lines
    handle = os.open(name, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        if os.write(handle, line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)
    finally:
        os.close(handle)


def start_ticks(pid: int) -> int | None:
    """Field 22 of /proc/PID/stat, None if there is no such process: PIDs are used again."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def begin(folder: Path, command: Sequence[str]) -> Path:
    """A new journal, 0600, with its first line; old ones go. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for old in sorted(folder.glob("*.jsonl"))[: -KEPT + 1]:
        old.unlink(missing_ok=True)
    stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H%M%S.%fZ")
    path = folder / f"{stamp}-{os.getpid()}.jsonl"
    pid = os.getpid()
    known = {"time": stamp, "pid": pid, "start_ticks": start_ticks(pid)}
    _append(str(path), "run", {**known, "command": without_secrets(command)})
    return path


def without_secrets(words: Sequence[str]) -> list[str]:
    """The words of a command line without what may be a secret: values of pyinfra's options for
    passwords, of settings whose name or value says so, and words that look like one."""
    shown: list[str] = []
    masked = False
    for word in words:
        name, equals, _ = word.partition("=")
        secret = name.startswith("-") and "password" in name
        shown.append("***" if masked else f"{name}=***" if secret and equals else _shown(word))
        masked = secret and not equals and name in ("--ssh-password", "--ssh-key-password")
    return shown


def _shown(word: str) -> str:
    """KEY=VALUE, after --data or with it, or any other word. Settings that name a file of a secret,
    or count tokens, hold none."""
    start = "--data=" if word.startswith("--data=") else ""
    key, equals, value = word.removeprefix(start).partition("=")
    named = names_a_secret(key) and not key.startswith("-") and not key.endswith(_NO_SECRET)
    if (
        holds_a_secret(word)
        or _SECRET_URL.search(word)
        or (equals and (named or _SECRET_FLAG.search(value)))
    ):
        return f"{start}{key}=***" if equals and not holds_a_secret(key) else "***"
    return word


@dataclass
class Row:
    """One host of a run. ``step``: the operation at which it failed or was broken off; ``why``: the
    reason in short, of a host that failed never None."""

    host: str
    result: Result = "not started"
    step: str | None = None
    why: str | None = None
    changed: int = 0
    persisted: str | None = None
    #: the test was left out by the settings (verify = never)
    untested: bool = False
    #: the test was left out because the server is in use
    in_use: bool = False

    @property
    def good(self) -> bool:
        """Done, and its verdict, if one was asked for, is PASS; or nothing persists by design, and
        then the run has failed where what is asked of such a host is not so."""
        return self.result in GOOD and (self.untested or self.persisted in ("PASS", "NO_BY_DESIGN"))


@dataclass
class Told:
    """What a journal says."""

    rows: dict[str, Row] = field(default_factory=dict)
    command: list[str] = field(default_factory=list)
    time: str = ""
    pid: int | None = None
    ticks: int | None = None
    ended: bool = False
    #: all hosts are known; before that only those that were seen to be away
    listed: bool = False

    @property
    def alive(self) -> bool:
        """Whether the command that wrote it still runs."""
        return self.pid is not None and start_ticks(self.pid) == self.ticks is not None


def read_journal(path: Path) -> Told:
    """Rows in the order of the inventory. A line that is not whole (a kill, a full disk) or none of
    ours is passed over: a host is never taken for done by it.

    Raises OSError.
    """
    told = Told()
    if not stat.S_ISREG(path.stat().st_mode):  # a pipe would be waited for
        raise OSError(f"{path} is not a regular file")
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
            _take(told, json.loads(line))
    for row in told.rows.values():
        if row.result == "failed" and not row.why:
            row.why = f"{row.step or 'it failed before its first step'}: the run's log says more"
    return told


def _take(told: Told, event: dict[str, Any]) -> None:
    kind = event.get("event")
    if kind == "run":
        told.command, told.time = [str(word) for word in event["command"]], str(event["time"])
        told.pid, told.ticks = int(event["pid"]), int(event["start_ticks"])
    elif kind == "end":
        told.ended = True
    elif kind == "hosts":
        told.listed = True
        if all(row.result == "unreachable" for row in told.rows.values()):  # in the order of asking
            told.rows = {n: told.rows.get(n, Row(n)) for n in event["names"]} | told.rows
        for name in event["names"]:
            row = told.rows.setdefault(name, Row(name))
            if name in event["unreachable"]:
                row.result = "unreachable"
            elif row.result == "unreachable":
                row.result, row.why = "not started", None
    elif "host" in event:
        _of_host(told.rows.setdefault(event["host"], Row(event["host"])), event)


def _of_host(row: Row, event: dict[str, Any]) -> None:
    kind = event["event"]
    if kind == "refused":
        row.result, row.why = "refused", event["why"]
    elif kind == "unreachable":
        row.result, row.why = "unreachable", event["why"]
    elif kind == "step":
        if row.result != "refused":
            row.result, row.step = "broken off", event["name"]
    elif kind == "error":
        if row.result != "refused":
            row.result, row.step = "failed", event["name"]
            row.why = row.why or event.get("why")
    elif kind == "why":
        row.why = event["why"]
    elif kind == "done":
        row.changed += event["changed"]
        row.result, row.step = ("changed" if row.changed else "unchanged"), None
    elif kind == "failed":
        if row.result not in ("refused", "failed"):
            row.result = "failed"
            row.why = row.why or event.get("why")
    elif kind == "verdict":
        row.persisted = event["persisted"]
    elif kind == "untested":
        row.untested = True
    elif kind == "in_use":
        row.in_use = True


def newest(folder: Path) -> Path | None:
    """The journal of the last run, None without one."""
    return max(folder.glob("*.jsonl"), default=None)


def drop_limits(args: Sequence[str]) -> list[str]:
    """pyinfra's arguments without --limit and its value."""
    kept: list[str] = []
    words = iter(args)
    for word in words:
        if word in ("--limit", "-l"):
            next(words, None)
        elif not word.startswith("--limit="):
            kept.append(word)
    return kept


def drop_canary(command: Sequence[str], left: Iterable[str]) -> list[str]:
    """Without the option --canary, if that is a host that is none of those left.

    >>> drop_canary(["kvhost", "up", "--canary", "a"], ["b"])
    ['kvhost', 'up']
    """
    words = list(command)
    at = words.index("--canary") if "--canary" in words else None
    if at is not None and not words[at + 1].isdecimal() and words[at + 1] not in left:
        del words[at : at + 2]
    return words


def retry_command(command: Sequence[str], rows: Iterable[Row]) -> str | None:
    """The command that runs again the hosts that are not as they should be; None if all are."""
    bad = [row for row in rows if not row.good]
    if not bad:
        return None
    more = ("--data", "disrupt=true") if only_in_use(bad) else ()
    limits = [word for row in bad for word in ("--limit", row.host)]
    if list(command[1:2]) == ["rebuild"]:
        limits = []  # it names its host itself
    again = drop_canary(drop_limits(without_secrets(command)), {row.host for row in bad})
    return shlex.join([*again, *more, *limits])


def retry_of(told: Told) -> str | None:
    """The same of a whole journal: all of the command where it ended before its hosts were known,
    for then the rows are at most those that were seen to be away."""
    if not told.listed:
        return shlex.join(without_secrets(told.command))
    return retry_command(told.command, told.rows.values())


def only_in_use(rows: Iterable[Row]) -> bool:
    """Whether all that is not as it should be is a test that would have disturbed somebody."""
    bad = [row for row in rows if not row.good]
    return bool(bad) and all(row.in_use for row in bad)
