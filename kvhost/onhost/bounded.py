"""Runs a program of somebody else's: it gets only so much time, and may print only so much.

What it printed is held in memory, so a program that never stops printing would take all of the
host's; one that never ends, or leaves a child behind that keeps its output open, would be waited
for. All that it started in its session is ended with it.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Sequence
from typing import IO, Any

#: bytes
MOST = 4 << 20
LOOK_S = 0.05


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
            while open_pipes.get_map():
                for key, _ in open_pipes.select(_left(deadline, limit_s)):
                    if not _read(key.fileobj, texts[key.fileobj], most, tail=tail):
                        open_pipes.unregister(key.fileobj)
        while process.poll() is None:
            time.sleep(min(LOOK_S, _left(deadline, limit_s)))
    finally:
        end(process)
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


def end(process: subprocess.Popen[Any]) -> None:
    """With all that it started in its session, which it must have of its own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_into(output: IO[bytes], argv: Sequence[str], limit_s: float, most: int = 16 * MOST) -> int:
    """The exit code of a command whose output goes to a file, as that of one must which leaves a
    server behind: a pipe would be waited for, or end that server. Raises as run() does; what it
    started is ended too where it fills the disk, and not where it only takes too long."""
    process = subprocess.Popen(
        list(argv), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip
    deadline, before = time.monotonic() + limit_s, os.fstat(output.fileno()).st_size
    try:
        while process.poll() is None:
            if os.fstat(output.fileno()).st_size - before > most:
                end(process)
                raise TooMuch(f"it prints more than {most >> 20} MiB")
            time.sleep(min(LOOK_S, _left(deadline, limit_s)))
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    return process.returncode


def last_of(output: IO[bytes], most: int = 4096) -> str:
    """The end of what such a file holds."""
    size = os.fstat(output.fileno()).st_size
    output.seek(max(0, size - most))
    return output.read(most).decode(errors="replace")
