"""systemd as what runs the services, where it is PID 1; services.py lies beside it.

The deploy writes the units into etc/ of the base directory; here they are checked, put into
/etc/systemd/system and enabled. A unit that is not this installation's is never touched, and
drop-ins (NAME.service.d/) are the user's.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvhost.onhost.services_host import STOP_LIMIT_S, Host, Trouble, say, wait_until
    from kvhost.onhost.services_supervisor import Supervisord
else:  # it lies beside this file on a host, where there is no package kvhost
    from services_host import STOP_LIMIT_S, Host, Trouble, say, wait_until
    from services_supervisor import Supervisord

PREFIX = "kvhost-"
OPTIONAL_UNIT = re.compile(r"kvhost-(runner-[a-z0-9]+|cache|slots)\.service")
PLACE = "/etc/systemd/system"
ASKED = (
    *("Id", "LoadState", "ActiveState", "SubState", "Result", "MainPID", "NRestarts"),
    *("NeedDaemonReload", "UnitFileState", "FragmentPath", "Job"),
)
STATES = {
    "active": "RUNNING",
    "activating": "STARTING",
    "deactivating": "STOPPING",
    "failed": "FATAL",
    "inactive": "STOPPED",
    "reloading": "RUNNING",
}


def booted() -> bool:
    """Whether systemd is PID 1: a container may hold systemctl without it (sd_booted(3))."""
    try:
        with open("/proc/1/comm", encoding="ascii") as handle:
            return handle.read().strip() == "systemd" and os.path.isdir("/run/systemd/system")
    except OSError:
        return False


def is_ours(text: str, base: str) -> bool:
    """Whether a unit is of the installation in ``base``, by its first line (services/units.py)."""
    return text.startswith(f"# Written by kvhost for {base}. ")


def unit(name: str) -> str:
    return f"{PREFIX}{name}.service"


def read(path: str) -> str | None:
    """None without such a file. Raises OSError."""
    try:
        with open(path, encoding="utf-8") as handle:
            return handle.read()
    except FileNotFoundError:
        return None


class Systemd:
    """Methods raise Trouble."""

    name = "systemd"

    def __init__(self, host: Host) -> None:
        self.host = host

    def call(self, *words: str, ok: bool = True) -> str:
        env = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"}
        try:
            done = subprocess.run(
                words, env=env, capture_output=True, text=True, check=False, timeout=STOP_LIMIT_S,
                stdin=subprocess.DEVNULL,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise Trouble(f"{' '.join(words)}: {error}") from error
        if ok and done.returncode != 0:
            raise Trouble(f"{' '.join(words)}: {(done.stderr or done.stdout).strip()}")
        return done.stdout + done.stderr if not ok else done.stdout

    def rows(self) -> dict[str, dict[str, str]]:
        """What systemd knows of each service, by its name."""
        if not self.host.order:
            return {}  # without a unit systemctl would show the manager itself
        text = self.call("systemctl", "show", "-p", ",".join(ASKED), *map(unit, self.host.order))
        found: dict[str, dict[str, str]] = {}
        for block in text.strip().split("\n\n"):
            row = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
            found[row.get("Id", "")[len(PREFIX) : -len(".service")]] = row
        return found

    def states(self) -> dict[str, tuple[str, str]] | None:
        states = {}
        for name, row in self.rows().items():
            if row["LoadState"] not in ("loaded", "masked"):
                states[name] = ("DOWN", f"no unit {unit(name)}")
                continue
            state = STATES.get(row["ActiveState"], row["ActiveState"].upper())
            if state in ("STOPPED", "FATAL") and row.get("Job", "0") not in ("", "0"):
                state = "STARTING"  # what it is ordered after is not there yet
            if row["SubState"] == "auto-restart":
                state = "BACKOFF"
            detail = row["SubState"]
            if row["MainPID"] != "0":
                detail += f", process {row['MainPID']}"
            if row["Result"] != "success":
                detail += f", {row['Result']}"
            if row["NRestarts"] != "0":
                detail += f", {row['NRestarts']} restarts"
            states[name] = (state, detail)
        return states

    def wanted(self, name: str) -> str:
        path = self.host.path("etc", unit(name))
        text = read(path)
        if text is None:
            raise Trouble(f"{path} is missing: run the deploy again")
        return text

    def fresh(self) -> bool:
        """Whether the present units are installed, read and enabled, and nothing else runs them."""
        rows = self.rows()
        same = all(
            read(os.path.join(PLACE, unit(name))) == self.wanted(name) for name in self.host.order
        )
        read_in = all(
            row["NeedDaemonReload"] == "no" and row["UnitFileState"] == "enabled"
            for row in rows.values()
        )
        return same and read_in and not self.dropped() and not self.host.supervisors()

    def dropped(self) -> list[str]:
        """Services that have a unit of ours and no description any more."""
        found = []
        for name in sorted(os.listdir(PLACE)):
            match = OPTIONAL_UNIT.fullmatch(name)
            if match and match.group(1) not in self.host.order:
                path = os.path.join(PLACE, name)
                if not os.path.islink(path) and is_ours(read(path) or "", self.host.base):
                    found.append(match.group(1))
        return found

    def take_away(self, names: list[str]) -> None:
        """Stops them, and removes their units; drop-ins are the user's and stay."""
        for name in names:
            say(f"taking {unit(name)} away: it is in the settings no more")
            self.call("systemctl", "disable", "--quiet", "--now", unit(name))
            os.unlink(os.path.join(PLACE, unit(name)))
        if "cache" in names:
            self.open_ports()
        if names:
            self.call("systemctl", "daemon-reload")
            self.call("systemctl", "reset-failed", *map(unit, names), ok=False)

    def bring(self) -> None:
        """The units are installed as they are in etc/, and enabled; none is started."""
        self.leave_supervisord()
        self.take_away(self.dropped())
        rows = self.rows()
        stale = []
        for name in self.host.order:
            text, path = self.wanted(name), os.path.join(PLACE, unit(name))
            self.refuse_foreign(name, rows[name]["FragmentPath"])
            if read(path) != text:
                stale.append((path, text))
        if stale:
            self.verify()
            for path, text in stale:
                say(f"installing {path}")
                with open(path + ".new", "w", encoding="utf-8") as handle:
                    handle.write(text)
                    handle.flush()
                    os.fsync(handle.fileno())
                os.chmod(path + ".new", 0o644)
                os.replace(path + ".new", path)
        if stale or any(row["NeedDaemonReload"] != "no" for row in rows.values()):
            self.call("systemctl", "daemon-reload")
        off = [name for name, row in self.rows().items() if row["UnitFileState"] != "enabled"]
        if off:
            self.call("systemctl", "enable", "--quiet", *map(unit, off))

    def open_ports(self) -> None:
        """The table of nftables that closed the cache server's ports goes with it."""
        self.call("python3", self.host.path("bin", "close_ports.py"), "--remove", ok=False)

    def up(self) -> None:
        if any(read(os.path.join(PLACE, unit(name))) is None for name in self.host.order):
            self.bring()

    def leave_supervisord(self) -> None:
        """An earlier version ran the services under supervisord on this host."""
        if self.host.supervisors():
            say("the services move from supervisord to systemd")
            Supervisord(self.host).shutdown()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.host.conf)

    def refuse_foreign(self, name: str, loaded_from: str) -> None:
        path = os.path.join(PLACE, unit(name))
        there = [p for p in {path, loaded_from} if p and os.path.lexists(p)]
        for one in there:
            if os.path.islink(one):
                raise Trouble(f"{one} is a link (masked?), not kvhost's: it is left as it is")
            text = read(one) or ""
            if not is_ours(text, self.host.base):
                raise Trouble(f"{one} is not a unit of kvhost in {self.host.base}: it is left")

    def verify(self) -> None:
        """systemd reads the new units before they replace those in use: a key that it does not
        know would be passed over with a warning in the log."""
        paths = [self.host.path("etc", unit(name)) for name in self.host.order]
        said = self.call("systemd-analyze", "verify", "--man=no", *paths, ok=False)
        wrong = [line for line in said.splitlines() if PREFIX in line]
        if wrong:
            raise Trouble("systemd does not take the new units:\n  " + "\n  ".join(wrong))

    def launch(self, name: str) -> None:
        # by hand nothing counts against the limit of restarts
        self.call("systemctl", "reset-failed", unit(name), ok=False)
        self.call("systemctl", "start", "--no-block", unit(name))

    def halt(self, name: str) -> None:
        if self.rows()[name]["LoadState"] == "loaded":
            self.call("systemctl", "stop", "--no-block", unit(name))

    def show_log(self, name: str) -> None:
        """Its last lines, systemd's own words on it among them."""
        for line in self.call("journalctl", "-u", unit(name), "-n", "20", "-o", "cat",
                              "--no-pager", ok=False).splitlines():  # fmt: skip
            say(f"  {name} | {line.rstrip()}")

    def shutdown(self) -> None:
        for name in reversed(self.host.order):
            if self.rows()[name]["LoadState"] == "loaded":
                self.call("systemctl", "stop", unit(name))

    def uninstall(self) -> None:
        """Stops the services and takes their units away; drop-ins are the user's and stay."""
        rows = self.rows()
        for name in self.host.order:
            self.refuse_foreign(name, rows[name]["FragmentPath"])
        self.shutdown()
        self.take_away(self.dropped())
        for name in self.host.order:
            path = os.path.join(PLACE, unit(name))
            if os.path.lexists(path):
                self.call("systemctl", "disable", "--quiet", unit(name))
                os.unlink(path)
        self.call("systemctl", "daemon-reload")
        if self.host.order:  # without a name it would be all units of the host
            self.call("systemctl", "reset-failed", *map(unit, self.host.order), ok=False)
        self.open_ports()
        if not wait_until(lambda: not self.host.supervisors(), 5):
            Supervisord(self.host).shutdown()
