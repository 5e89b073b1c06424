"""services.py with a real supervisord and small services in the place of the engine."""

from __future__ import annotations

import json
import os
import pwd
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvhost.onhost import launch_children

ONHOST = Path(__file__).parent.parent / "kvhost" / "onhost"
BIN = Path(sys.executable).parent
ORDER = ("cache", "runner", "pruner")
IDLE = "import signal; signal.pause()"

pytestmark = pytest.mark.skipif(
    not (BIN / "supervisord").exists(), reason="the package supervisor is not installed"
)


def until(ready: Callable[[], object], seconds: float = 15) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline, "not within the time"
        time.sleep(0.05)


def lives(pid: int) -> bool:
    return any(one == pid for one, _ in launch_children.processes())


class Base:
    """A base directory as the deploy leaves it, with dummies as services."""

    order: tuple[str, ...] = ORDER

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in ("run", "etc", "home", "log", "tools/current", "bin"):
            (root / name).mkdir(parents=True)
        (root / "tools/current/bin").symlink_to(BIN)
        for script in ONHOST.glob("[a-z]*.py"):
            (root / "bin" / script.name).write_text(script.read_text())
        self.codes = dict.fromkeys(self.order, IDLE)
        self.more: dict[str, dict[str, Any]] = {name: {} for name in self.order}
        self.extra = ""
        self.render()

    def render(self) -> None:
        for name in self.order:
            spec = {
                "service": name,
                "argv": [sys.executable, "-c", self.codes[name]],
                "env": {"HOME": str(self.root / "home"), "PATH": "/usr/bin:/bin"},
                "record": str(self.root / "run" / f"{name}.json"),
                "stop_timeout_s": 3,
                **self.more[name],
            }
            (self.root / "etc" / f"{name}.json").write_text(json.dumps(spec))
        conf = (
            f"[unix_http_server]\nfile={self.root}/run/supervisor.sock\nchmod=0700\n"
            f"[supervisord]\nlogfile={self.root}/log/supervisord.log\n"
            f"pidfile={self.root}/run/supervisord.pid\nminfds=256\n"
            "[rpcinterface:supervisor]\n"
            "supervisor.rpcinterface_factory = supervisor.rpcinterface:make_main_rpcinterface\n"
        )
        for priority, name in enumerate(self.order):
            conf += (
                f"[program:{name}]\n"
                f"command={sys.executable} {self.root}/bin/launch.py {self.root}/etc/{name}.json\n"
                f"priority={priority}\nautorestart=true\nstartsecs=1\nstartretries=1000\n"
                f"stopwaitsecs=10\nredirect_stderr=true\n"
                f"stdout_logfile={self.root}/log/{name}.log\n{self.extra}"
            )
        (self.root / "etc" / "supervisord.conf").write_text(conf)

    def call(self, *words: str, rc: int = 0) -> str:
        """Stderr of services.py."""
        done = self.run(*words)
        assert done.returncode == rc, done.stderr
        return done.stderr

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        user = pwd.getpwuid(os.geteuid()).pw_name
        argv = [sys.executable, str(self.root / "bin" / "services.py"), "--user", user]
        argv += ["--base", str(self.root), *words]
        return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)

    def status(self) -> dict[str, Any]:
        done = self.run("--json", "status")
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    def good(self) -> bool:
        now = self.status()
        rows = now["services"].values()
        return bool(now["supervisor_fresh"]) and all(
            row["state"] == "RUNNING" and row["alive"] and row["current"] for row in rows
        )

    def pids(self) -> dict[str, int]:
        found = {}
        for name in self.order:
            path = self.root / "run" / f"{name}.json"
            found[name] = json.loads(path.read_text())["pid"] if path.exists() else 0
        return found

    def supervisor(self) -> int:
        return int((self.root / "run" / "supervisord.pid").read_text())


def ended(made: Base) -> None:
    made.call("shutdown")
    left = [name for name, pid in made.pids().items() if pid and lives(pid)]
    assert not left


@pytest.fixture
def base(tmp_path: Path) -> Iterator[Base]:
    made = Base(tmp_path)
    yield made
    ended(made)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Base]:
    made = Base(tmp_path_factory.mktemp("base"))
    yield made
    ended(made)


@pytest.fixture
def running(shared: Base) -> Base:
    """All services run: one supervisord serves every test that leaves it in order."""
    shared.codes = dict.fromkeys(ORDER, IDLE)
    shared.more = {name: {} for name in ORDER}
    shared.render()
    shared.call("ensure")
    return shared


def test_from_nothing_to_all_running_and_again_without_a_change(base: Base) -> None:
    before = base.status()
    assert {row["state"] for row in before["services"].values()} == {"DOWN"}
    assert not any(row["current"] for row in before["services"].values())
    (base.root / "etc" / "pruner.json").unlink()  # neither described nor ever run
    assert base.status()["services"]["pruner"]["current"] is False
    base.render()
    record = base.root / "run" / "pruner.json"
    record.write_text(json.dumps({"pid": os.getpid(), "start_ticks": 1}))  # a PID used again
    assert base.status()["services"]["pruner"]["alive"] is False
    base.call("ensure")
    assert base.good()
    pids = base.pids()
    assert base.call("ensure") == ""
    assert base.pids() == pids
    assert not list((base.root / "bin").glob("__pycache__"))


def test_a_changed_description_restarts_that_service_alone(running: Base) -> None:
    pids = running.pids()
    running.more["runner"] = {"wait_s": 7}
    running.render()
    assert running.status()["services"]["runner"]["current"] is False
    assert "restarting runner" in running.call("ensure")
    after = running.pids()
    assert running.good()
    assert {name for name in ORDER if after[name] != pids[name]} == {"runner"}


def test_stopped_by_hand_started_by_hand_and_by_ensure(running: Base) -> None:
    running.call("stop")
    row = running.status()["services"]["runner"]
    assert (row["state"], row["alive"]) == ("STOPPED", False)
    assert not any(lives(pid) for pid in running.pids().values())
    running.call("start", "cache")
    pids = running.pids()
    assert "starting runner" in running.call("ensure")
    assert running.good()
    assert running.pids()["cache"] == pids["cache"]


def test_restarted_by_hand_and_a_start_of_one_that_runs(running: Base) -> None:
    pids = running.pids()
    running.call("start", "cache")  # it runs, and stays as it is
    assert running.pids() == pids
    assert not (running.root / "run" / "cache.now").exists()  # nor is its next pause skipped
    running.call("restart", "cache", "runner")
    after = running.pids()
    assert {name for name in ORDER if after[name] != pids[name]} == {"cache", "runner"}
    assert running.good()


def test_a_new_configuration_is_read_even_after_a_death_in_between(
    running: Base,
) -> None:
    supervisor = running.supervisor()
    running.extra = "stopasgroup=false\nstartretries=7\n"
    running.render()
    os.utime(running.root / "etc" / "supervisord.conf", (1, 1))  # an old time must not hide it
    assert running.status()["supervisor_fresh"] is False
    assert "new configuration" in running.call("ensure")
    assert running.good()
    assert running.supervisor() == supervisor
    (running.root / "run" / "supervisor.read").unlink()  # died before it was noted
    assert running.status()["supervisor_fresh"] is False
    running.call("ensure")
    assert running.good()


@pytest.mark.skipif(os.geteuid() != 0, reason="another root directory needs root")
def test_the_supervisord_of_a_container_of_this_host_is_left(running: Base, tmp_path: Path) -> None:
    """Its configuration has the same path there; without ours there is none that answers here."""
    program = tmp_path / "supervisord"
    program.write_text(f"import os, time; os.chroot({str(tmp_path)!r}); time.sleep(60)\n")
    running.call("shutdown")
    conf = str(running.root / "etc/supervisord.conf")
    inside = subprocess.Popen([sys.executable, str(program), "-c", conf])
    try:
        until(lambda: Path(f"/proc/{inside.pid}/root").readlink() != Path("/"))
        assert "SIGTERM" not in running.call("ensure")
        assert inside.poll() is None
        assert running.good()
    finally:
        inside.kill()
        inside.wait()


def test_a_change_of_supervisords_own_part_restarts_it(running: Base) -> None:
    supervisor = running.supervisor()
    conf = running.root / "etc" / "supervisord.conf"
    conf.write_text(conf.read_text().replace("minfds=256", "minfds=255"))
    assert "own part" in running.call("ensure")
    assert running.supervisor() != supervisor
    assert running.good()


def test_supervisord_killed_takes_all_along_and_ensure_brings_it_back(running: Base) -> None:
    pids = running.pids()
    os.kill(running.supervisor(), signal.SIGKILL)
    until(lambda: not any(lives(pid) for pid in pids.values()))
    # what it leaves behind lies in the way: a socket that nobody serves, a PID of somebody else
    assert (running.root / "run" / "supervisor.sock").exists()
    (running.root / "run" / "supervisord.pid").write_text(f"{os.getpid()}\n")
    running.call("ensure")
    assert running.good()
    assert not set(running.pids().values()) & set(pids.values())


def test_a_supervisord_without_its_socket_is_replaced_not_doubled(running: Base) -> None:
    old, pids = running.supervisor(), running.pids()
    (running.root / "run" / "supervisor.sock").unlink()
    assert "does not answer" in running.call("ensure")
    assert not lives(old)
    assert not any(lives(pid) for pid in pids.values())
    assert running.good()


def test_a_crashed_service_comes_back(running: Base) -> None:
    pid = running.pids()["cache"]
    os.kill(pid, signal.SIGKILL)
    until(lambda: running.pids()["cache"] != pid)
    assert "ended by itself with -9" in running.status()["services"]["cache"]["failed"]


def test_a_service_that_does_not_come_says_why_at_once_and_is_started_without_a_pause(
    running: Base,
) -> None:
    running.codes["runner"] = "print('no such model', flush=True); raise SystemExit(9)"
    running.render()
    began = time.monotonic()
    said = running.call("ensure", rc=1)
    assert "runner did not start: runner ended by itself with 9" in said
    assert "runner | no such model" in said
    assert time.monotonic() - began < 20
    # after five failures launch.py would pause 20 s; a mended service does not wait for that
    running.call("stop", "runner")
    failed = running.root / "run" / "runner.failed"
    failed.write_text(json.dumps({**json.loads(failed.read_text()), "count": 5}))
    running.codes["runner"] = IDLE
    running.render()
    began = time.monotonic()
    running.call("ensure")
    assert time.monotonic() - began < 15
    assert running.good()


def test_an_unusable_description_is_named(running: Base) -> None:
    (running.root / "etc" / "pruner.json").write_text("{")
    said = running.call("ensure", rc=1)
    assert "pruner did not start: unusable: " in said
    assert f"{running.root}/etc/pruner.json" in said


def test_a_service_that_still_waits_is_waited_for_not_restarted(base: Base) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    opening = f"import socket, signal; s = socket.create_server(('127.0.0.1', {port}))\n"
    base.codes["cache"] = opening + "signal.pause()"
    base.more["cache"] = {"before": [[sys.executable, "-c", "import time; time.sleep(4)"]]}
    base.more["runner"] = {"wait_for": [f"127.0.0.1:{port}"]}
    base.render()
    said = base.call("ensure")
    assert "restarting" not in said
    assert base.good()
    log = (base.root / "log" / "cache.log").read_text()
    assert log.count("first: ") == 1


def test_a_missing_supervisord_is_said(base: Base) -> None:
    (base.root / "tools/current/bin").unlink()
    assert "supervisord" in base.call("ensure", rc=1)
    assert base.status()["services"]["cache"]["current"] is False


def test_a_log_that_is_a_link_is_not_followed(running: Base, tmp_path: Path) -> None:
    (tmp_path / "shadow").write_text("root:secret")
    running.codes["cache"] = "raise SystemExit(9)"
    running.render()
    running.call("restart", "cache", rc=1)
    (running.root / "log" / "cache.log").unlink()
    (running.root / "log" / "cache.log").symlink_to(tmp_path / "shadow")
    assert "root:secret" not in running.call("restart", "cache", rc=1)


def test_wrong_names_and_users_are_refused(base: Base) -> None:
    assert "no service vllm" in base.call("restart", "vllm", rc=2)
    script = str(base.root / "bin" / "services.py")
    argv = [sys.executable, script, "--base", str(base.root), "--user", "nobody-of-that-name"]
    done = subprocess.run([*argv, "--json", "status"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "services: there is no user nobody-of-that-name on this host\n"
