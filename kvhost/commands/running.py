"""One run of pyinfra: its lines to the terminal and into a log, and who is at what meanwhile."""

from __future__ import annotations

import locale
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TextIO

from kvhost.basics import printable
from kvhost.commands.run_log import Mask, Sink, open_log
from kvhost.records import progress

if TYPE_CHECKING:  # only a terminal needs it, and every start would wait for it
    from rich.console import Console, RenderableType

#: hosts with a line of their own; of more only those that are slow, failed or away
MOST_LINES = 16
#: lines of pyinfra that the progress says already, one a host
_SAID = re.compile(r"^\s*\[[^\]]+\] (Connected|Success|No changes|Ready: .*|Loaded fact .*)\s*$")
ENDED = ("failed", "unreachable", "finished")


@dataclass
class HostState:
    """Where a host stands."""

    event: str = "waiting"
    text: str = ""
    steps: int = 0
    done: int = 0
    since: float = field(default_factory=time.time)

    def line(self) -> str:
        count = f"{self.done}/{self.steps} " if self.steps else ""
        return f"{count}{self.text}".strip()


@dataclass
class Board:
    """What is known of every host, from the events of the run."""

    hosts: dict[str, HostState] = field(default_factory=dict)

    def take(self, rows: Iterable[Mapping[str, Any]]) -> None:
        for row in rows:
            host = self.hosts.setdefault(row["host"], HostState())
            event = row["event"]
            if host.event in ENDED:
                continue
            if event == "done":
                host.done += 1
                if host.steps and host.done >= host.steps:
                    host.event = "finished"
                continue
            host.event, host.text, host.since = event, row["text"], row["time"]
            host.steps = row["steps"] or host.steps

    def render(self, now: float) -> RenderableType:
        """At most about MOST_LINES lines, however many hosts there are."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        names = list(self.hosts)
        parts: list[RenderableType] = []
        if len(names) > MOST_LINES:
            counts: dict[str, int] = {}
            for host in self.hosts.values():
                word = "at work" if host.event in ("step", "connected") else host.event
                counts[word] = counts.get(word, 0) + 1
            words = ", ".join(f"{count} {word}" for word, count in sorted(counts.items()))
            parts.append(Text(f"{len(names)} hosts: {words}", "bold"))
            bad = [n for n in names if self.hosts[n].event in ("failed", "unreachable")]
            slow = sorted(
                (n for n in names if self.hosts[n].event not in ENDED),
                key=lambda n: self.hosts[n].since,
            )
            names = [*bad[: MOST_LINES // 2], *slow][: MOST_LINES - 2]
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        for style in ("bold", "", "dim"):
            table.add_column(style=style, no_wrap=True, overflow="ellipsis")
        for name in names:
            host = self.hosts[name]
            style = {"failed": "red", "unreachable": "red", "finished": "green"}.get(host.event, "")
            word = "" if host.event == "step" else f"{host.event} "
            text = Text(printable(f"{word}{host.line()}"), style)
            seconds = "" if host.event in ENDED else f"{max(0.0, now - host.since):.0f} s"
            table.add_row(printable(name), text, seconds)
        return Group(*parts, table)

    def stands(self) -> list[str]:
        """Where hosts stood that did not finish, for a run that was broken off."""
        return [
            f"{printable(name)}: {printable(host.event)} {printable(host.line())}".rstrip()
            for name, host in self.hosts.items()
            if host.event != "finished"
        ]


def run(
    argv: list[str], folder: Path, logs: Path, what: str,
    secrets: Callable[[], Iterable[str]] = tuple, *, stdout: TextIO | None = None,
) -> int:  # fmt: skip
    """Runs pyinfra in ``folder``; its exit code, 130 if it was broken off.

    On a terminal its hosts are shown as they go on, elsewhere its lines as they come. ``stdout``
    takes the place of this process's own. ``secrets``: what is masked; asked while pyinfra starts,
    for it may take as long. Raises OSError where no log can be written.
    """
    path, file = open_log(logs, what)
    log, board, lock = Sink(file), Board(), threading.Lock()
    shown = stdout or sys.stdout
    out, err = Sink(shown), Sink(sys.stderr)  # either is None where the caller closed it
    live = shown is not None and sys.stderr is not None and sys.stderr.isatty() and shown.isatty()
    console = _console() if live else None

    def show(line: str, sink: Sink) -> None:
        with lock:
            log.write(mask(line))
        if console is not None and not _SAID.match(line):
            from rich.text import Text

            console.print(Text.from_ansi(mask(line).rstrip("\n")), soft_wrap=True)
        elif console is None:
            # else as pyinfra prints it: who asks for it on a pipe may read it by a program
            sink.write(known(line))

    interrupts = Interrupts()
    with (
        closing(log),
        heard_by(interrupts.heard),
        tempfile.TemporaryDirectory() as events_folder,
    ):
        events = Path(events_folder, "events")
        events.touch()
        process = interrupts.start(argv, folder, _environment(folder, events))
        try:
            values = list(secrets())  # before the first line is read
            mask, known = Mask(values), Mask(values, shapes=False)
        except BaseException:
            process.kill()
            process.wait()
            raise
        assert process.stdout is not None
        assert process.stderr is not None
        readers = [
            threading.Thread(target=_pass_on, args=(process.stdout, out, show), daemon=True),
            threading.Thread(target=_pass_on, args=(process.stderr, err, show), daemon=True),
        ]
        for reader in readers:
            reader.start()
        _wait(process, events, board, console)
        # one that came too late for pyinfra is still one: the command begins nothing more
        code = 130 if interrupts.broken else process.returncode
        for reader in readers:
            reader.join(10)
        if code == 130:
            for line in board.stands():
                err.write(f"broken off: {line}\n")
    err.write(f"log of this run: {path}\n")
    if log.broken is not None:
        err.write(f"that log is not whole: {log.broken}\n")
    if out.broken is not None and not isinstance(out.broken, BrokenPipeError):
        err.write(f"what was to go to stdout is not whole: {out.broken}\n")
        return code or 1  # who reads an answer from there must not take a part for all of it
    return code


def _console() -> Console:
    from rich.console import Console

    return Console(stderr=True)


def _environment(folder: Path, events: Path) -> dict[str, str]:
    """The deploys of the working copy come before all others that may be on Python's path."""
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, progress.EVENTS: str(events), "PYTHONPATH": os.pathsep.join(paths)}


def _pass_on(source: IO[str], sink: Sink, show: Callable[[str, Sink], None]) -> None:
    for line in source:
        show(line, sink)


@contextmanager
def heard_by(handler: Callable[..., None]) -> Iterator[None]:
    """Ctrl-C and SIGTERM go there; only in the main thread, Python allows it in no other."""
    before: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, was in before.items():
            signal.signal(number, was)


class Interrupts:
    """Ctrl-C and SIGTERM go to pyinfra as SIGINT, at which it gives its locks back and ends.

    This process waits for that: an exception could be raised anywhere, and leave pyinfra behind.
    """

    def __init__(self) -> None:
        self.broken = False
        self._process: subprocess.Popen[str] | None = None

    def heard(self, *_: Any) -> None:
        self.broken = True
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)  # a terminal sent it too; heard once

    def start(self, argv: list[str], folder: Path, env: Mapping[str, str]) -> subprocess.Popen[str]:
        """pyinfra, which hears SIGINT once it has loaded config.py (deploys/common/journal.py).

        Before that it would end with a traceback, or "upon user request" and exit code 0.
        """
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # a child inherits it
        try:
            self._process = subprocess.Popen(
                argv, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                encoding=locale.getpreferredencoding(False), errors="replace", bufsize=1, env=env,
            )  # fmt: skip
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if self.broken:
            self._process.send_signal(signal.SIGINT)
        return self._process


def _wait(
    process: subprocess.Popen[str], events: Path, board: Board, console: Console | None
) -> None:
    """Until pyinfra has ended."""
    shown = None
    if console:
        from rich.live import Live

        shown = Live(console=console, refresh_per_second=4, transient=True)
    with events.open(encoding="utf-8") as tail:
        try:
            if shown:
                shown.start()
            while True:
                try:
                    process.wait(0.25 if shown else None)
                    break
                except subprocess.TimeoutExpired:
                    board.take(progress.read(tail))
                    if shown:
                        shown.update(board.render(time.time()))
        finally:
            if shown:
                shown.stop()
        board.take(progress.read(tail))
