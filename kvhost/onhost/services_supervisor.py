"""supervisord as what runs the services, where PID 1 is not systemd; services.py lies beside it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import xmlrpc.client
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvhost.onhost.services_host import STOP_LIMIT_S, Host, Trouble, say, show_log, wait_until
else:  # it lies beside this file on a host, where there is no package kvhost
    from services_host import STOP_LIMIT_S, Host, Trouble, say, show_log, wait_until

# faults of supervisord's XML-RPC (supervisord.org/api.html)
BAD_NAME, ALREADY_STARTED, NOT_RUNNING = 10, 60, 70
NO_SUCH_FILE = (FileNotFoundError, ConnectionRefusedError)


class Supervisord:
    """Methods raise Trouble."""

    name = "supervisord"

    def __init__(self, host: Host) -> None:
        self.host = host

    def states(self) -> dict[str, tuple[str, str]] | None:
        return self.host.states()

    def fresh(self) -> bool:
        """Whether the running supervisord has read its present configuration."""
        host = self.host
        return self.states() is not None and host.conf_read() == host.conf_digests()

    def bring(self) -> None:
        """It runs, with its present configuration."""
        host = self.host
        if not host.answers():
            self.up()
        digests, read = host.conf_digests(), host.conf_read()
        if read == digests:
            return
        if read and read.get("daemon") != digests["daemon"]:
            say("supervisord is restarted: its own part of the configuration changed")
            self.shutdown()
            self.up()
        else:
            self.read_again(digests)

    def up(self) -> None:
        """It runs, with whatever configuration it has read."""
        host = self.host
        # one that was started or told to stop a moment ago is given time to say so
        wait_until(lambda: host.answers() or not host.supervisors(), 5)
        if host.answers():
            return
        self.end()
        say("starting supervisord")
        digests = host.conf_digests()
        try:
            done = subprocess.run(
                host.as_user([os.path.join(host.tools, "supervisord"), "-c", host.conf]),
                env=host.clean_env(),
                cwd=host.path("home"),
                capture_output=True,
                text=True,
                check=False,
            )
        except OSError as error:
            raise Trouble(f"supervisord cannot be started: {error}") from error
        if done.returncode != 0:
            raise Trouble("supervisord did not start:\n" + (done.stdout + done.stderr).strip())
        if not wait_until(host.answers, 20):
            show_log(host, "supervisord")
            raise Trouble(f"supervisord was started, but does not answer on {host.socket}")
        host.write("supervisor.read", json.dumps(digests))

    def end(self) -> None:
        """Ends each supervisord that does not answer; two would start every service twice."""
        host = self.host
        for how, seconds in ((signal.SIGTERM, STOP_LIMIT_S), (signal.SIGKILL, 10)):
            pids = host.supervisors()
            if not pids:
                return
            say(f"supervisord (process {pids}) does not answer: {how.name}")
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, how)
            wait_until(lambda: not host.supervisors(), seconds)
        raise Trouble(f"supervisord (process {host.supervisors()}) cannot be ended")

    def read_again(self, digests: dict[str, str]) -> None:
        """What `supervisorctl update` does; groups whose description changed are restarted."""
        host = self.host
        say("supervisord reads its new configuration")
        try:
            added, changed, removed = host.call("reloadConfig")[0]
            for name in (*removed, *changed):
                host.call("stopProcessGroup", name)
                host.call("removeProcessGroup", name)
            for name in (*changed, *added):
                host.call("addProcessGroup", name)
        except xmlrpc.client.Fault as fault:
            raise Trouble(f"supervisord refuses {host.conf}: {fault.faultString}") from fault
        host.write("supervisor.read", json.dumps(digests))

    def launch(self, name: str) -> None:
        """Asks for the start of one service; returns at once."""
        try:
            self.host.call("startProcess", name, False)
        except xmlrpc.client.Fault as fault:
            if fault.faultCode == BAD_NAME:
                raise Trouble(f"{name}: not in {self.host.conf}") from fault
            if fault.faultCode != ALREADY_STARTED:
                show_log(self.host, name)
                raise Trouble(f"{name} did not start: {fault.faultString}") from fault

    def halt(self, name: str) -> None:
        """Asks for the stop of one service; returns at once."""
        try:
            self.host.call("stopProcess", name, False)
        except xmlrpc.client.Fault as fault:
            if fault.faultCode not in (NOT_RUNNING, BAD_NAME):
                raise Trouble(f"{name} could not be stopped: {fault.faultString}") from fault
        except NO_SUCH_FILE:
            pass  # no supervisord: its services end with it

    def show_log(self, name: str) -> None:
        show_log(self.host, name)

    def shutdown(self) -> None:
        if self.host.answers():
            self.host.call("shutdown")
        if not wait_until(lambda: not self.host.supervisors(), STOP_LIMIT_S):
            self.end()

    def uninstall(self) -> None:
        """Nothing of it lies outside of the base directory."""
        self.shutdown()
