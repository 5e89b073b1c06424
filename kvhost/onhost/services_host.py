"""What services.py knows of a host, beside which it lies: its supervisord, records and logs."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import pwd
import socket
import sys
import time
import xmlrpc.client
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvhost.onhost import service_names
    from kvhost.onhost.launch_spec import config_digest, read_spec
else:  # it lies beside this file on a host, where there is no package kvhost
    import service_names
    from launch_spec import config_digest, read_spec

#: seconds: stop_timeout_s of a service plus supervisord's own patience
STOP_LIMIT_S = 180
#: seconds that a supervisord which is well may need for an answer
ANSWER_LIMIT_S = 30


class Trouble(Exception):
    """What went wrong, for people; the program ends with 1."""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class UnixTransport(xmlrpc.client.Transport):
    """XML-RPC over supervisord's Unix socket, which takes no connection from the network."""

    def __init__(self, path: str, timeout: float) -> None:
        super().__init__()
        self.path, self.timeout = path, timeout

    def make_connection(self, host: Any) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("localhost")
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(self.timeout)
        self._connection = host, connection  # closed with the proxy
        connection.sock.connect(self.path)
        return connection


class Host:
    """One installation of kvhost and the supervisord that runs its services."""

    def __init__(self, base: str, user: str) -> None:
        self.base = base
        self.conf = self.path("etc", "supervisord.conf")
        self.socket = self.path("run", "supervisor.sock")
        self.tools = self.path("tools", "current", "bin")
        try:
            self.account = pwd.getpwnam(user)
        except KeyError:
            raise Trouble(f"there is no user {user} on this host") from None
        if os.geteuid() not in (0, self.account.pw_uid):
            raise Trouble(f"this must be started as root or as {user}")

    def path(self, *parts: str) -> str:
        return os.path.join(self.base, *parts)

    @property
    def order(self) -> tuple[str, ...]:
        """The services of this host in the order of their start."""
        return service_names.names(self.base)

    def as_user(self, argv: list[str]) -> list[str]:
        account = self.account
        if account.pw_uid == os.geteuid():
            return argv
        ids = ["--reuid", str(account.pw_uid), "--regid", str(account.pw_gid), "--init-groups"]
        return ["setpriv", *ids, "--inh-caps=-all", *argv]

    def clean_env(self) -> dict[str, str]:
        return {"PATH": "/usr/bin:/bin", "HOME": self.path("home"), "LC_ALL": "C.UTF-8"}

    def call(self, method: str, *args: Any) -> Any:
        """Raises OSError when no supervisord answers, xmlrpc.client.Fault when it refuses."""
        patience = STOP_LIMIT_S if method == "stopProcessGroup" else ANSWER_LIMIT_S
        transport = UnixTransport(self.socket, patience)
        try:
            with xmlrpc.client.ServerProxy("http://localhost", transport=transport) as proxy:
                return getattr(proxy.supervisor, method)(*args)
        except (http.client.HTTPException, xmlrpc.client.ProtocolError) as error:
            raise OSError(f"supervisord: {error}") from error

    def answers(self) -> bool:
        try:
            return bool(self.call("getState")["statename"] == "RUNNING")
        except OSError:
            return False

    def states(self) -> dict[str, tuple[str, str]] | None:
        """{name: (STATE, description)}; None when no supervisord answers."""
        try:
            rows = self.call("getAllProcessInfo")
        except (OSError, xmlrpc.client.Fault):  # a Fault: it is shutting down
            return None
        return {row["name"]: (row["statename"], row["description"]) for row in rows}

    def wanted_digest(self, name: str) -> str | None:
        """What launch.py would start now; None when the service's description is unusable."""
        path = self.path("etc", name + ".json")
        try:
            return config_digest(path, read_spec(path))
        except (OSError, ValueError):
            return None

    def read(self, name: str, kind: str = "json") -> dict[str, Any]:
        """run/NAME.json (the process), .lock (its launch.py) or .failed (why); {} without it."""
        try:
            with open(self.path("run", f"{name}.{kind}"), encoding="utf-8") as handle:
                data = json.load(handle)
        except (OSError, ValueError):
            return {}
        return data if isinstance(data, dict) else {}

    def write(self, name: str, text: str) -> None:
        """run/NAME, never through a link: the directory belongs to the service's user."""
        new = self.path("run", name + ".new")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(new)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with os.fdopen(os.open(new, flags, 0o644), "w", encoding="utf-8") as handle:
            handle.write(text)
        os.replace(new, self.path("run", name))

    def conf_digests(self) -> dict[str, str]:
        """Of the whole configuration, and of what supervisord reads only when it starts."""
        with open(self.conf, encoding="utf-8") as handle:
            text = handle.read()
        daemon, program = [], False
        for line in text.splitlines():
            if line.startswith("["):
                program = line.startswith("[program:")
            if line.strip() and not line.startswith(";") and not program:
                daemon.append(line)
        parts = {"conf": text, "daemon": "\n".join(daemon)}
        return {key: hashlib.sha256(part.encode()).hexdigest() for key, part in parts.items()}

    def conf_read(self) -> dict[str, str]:
        """conf_digests as they were when the running supervisord read its configuration."""
        try:
            with open(self.path("run", "supervisor.read"), encoding="utf-8") as handle:
                data = json.load(handle)
        except (OSError, ValueError):
            return {}
        return data if isinstance(data, dict) else {}

    def supervisors(self) -> list[int]:
        """Every supervisord that was started with our configuration, also one without a socket."""
        found = []
        for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
            try:
                with open(f"/proc/{pid}/cmdline", "rb") as handle:
                    argv = handle.read().decode(errors="replace").split("\0")
            except OSError:
                continue  # it has just ended
            programs = {os.path.basename(word) for word in argv[:2]}
            if self.conf in argv and "supervisord" in programs and sees_our_files(pid):
                found.append(pid)
        return found


def sees_our_files(pid: int) -> bool:
    """Whether a process has our root directory: one of a container on this host has another, and
    what it calls by the same path is not ours."""
    try:
        return os.path.samefile(f"/proc/{pid}/root", "/")
    except OSError:
        return False  # it has just ended


def alive(pid: Any, ticks: Any) -> bool:
    """Whether that process lives: PIDs are used again, their start times are not."""
    try:
        with open(f"/proc/{int(pid)}/stat", encoding="utf-8", errors="replace") as handle:
            fields = handle.read().rpartition(")")[2].split()
        return fields[0] not in "ZX" and int(fields[19]) == ticks
    except (OSError, TypeError, ValueError, IndexError):
        return False


def wait_until(done: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def show_log(host: Host, name: str, lines: int = 20) -> None:
    path = host.path("log", name + ".log")
    try:
        # the directory is the service user's: no link is followed, no pipe is waited for
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as handle:
            handle.seek(max(os.fstat(handle.fileno()).st_size - (1 << 16), 0))
            for line in handle.read().decode(errors="replace").splitlines()[-lines:]:
                say(f"  {name} | {line.rstrip()}")
    except OSError as error:
        say(f"  {name} | no log: {error}")
