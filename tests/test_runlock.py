"""runlock.py: one run at a time, and a lock that nobody holds any more never stays in the way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvhost.onhost import runlock
from kvhost.records import last_asked
from kvhost.records.holder import INITIAL, Controller, is_dead
from kvhost.records.journal import start_ticks

SCRIPT = Path(runlock.__file__)
REPO = Path(__file__).parents[1]


class Lock:
    def __init__(self, path: Path) -> None:
        self.path = path

    def argv(self, verb: str, run_id: str, *more: str) -> list[str]:
        owner = json.dumps({"run_id": run_id, "user": "ada"})
        argv = [sys.executable, "-", verb, "--file", str(self.path), "--owner", owner]
        return [*argv, *more]

    def run(self, verb: str, run_id: str, *more: str) -> subprocess.CompletedProcess[str]:
        """By standard input, the way that the deploy runs it before anything is on the host."""
        return subprocess.run(
            self.argv(verb, run_id, *more),
            input=SCRIPT.read_text(), capture_output=True, text=True, check=False, timeout=30,
        )  # fmt: skip

    def rc(self, verb: str, run_id: str, *more: str) -> int:
        return self.run(verb, run_id, *more).returncode

    def content(self) -> dict[str, Any]:
        return dict(json.loads(self.path.read_text()))

    def change(self, **fields: Any) -> None:
        kept = {k: v for k, v in {**self.content(), **fields}.items() if v is not None}
        self.path.write_text(json.dumps(kept))


@pytest.fixture
def lock(tmp_path: Path) -> Lock:
    return Lock(tmp_path / "run.lock")


def test_taken_kept_and_dropped(lock: Lock) -> None:
    assert lock.rc("take", "a") == 0
    first = lock.content()
    assert (first["run_id"], first["user"]) == ("a", "ada")
    assert lock.rc("keep", "a") == 0
    again = lock.content()
    assert again["refreshed_boottime"] > first["refreshed_boottime"]
    assert again["started_unix"] == first["started_unix"]
    assert lock.rc("take", "a") == 0  # its own
    assert lock.rc("drop", "a") == 0
    assert not lock.path.exists()
    assert lock.rc("drop", "a") == 0


@pytest.mark.parametrize("verb", ["take", "keep", "drop"])
def test_another_is_told_who_holds_it(lock: Lock, verb: str) -> None:
    lock.rc("take", "a")
    done = lock.run(verb, "b")
    assert done.returncode == 1
    assert json.loads(done.stdout)["run_id"] == "a"
    assert lock.content()["run_id"] == "a"


def test_one_of_many_at_once_gets_it(lock: Lock) -> None:
    argvs = [lock.argv("take", f"run{n}") for n in range(8)]
    started = []
    for argv in argvs:
        argv[1] = str(SCRIPT)
        started.append(subprocess.Popen(argv, stdout=subprocess.DEVNULL))
    codes = [process.wait(30) for process in started]
    assert sorted(codes) == [0] + [1] * 7
    assert lock.content()["run_id"] == f"run{codes.index(0)}"


def test_a_dead_and_a_given_up_run_are_named_to_take_over(lock: Lock) -> None:
    lock.rc("take", "a")
    assert lock.rc("take", "b", "--dead", "x", "--break", "y") == 1
    assert lock.rc("take", "b", "--dead", "a") == 0
    assert lock.rc("take", "c", "--break", "b") == 0
    assert lock.rc("keep", "b") == 1  # the run that was given up, and lives after all
    assert lock.rc("keep", "b", "--dead", "c") == 1  # only take takes over
    assert lock.content()["run_id"] == "c"


def test_a_run_whose_lock_is_gone_is_told(lock: Lock) -> None:
    done = lock.run("keep", "a")
    assert (done.returncode, done.stdout.strip()) == (1, "{}")
    assert not lock.path.exists()


def program(base: Path, name: str, first: str = "") -> subprocess.Popen[bytes]:
    """A program of kvhost at work on this host, as a lost connection leaves it."""
    path = base / "bin" / f"{name}.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"import time\n{first}\ntime.sleep(60)\n")
    return subprocess.Popen([sys.executable, str(path), "install"])


def test_what_a_dead_run_left_at_work_is_ended_first_and_nothing_else(tmp_path: Path) -> None:
    base = tmp_path / "base"
    (base / "state").mkdir(parents=True)
    lock = Lock(base / "state/run.lock")
    (tmp_path / "other").mkdir()
    mine, service, others = (
        program(base, "engine"), program(base, "pruner"), program(tmp_path / "other", "engine"),
    )  # fmt: skip
    try:
        assert lock.rc("take", "a") == 0
        assert lock.rc("take", "b") == 1  # not his: nothing is ended
        assert mine.poll() is None
        assert lock.rc("take", "b", "--dead", "a") == 0
        assert mine.wait(10) == -15
        mine = program(base, "generations")
        assert lock.rc("keep", "b") == 0
        assert mine.poll() is None
        assert lock.rc("drop", "b") == 0
        assert mine.wait(10) == -15
        assert (service.poll(), others.poll()) == (None, None)
    finally:
        for process in (mine, service, others):
            process.kill()
            process.wait()


@pytest.mark.skipif(os.geteuid() != 0, reason="another root directory needs root")
def test_what_is_at_work_in_a_container_of_this_host_is_left(tmp_path: Path) -> None:
    """Its own installation has the same path there, and is seen from here."""
    base = tmp_path / "base"
    (base / "state").mkdir(parents=True)
    inside = program(base, "engine", first=f"import os; os.chroot({str(tmp_path)!r})")
    ours = program(base, "generations")
    try:
        until_rooted = time.monotonic() + 30
        while Path(f"/proc/{inside.pid}/root").readlink() == Path("/"):
            assert time.monotonic() < until_rooted and inside.poll() is None
            time.sleep(0.02)
        assert Lock(base / "state/run.lock").rc("take", "a") == 0
        assert Lock(base / "state/run.lock").rc("drop", "a") == 0
        assert ours.wait(10) == -15
        assert inside.poll() is None
    finally:
        for process in (inside, ours):
            process.kill()
            process.wait()


STALE = runlock.STALE_AFTER_S + 5


def test_stale_by_the_time_since_the_start_of_the_host_not_by_its_clock(lock: Lock) -> None:
    lock.rc("take", "a")
    now = runlock.boottime()
    lock.change(refreshed_unix=time.time() - STALE)  # the clock was set
    assert lock.rc("take", "b") == 1
    lock.change(refreshed_unix=time.time() + 1e6, refreshed_boottime=now - STALE)
    assert lock.rc("take", "b") == 0


def test_stale_by_the_clock_after_a_restart_of_the_host(lock: Lock) -> None:
    lock.rc("take", "a")
    lock.change(boot_id="another", refreshed_boottime=-1e9)
    assert lock.rc("take", "b") == 1
    lock.change(refreshed_unix=time.time() - STALE)
    assert lock.rc("take", "b") == 0


@pytest.mark.parametrize("text", ["", "{", "[]", '{"user": "x"}', '{"run_id": 3}'])
def test_an_unreadable_lock_is_held_until_it_is_old_or_broken(lock: Lock, text: str) -> None:
    lock.path.write_text(text)
    done = lock.run("take", "a")
    assert done.returncode == 1
    assert json.loads(done.stdout)["run_id"] == "unreadable"
    old = time.time() - STALE
    os.utime(lock.path, (old, old))
    assert lock.rc("take", "a") == 0
    lock.path.write_text(text)
    assert lock.rc("take", "b", "--break", "unreadable") == 0


def test_what_cannot_be_used_is_not_taken_for_held_by_another(lock: Lock, tmp_path: Path) -> None:
    missing = Lock(tmp_path / "none" / "run.lock").run("take", "a")
    assert missing.returncode == 2
    assert f"{tmp_path}/none/run.lock cannot be used" in missing.stderr
    lock.path.mkdir()
    assert lock.rc("take", "a") == 2
    for owner in ("{", "[]", "{}", '{"run_id": 1}'):
        argv = [sys.executable, str(SCRIPT), "take", "--file", str(lock.path), "--owner", owner]
        assert subprocess.run(argv, capture_output=True, check=False).returncode == 2


# -- whether its run is dead, as its controller sees it ---------------------------------------

HERE = Controller("m", "boot-2", INITIAL, "k", up_s=60)
INSIDE = "pid:[4026532301]"
#: of a run of HERE, which is at work
OWN = {**HERE.owner(), "run_id": "a", "pid": 7, "pid_start_ticks": 70}
BEFORE = {**OWN, "controller_boot_id": "boot-1"}
OLD = {key: OWN[key] for key in ("controller_id", "pid", "pid_start_ticks")}


@pytest.mark.parametrize(
    ("change", "age_s", "expected"),
    [
        (OWN, 5, False),
        ({"pid_start_ticks": 69}, 5, True),  # its PID is another process's by now
        ({"pid": 8}, 5, True),
        ({"pid": "7"}, 5, None),
        ({"controller_id": "n", "pid": 8}, 5, None),
        ({"controller_pid_namespace": INSIDE, "pid": 8}, 5, None),  # another container, or the host
        # the controller booted since
        (BEFORE, 61, True),
        ({**BEFORE, "controller_id": "n"}, 61, None),
        ({**BEFORE, "controller_key": "l"}, 61, None),  # a copy of the machine, or another user
        ({**BEFORE, "controller_key": None}, 61, None),
        (BEFORE, 59, None),  # alive since this boot: of another machine
        ({**BEFORE, "controller_pid_namespace": INSIDE}, 61, None),
        ({**BEFORE, "controller_pid_namespace": None}, 61, None),
        ({"controller_boot_id": None}, 61, None),
    ],
)
def test_a_run_is_dead_only_where_that_is_known(
    change: dict[str, Any], age_s: float, expected: bool | None
) -> None:
    assert is_dead({**OWN, **change}, age_s, HERE, {7: 70}.get) is expected


def test_what_booted_in_a_container_cannot_be_known() -> None:
    """Its machine id may be its image's, and its cache a volume that others have too."""
    here = replace(HERE, space=INSIDE)
    lock = {**BEFORE, "controller_pid_namespace": INSIDE}
    assert is_dead(lock, 1e6, here, lambda _: None) is None
    assert is_dead({**OWN, **here.owner()}, 5, here, {7: 70}.get) is False  # within one it can
    keyless = replace(HERE, key=None)
    assert is_dead({**BEFORE, "controller_key": None}, 1e6, keyless, lambda _: None) is None


@pytest.mark.parametrize(
    ("space", "pid", "expected"),
    [
        (f"boot-2 {INITIAL}", 7, False),
        (f"boot-2 {INITIAL}", 8, True),
        (f"boot-1 {INITIAL}", 8, None),  # nothing tells it from a copy of this machine
        (f"boot-2 {INSIDE}", 8, None),
        ("boot-2", 8, None),
        (None, 8, None),
        ([], 8, None),
    ],
)
def test_a_lock_of_an_older_kvhost(space: Any, pid: int, expected: bool | None) -> None:
    lock = {**OLD, "pid": pid, "pid_space": space}
    assert is_dead(lock, 1e6, HERE, {7: 70}.get) is expected


def test_what_a_run_writes_is_what_the_next_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = """
import json
from types import SimpleNamespace
from deploys.common import runlock
from kvhost.report import RunLock
own = runlock.owner(SimpleNamespace(run_id="a"))
print(json.dumps([own, runlock.is_dead(RunLock(content=own, age_s=5))]))
"""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, cwd=REPO, capture_output=True, text=True, check=True, timeout=60)
    own, dead = json.loads(done.stdout.splitlines()[-1])
    assert dead is False
    here = Controller(
        own["controller_id"], runlock.boot_id(), str(Path("/proc/self/ns/pid").readlink()),
        last_asked.key_id(), runlock.boottime(),
    )  # fmt: skip
    assert {key: own[key] for key in here.owner()} == here.owner()
    assert is_dead(own, 5, here, start_ticks) is True
    later = replace(here, boot="another", space=INITIAL, up_s=4)
    assert is_dead({**own, "controller_pid_namespace": INITIAL}, 5, later, start_ticks) is True


def test_a_cache_that_takes_no_key_tells_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert last_asked.key_id() is None
    monkeypatch.setenv("XDG_CACHE_HOME", "~nobody-of-this-name/x")
    assert last_asked.key_id() is None
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a"))
    one = last_asked.key_id()
    assert one is not None and one == last_asked.key_id()
    assert one not in (tmp_path / "a/kvhost/asked.key").read_bytes().hex()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    assert last_asked.key_id() != one
