"""Runs a program of somebody else's: it gets only so much time, and may print only so much.

What it printed is held in memory, so a program that never stops printing would take all of the
host's; one that never ends, or leaves a child behind that keeps its output open, would be waited
for. All of its session is ended with it, whatever process groups are in it; what made a session of
its own (a daemon: setsid) is not, nor what belongs to a user whose processes we may not signal.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from typing import IO, Any

#: bytes
MOST = 4 << 20
LOOK_S = 0.05
#: what it has printed is read for so long once it has ended: a child may hold the pipe for ever
AFTER_S = 1.0
#: how long what was killed may take to be gone
END_S = 5.0


class TooMuch(OSError):
    """It took too long, or printed too much; says which. An OSError, as if it could not be run."""


class Said:
    """What a program that has ended said."""

    def __init__(self, code: int, out: bytes, err: bytes) -> None:
        self.code = code
        self.out, self.err = (text.decode(errors="replace") for text in (out, err))


def run(
    argv: Sequence[str], limit_s: float, most: int = MOST, *, tail: bool = False, **how: Any
) -> Said:
    """Raises OSError where it cannot be started, TooMuch (one of these) where it is ended.

    ``most``: bytes of each of its two outputs; with ``tail`` the last so many are kept, and more is
    no fault. ``how``: for Popen; with stderr=STDOUT both come as one, in ``out``.
    """
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(
        list(argv), stdin=subprocess.DEVNULL, start_new_session=True, **{**pipes, **how}
    )
    texts: dict[Any, bytearray] = {
        pipe: bytearray() for pipe in (process.stdout, process.stderr) if pipe is not None
    }
    deadline = time.monotonic() + limit_s
    try:
        with selectors.DefaultSelector() as open_pipes:
            for pipe in texts:
                open_pipes.register(pipe, selectors.EVENT_READ)
            until: float | None = None  # once it has ended
            while until is None or (open_pipes.get_map() and time.monotonic() < until):
                if until is None and _ended(process):
                    until = time.monotonic() + AFTER_S
                wait_s = LOOK_S if until is not None else min(LOOK_S, _left(deadline, limit_s))
                for key, _ in open_pipes.select(wait_s):
                    if not _read(key.fileobj, texts[key.fileobj], most, tail=tail):
                        open_pipes.unregister(key.fileobj)
        end(process)
    except BaseException as error:
        _end_because(error, process)
        raise
    finally:
        for pipe in texts:
            pipe.close()
    out, err = (bytes(texts.get(pipe, b"")) for pipe in (process.stdout, process.stderr))
    return Said(process.returncode, out, err)


def _left(deadline: float, limit_s: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TooMuch(f"it has not ended within {limit_s:g} s")
    return left


def _read(pipe: Any, text: bytearray, most: int, *, tail: bool) -> bool:
    """Whether there may be more."""
    block = os.read(pipe.fileno(), 1 << 16)
    text += block
    if len(text) > most and not tail:
        raise TooMuch(f"it prints more than {most >> 20} MiB")
    if len(text) > most + (1 << 20) or not block:  # not for each block: what stays is moved
        del text[: max(0, len(text) - most)]
    return bool(block)


def _ended(process: subprocess.Popen[Any]) -> bool:
    """Its PID stays taken: as long as nobody has asked how it ended, no other session has it."""
    try:
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # somebody has asked
        return True


def end(process: subprocess.Popen[Any]) -> list[int]:
    """All of the session that it leads, which it must have of its own, and nobody may have asked
    yet how it ended. PIDs of what goes on all the same: of another user's (sudo), or in the kernel.
    """
    until = time.monotonic() + END_S
    while True:
        left = dict(_signal(process.pid))
        if not any(left.values()) or time.monotonic() > until:
            break
        time.sleep(0.01)
    if process.pid not in left:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
    return sorted(left)


def _signal(session: int) -> Iterator[tuple[int, bool]]:
    """Kills what is in that session; the PID of each that has not ended, and whether we may."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", "rb") as handle:
                words = handle.read().rpartition(b")")[2].split()
            if int(words[3]) != session:
                continue
            os.kill(int(name), signal.SIGKILL)  # a zombie too: it may have other threads
            allowed = True
        except PermissionError:
            allowed = False
        except (OSError, IndexError):  # it is gone
            continue
        if words[0] not in (b"Z", b"X"):
            yield int(name), allowed


def _end_because(error: BaseException, process: subprocess.Popen[Any]) -> None:
    """Ends it, and goes on; TooMuch says what could not be ended."""
    left = end(process)
    if left and isinstance(error, TooMuch):
        pids = ", ".join(map(str, left))
        raise TooMuch(f"{error}, and could not be ended: PID {pids} runs on") from None


def run_into(output: IO[bytes], argv: Sequence[str], limit_s: float, most: int = 16 * MOST) -> int:
    """The exit code of a command whose output goes to a file, as that of one must which leaves a
    server behind: a pipe would be waited for, or end that server. Raises as run() does; what it
    started is ended too where it fills the disk, and not where it only takes too long: a server
    may be among it.

    A server that it leaves behind, and that did not send its output elsewhere, goes on writing to
    the file, which takes room until that server ends; nobody watches over it any more.
    """
    process = subprocess.Popen(
        list(argv), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip
    deadline, before = time.monotonic() + limit_s, os.fstat(output.fileno()).st_size
    try:
        while not _ended(process):
            if os.fstat(output.fileno()).st_size - before > most:
                too_much = TooMuch(f"it prints more than {most >> 20} MiB")
                _end_because(too_much, process)
                raise too_much
            time.sleep(min(LOOK_S, _left(deadline, limit_s)))
    finally:
        if not _ended(process):
            with contextlib.suppress(PermissionError):  # sudo: why it was to end is what counts
                process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
    return process.returncode


def last_of(output: IO[bytes], most: int = 4096) -> str:
    """The end of what such a file holds, from the beginning of a line on if there is one: half a
    secret would not be known again."""
    start = max(0, os.fstat(output.fileno()).st_size - most - 1)
    output.seek(start)
    text = output.read(most + 1)
    if start:
        text = text.partition(b"\n")[2] or text[1:]
    return text.decode(errors="replace")
