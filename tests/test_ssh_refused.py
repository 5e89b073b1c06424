"""A port that is not sshd's: one clean line, whatever answers there or does not."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvhost import working_copy

pytestmark = pytest.mark.fleet
REPO = Path(__file__).parents[1]
KVHOST = "import sys; sys.argv[0] = 'kvhost'; from kvhost.cli import main; main()"
PASSWORD = "login-61f0a2 x"  # planted, and searched for
NO_SSH = "closes it or says what is no SSH"


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("copy") / "fleet"
    working_copy.make(folder)
    return folder


@contextlib.contextmanager
def answering(text: bytes | None) -> Iterator[int]:
    """A port whose every caller is told ``text`` and then left; None: nobody listens there."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        if text is None:
            yield port
            return
        server.listen(8)

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    caller, _ = server.accept()
                    with caller, contextlib.suppress(OSError):
                        caller.sendall(text)

        threading.Thread(target=serve, daemon=True).start()
        yield port
        server.shutdown(socket.SHUT_RDWR)


def kvhost(copy: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return run(copy, sys.executable, "-c", KVHOST, *words)


def run(copy: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        argv,
        cwd=copy,
        env={**os.environ, "PYTHONPATH": f"{copy}:{REPO}", "COLUMNS": "300"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [(b"", NO_SSH), (b"HTTP/1.1 400 Bad Request\r\n\r\n", NO_SSH), (None, "Connection refused")],
    ids=["closed at once", "no SSH", "refused"],
)
def test_a_port_that_is_not_sshds_is_told_in_a_line(
    copy: Path, text: bytes | None, said: str
) -> None:
    with answering(text) as port:
        added = kvhost(copy, "inventory", "add", f"ssh root@127.0.0.1 -p {port}")
        (copy / "fleet.yaml").write_text(f"hosts:\n  a: {{address: 127.0.0.1, port: {port}}}\n")
        try:
            planned = kvhost(copy, "plan")
        finally:
            (copy / "fleet.yaml").unlink()
    for done in (added, planned):
        assert done.returncode == 1, done.stdout
        assert "Traceback" not in done.stdout and "Errno" not in done.stdout
        told = [line for line in done.stdout.splitlines() if "cannot be reached" in line]
        assert told, done.stdout
        assert all(f"port {port}" in line and said in line for line in told)


def test_a_password_that_logs_in_is_shown_nowhere(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pyinfra prints hosts' data with debug-inventory, and paramiko's arguments with --debug."""
    monkeypatch.setenv("LOGIN", PASSWORD)
    entry = "{address: 127.0.0.1, port: %d, password: {env: LOGIN}}"
    program = str(Path(sys.executable).with_name("pyinfra"))
    with answering(None) as port:
        (copy / "fleet.yaml").write_text(f"hosts:\n  a: {entry % port}\n")
        fleet = (program, "-y", "inventories/fleet.py")
        try:
            data = run(copy, *fleet, "debug-inventory")
            tried = run(copy, *fleet, "--debug", "exec", "--", "true")
            other = f"hosts = [('a', {{'ssh_hostname': '127.0.0.1', 'ssh_port': {port}, "
            (copy / "other.py").write_text(f"{other}'ssh_password': {PASSWORD!r}}})]\n")
            own = run(copy, program, "-y", "other.py", "--debug", "exec", "--", "true")
        finally:
            (copy / "fleet.yaml").unlink()
    assert "ssh_hostname" in data.stdout, data.stdout
    assert PASSWORD not in data.stdout
    for done in (tried, own):
        (line,) = [one for one in done.stdout.splitlines() if "Connecting to: 127.0.0.1" in one]
        assert "'password': '********'" in line
    assert PASSWORD not in tried.stdout
