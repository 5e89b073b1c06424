"""A service's output in the journal and in a file, for launch.py, which it lies beside.

The journal is what people read; the file is what the verdict and `ready.py` read by offset, without
asking what kind of supervisor a host has. The service's user writes it: were it systemd
(StandardOutput=append:), root would open a path in a directory of that user.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

MOST_BYTES = 20 << 20
FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC


class LogFile:
    """Appends; beyond MOST_BYTES the file becomes NAME.1 and another begins. Never raises: a full
    disk or a directory in its place must not end a service, and the journal has it all."""

    def __init__(self, path: str) -> None:
        self.path, self.fd, self.size = path, -1, 0

    def write(self, data: bytes) -> None:
        with contextlib.suppress(OSError):
            if self.fd >= 0 and self.size > MOST_BYTES:
                os.close(self.fd)
                self.fd = -1
                os.replace(self.path, self.path + ".1")
            if self.fd < 0:
                self.fd = os.open(self.path, FLAGS, 0o600)
                self.size = os.fstat(self.fd).st_size
            self.size += os.write(self.fd, data)


def copy(source: int, journal: int, log: LogFile) -> None:
    while True:
        data = os.read(source, 1 << 16)
        if not data:
            return
        left = data
        with contextlib.suppress(OSError):  # the journal's end is gone: the file is what is left
            while left:
                left = left[os.write(journal, left) :]
        log.write(data)


@contextlib.contextmanager
def also_in_file(path: str | None) -> Iterator[None]:
    """Standard output and error of this process and of all that it starts go to ``path`` as well,
    if they go to the journal ($JOURNAL_STREAM, systemd.exec(5)); otherwise nothing is done."""
    if not path or "JOURNAL_STREAM" not in os.environ:
        yield
        return
    journal = os.dup(1)
    source, sink = os.pipe()
    os.set_inheritable(journal, False)
    thread = threading.Thread(target=copy, args=(source, journal, LogFile(path)), daemon=True)
    thread.start()
    for fd in (1, 2):
        os.dup2(sink, fd)
    os.close(sink)
    try:
        yield
    finally:
        for fd in (1, 2):
            os.dup2(journal, fd)  # the last writer is gone, the thread reads to the end
        thread.join(5)
