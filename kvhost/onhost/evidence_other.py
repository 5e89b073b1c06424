"""A second cache server and runner of the same description, on free ports; lies beside evidence.py.

The event "other" asks them in place of the first pair: the same namespace, an L1 of their own that
is empty. They are started through launch.py, which ends them when this process dies.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvhost.onhost import evidence_probe as probe
    from kvhost.onhost.evidence_restart import Services
else:  # on the host the files lie beside each other, in no package
    import evidence_probe as probe

Json = dict[str, Any]
PORTS = ("api_port", "cache_port", "cache_http_port")
STOP_S = 90


def free_ports(count: int) -> list[int]:
    """Ports of loopback that are free now; all are held until the last is known."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(one.getsockname()[1]) for one in sockets]
    for one in sockets:
        one.close()
    return ports


def credentials(services: Json, folder: str, user: str | None) -> dict[str, str]:
    """A directory with the services' secrets, readable by their user alone, as a variable for
    launch.py; none without secrets. Where systemd hands them over they are in root's files."""
    secrets = {path for one in services.values() for path in one.get("secret_env", {}).values()}
    if not secrets:
        return {}
    os.mkdir(folder, 0o700)
    for path in sorted(secrets):
        with open(path, "rb") as source:
            text = source.read()
        name = os.path.join(folder, os.path.basename(path))
        with os.fdopen(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o400), "wb") as copy:
            copy.write(text)
        if user:
            shutil.chown(name, user)
    if user:  # last: until here nobody else can put a link in there
        shutil.chown(folder, user)
    return {"CREDENTIALS_DIRECTORY": folder}


class SecondPair:
    """Started by `start`, which makes the collector ask it, ended by `stop`."""

    def __init__(self, test: Services) -> None:
        self.test = test
        self.running: list[subprocess.Popen[bytes]] = []
        self.first = dict(test.asked)
        self.made: list[str] = []
        state = os.path.dirname(test.config["own_requests"])
        self.secrets = os.path.join(state, "other-credentials")

    def start(self) -> Json:
        """Raises ValueError, OSError; what was started by then is ended by `stop`."""
        given = self.test.config["other"]
        if not given:
            raise ValueError("the config does not say how a second pair is started (other)")
        ports = {name: free for name, free in zip(PORTS, free_ports(len(PORTS)))}  # noqa: B905, C416
        given = probe.filled(given, ports)
        state = os.path.dirname(self.test.config["own_requests"])
        own = os.path.join(state, "other-requests.json")
        self.made.append(own)
        shutil.rmtree(self.secrets, ignore_errors=True)  # of a run that was killed
        env = {**os.environ, **credentials(given["services"], self.secrets, given.get("user"))}
        self.test.asked = {
            **{key: given[key] for key in ("api_base", "metrics_url", "cache_http")},
            "own_requests": own,
            "records": {n: given["services"][n]["record"] for n in ("cache", "runner")},
        }
        for name in ("cache", "runner"):
            self.test.evidence["services"][name]["restart"] = {"exit_code": 0, "ready_s": None}
            spec = os.path.join(state, f"other-{name}.json")
            log = os.path.join(state, f"other-{name}.log")
            self.made += [spec, log]
            probe.write_json(spec, given["services"][name], 0o644)
            with os.fdopen(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as out:
                self.running.append(
                    subprocess.Popen(
                        [*given["start"], spec],
                        stdin=subprocess.DEVNULL,
                        stdout=out,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                        env=env,
                    )
                )
            self.test.config["services"][name]["log"], first = log, self.test.log_of(name)
            try:
                self.test.wait_ready(name)
            finally:
                self.test.config["services"][name]["log"] = first
        return ports

    def stop(self) -> Json:
        """Ends both, the runner first, and asks the first pair again."""
        for one in reversed(self.running):
            with contextlib.suppress(ProcessLookupError):
                one.send_signal(signal.SIGTERM)
            try:
                one.wait(STOP_S)
            except subprocess.TimeoutExpired:  # with all that it started
                for pid in probe.tree(one.pid):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                one.wait()
        codes = [one.returncode for one in self.running]
        shutil.rmtree(self.secrets, ignore_errors=True)
        self.test.asked = self.first
        for path in self.made:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        return {"ended": codes}
