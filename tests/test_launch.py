"""launch.py with real processes: what a service is given, and that nothing of it is left behind."""

from __future__ import annotations

import json
import os
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

LAUNCH = Path(__file__).parent.parent / "kvhost" / "onhost" / "launch.py"
SECRET = "s3cret-of-the-test"

IDLE = "import signal; signal.pause()"
DEAF = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"


def until(ready: Callable[[], object], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline, "not within the time"
        time.sleep(0.02)


def lives(pid: int) -> bool:
    return any(one == pid for one, _ in launch_children.processes())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Box:
    """A directory with run/ and etc/, and every launch.py that was started in it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.started: list[subprocess.Popen[bytes]] = []
        for name in ("run", "etc", "home"):
            (root / name).mkdir()
        self.spec_path = root / "etc" / "svc.json"
        self.log = root / "log"

    def spec(self, code: str = IDLE, **more: Any) -> Box:
        env = {"HOME": str(self.root / "home"), "PATH": "/usr/bin:/bin", "GIVEN": "yes"}
        spec = {
            "service": "svc", "argv": [sys.executable, "-c", code], "env": env,
            "record": str(self.root / "run" / "svc.json"), "stop_timeout_s": 5, **more,
        }  # fmt: skip
        self.spec_path.write_text(json.dumps(spec))
        return self

    def start(self, **kwargs: Any) -> subprocess.Popen[bytes]:
        env = {**os.environ, "FROM_SUPERVISOR": "1"}
        with self.log.open("ab") as log:
            kwargs.setdefault("stdout", log)
            argv = [sys.executable, str(LAUNCH), str(self.spec_path)]
            self.started.append(subprocess.Popen(argv, stderr=log, env=env, **kwargs))
        return self.started[-1]

    def up(self, **kwargs: Any) -> subprocess.Popen[bytes]:
        """Started, and its service runs."""
        old = self.record().get("pid")
        launcher = self.start(**kwargs)
        until(lambda: self.record().get("pid") not in (None, old) and not self.doing())
        return launcher

    def end(self, launcher: subprocess.Popen[bytes], how: int = signal.SIGTERM) -> int:
        launcher.send_signal(how)
        return launcher.wait(15)

    def read(self, name: str) -> dict[str, Any]:
        try:
            return dict(json.loads((self.root / "run" / name).read_text()))
        except (OSError, ValueError):
            return {}

    def record(self) -> dict[str, Any]:
        return self.read("svc.json")

    def doing(self) -> str | None:
        return str(self.read("svc.lock").get("doing") or "")

    def digest(self) -> str:
        argv = [sys.executable, str(LAUNCH), "--digest", str(self.spec_path)]
        return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    made = Box(tmp_path)
    yield made
    for launcher in made.started:
        if launcher.poll() is None:
            launcher.terminate()
            launcher.wait(20)
    pid = made.record().get("pid")
    assert pid is None or not lives(pid)


def test_a_service_has_its_secret_in_the_environment_and_nothing_of_the_supervisors(
    box: Box, tmp_path: Path
) -> None:
    key, seen = tmp_path / "key", tmp_path / "seen"
    key.write_text(SECRET + "\n")
    code = f"import os, json; open({str(seen)!r}, 'w').write(json.dumps(dict(os.environ)))\n"
    hook_saw = tmp_path / "hook"
    hook = [sys.executable, "-c", f"import os; open({str(hook_saw)!r}, 'w').write(str(os.environ))"]
    box.spec(code + IDLE, secret_env={"KEY": str(key)}, before=[hook]).up()
    until(seen.exists)
    until(lambda: seen.read_text().endswith("}"))
    env = json.loads(seen.read_text())
    assert env.pop("KEY") == SECRET
    assert env.pop("LC_CTYPE", "C.UTF-8")  # Python's own doing
    assert env == json.loads(box.spec_path.read_text())["env"]
    pid = box.record()["pid"]
    argv = Path(f"/proc/{pid}/cmdline").read_bytes() + box.log.read_bytes()
    written = b"".join(p.read_bytes() for p in (tmp_path / "run").iterdir())
    assert SECRET.encode() not in argv + written
    assert SECRET not in hook_saw.read_text()


@pytest.mark.parametrize("content", ["", "\n", "two\nlines\n", None])
def test_a_secret_that_is_none_is_refused(box: Box, tmp_path: Path, content: str | None) -> None:
    key = tmp_path / "key"
    if content is not None:
        key.write_text(content)
    assert box.spec(secret_env={"KEY": str(key)}).start().wait(10) == 78
    assert str(key) in box.read("svc.failed")["why"]


def test_the_record_names_the_process_and_how_it_ended(box: Box) -> None:
    launcher = box.spec().up()
    record = box.record()
    fields = launch_children.stat_fields(record["pid"])
    assert fields is not None
    assert int(fields[19]) == record["start_ticks"]
    assert int(fields[1]) == launcher.pid == record["launcher_pid"]
    assert record["config_digest"] == box.digest() == box.read("svc.lock")["config_digest"]
    assert record["clean_stop"] is None
    assert abs(record["started_unix"] - time.time()) < 10
    assert box.end(launcher) == 0
    assert box.record()["clean_stop"] is True
    assert box.record()["ended_unix"] >= record["started_unix"]
    assert not lives(record["pid"])
    assert box.read("svc.failed") == {}


def test_files_are_made_for_the_service_user_alone(box: Box) -> None:
    box.spec().up()
    modes = {p.name: p.stat().st_mode & 0o077 for p in (box.root / "run").iterdir()}
    assert set(modes.values()) == {0}, modes


def test_what_ignores_sigterm_is_killed_and_counts_as_unclean(box: Box, tmp_path: Path) -> None:
    deaf = DEAF + f"open({str(tmp_path / 'deaf')!r}, 'w')\ntime.sleep(60)"
    launcher = box.spec(deaf, stop_timeout_s=0.3).up()
    until((tmp_path / "deaf").exists)
    assert box.end(launcher) == 1
    assert box.record()["clean_stop"] is False


def test_a_crash_is_passed_on_and_says_why(box: Box) -> None:
    assert box.spec("raise SystemExit(3)").start().wait(10) == 3
    failed = box.read("svc.failed")
    assert (failed["exit"], failed["count"]) == (3, 1)
    assert box.record()["clean_stop"] is False
    assert box.record()["ended_unix"] > 0


def test_descendants_end_with_the_service_also_those_that_fled_its_session(
    box: Box, tmp_path: Path
) -> None:
    note = tmp_path / "pid"
    deaf = DEAF + f"import os; os.setsid(); open({str(note)!r}, 'w').write(str(os.getpid()))\n"
    deaf += "time.sleep(60)"
    code = (
        "import os, sys, time\nif os.fork() == 0:\n"
        f" os.execv(sys.executable, [sys.executable, '-c', {deaf!r}])\n"
        f"while not os.path.exists({str(note)!r}): time.sleep(0.02)\n"
        "time.sleep(0.1)\n"
    )
    assert box.spec(code).start().wait(10) == 0
    assert note.read_text()
    assert not lives(int(note.read_text()))


def unclean_hook(note: Path) -> list[str]:
    return [
        sys.executable,
        "-c",
        f"import sys; open({str(note)!r}, 'a').write(repr(sys.argv[1:]))",
        "{unclean}",
    ]


def test_a_killed_launch_takes_its_service_along_and_the_next_start_knows(
    box: Box, tmp_path: Path
) -> None:
    note = tmp_path / "note"
    launcher = box.spec(before=[unclean_hook(note)]).up()
    assert note.read_text() == "[]"  # the first start of all: nothing was there to be unclean
    first = box.record()["pid"]
    box.end(launcher, signal.SIGKILL)
    until(lambda: not lives(first))
    launcher = box.up()
    assert note.read_text() == "[]['--unclean']"
    assert box.record()["clean_stop_before"] is False
    box.end(launcher)
    launcher = box.up()
    assert note.read_text() == "[]['--unclean'][]"
    assert box.record()["clean_stop_before"] is True


@pytest.mark.parametrize("damage", ["", "[]", '{"pid": 1'])
def test_an_unreadable_record_counts_as_an_unclean_stop(
    box: Box, tmp_path: Path, damage: str
) -> None:
    note = tmp_path / "note"
    (box.root / "run" / "svc.json").write_text(damage)
    box.spec(before=[unclean_hook(note)]).up()
    assert note.read_text() == "['--unclean']"


def test_an_orphan_that_ignores_sigterm_is_ended_by_the_next_start(
    box: Box, tmp_path: Path
) -> None:
    port, bound = free_port(), tmp_path / "bound"
    code = (
        DEAF + "import socket, os\ns = socket.socket()\n"
        f"s.bind(('127.0.0.1', {port}))\ns.listen()\n"
        f"open({str(bound)!r}, 'a').write('x')\nif os.fork() == 0: time.sleep(60)\ntime.sleep(60)"
    )
    launcher = box.spec(code, stop_timeout_s=0.3).up()
    until(bound.exists)
    orphan = box.record()["pid"]
    box.end(launcher, signal.SIGKILL)
    time.sleep(0.2)
    assert lives(orphan)  # it is deaf: only SIGKILL ends it
    box.up()
    until(lambda: bound.read_text() == "xx")  # the port was free again
    assert not lives(orphan)


def test_leftovers_are_told_by_boot_container_and_start_time(box: Box) -> None:
    box.spec().up()
    record = box.record()
    assert launch_children.leftovers(record) == [record["pid"]]
    for key, other in (
        ("boot_id", "another boot"),
        ("pid1_ticks", record["pid1_ticks"] + 1),
        ("start_ticks", record["start_ticks"] + 1),
    ):
        assert launch_children.leftovers({**record, key: other}) == [], key


def test_two_at_once_never_run_the_service_twice(box: Box) -> None:
    first = box.spec(stop_timeout_s=0.3).up()
    pid = box.record()["pid"]
    second = box.start()
    time.sleep(1.5)  # by then it would have ended what it took for a leftover
    assert second.poll() is None
    assert box.record()["pid"] == pid
    assert box.end(first) == 0
    until(lambda: box.record()["pid"] != pid)
    assert box.record()["launcher_pid"] == second.pid


def test_a_dead_supervisor_takes_its_services_along(box: Box) -> None:
    code = "import subprocess, sys, time; subprocess.Popen(sys.argv[1:]); time.sleep(60)"
    deaf = box.spec(DEAF + "print('deaf', flush=True)\ntime.sleep(60)", stop_timeout_s=0.5)
    argv = [sys.executable, "-c", code, sys.executable, str(LAUNCH), str(deaf.spec_path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as supervisor_double:
        assert supervisor_double.stdout is not None
        while b"deaf" not in supervisor_double.stdout.readline():
            pass
        until(lambda: box.record() and not box.doing())
        record = box.record()
        supervisor_double.kill()
    # its end also closes the log's pipe: launch.py must not die of that before its service
    until(lambda: not lives(record["launcher_pid"]))
    assert not lives(record["pid"])
    assert box.record()["clean_stop"] is False


def test_it_waits_for_what_the_service_needs(box: Box) -> None:
    port = free_port()
    launcher = box.spec(wait_for=[f"127.0.0.1:{port}"], wait_s=20).start()
    until(lambda: f"waiting for 127.0.0.1:{port}" in (box.doing() or ""))
    assert box.record() == {}
    with socket.create_server(("127.0.0.1", port)):
        until(box.record)
    assert launcher.poll() is None


def test_what_never_answers_is_named(box: Box) -> None:
    port = free_port()
    assert box.spec(wait_for=[f"127.0.0.1:{port}"], wait_s=0.3).start().wait(10) == 75
    failed = box.read("svc.failed")
    assert f"127.0.0.1:{port}" in failed["why"]
    assert failed["exit"] == 75
    assert box.record() == {}


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_it_starts_on_its_own_drive_alone(box: Box, tmp_path: Path) -> None:
    mount, known = tmp_path / "drive", tmp_path / "drive.json"
    mount.mkdir()
    marker = mount / ".kvhost-drive.json"
    box.spec(drive={"mount": str(mount), "record": str(known)})

    def refused_because(word: str) -> None:
        (box.root / "run" / "svc.now").write_text("")  # no pause after the failure before
        assert box.start().wait(15) == 75
        assert word in box.read("svc.failed")["why"]

    refused_because("is not mounted")
    known.write_text('{"uuid": "a"}')
    marker.write_text('{"uuid": "a"}')
    refused_because("is not mounted")  # a directory of the root disk, whatever lies in it
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", mount], check=True)
    try:
        refused_because("another drive is mounted: None")
        marker.write_text('{"uuid": "b"}')
        refused_because("another drive")
        marker.write_text('{"uuid": "a"}')
        (box.root / "run" / "svc.now").write_text("")
        assert box.end(box.up()) == 0
    finally:
        subprocess.run(["umount", mount], check=True)


def test_a_stop_while_it_waits_is_prompt_and_no_failure(box: Box) -> None:
    launcher = box.spec(wait_for=[f"127.0.0.1:{free_port()}"], wait_s=60).start()
    until(box.doing)
    began = time.monotonic()
    assert box.end(launcher) == 0
    assert time.monotonic() - began < 3
    assert box.read("svc.failed") == {}


def test_a_stop_during_the_sweep_ends_it_and_the_service_does_not_start(
    box: Box, tmp_path: Path
) -> None:
    note = tmp_path / "note"
    code = f"import os, signal; open({str(note)!r}, 'w').write(str(os.getpid())); signal.pause()"
    launcher = box.spec(before=[[sys.executable, "-c", code]]).start()
    until(lambda: note.exists() and note.read_text())
    assert box.end(launcher) == 0
    assert not lives(int(note.read_text()))
    assert box.record() == {}


def test_a_failing_sweep_is_named_and_the_pause_grows_until_somebody_says_now(box: Box) -> None:
    box.spec(before=[[sys.executable, "-c", "raise SystemExit(4)"]])
    assert box.start().wait(10) == 1
    assert "SystemExit(4)" in box.read("svc.failed")["why"]
    began = time.monotonic()
    assert box.start().wait(10) == 1
    assert time.monotonic() - began > 2  # 2**1 s after the first failure
    assert box.read("svc.failed")["count"] == 2
    launcher = box.start()
    until(lambda: "a pause of 4 s" in (box.doing() or ""))
    began = time.monotonic()
    (box.root / "run" / "svc.now").touch()
    assert launcher.wait(10) == 1
    assert time.monotonic() - began < 2
    assert not (box.root / "run" / "svc.now").exists()


def test_a_program_that_is_not_there_is_named(box: Box) -> None:
    assert box.spec(argv=["/nowhere/vllm"]).start().wait(10) == 1
    assert "/nowhere/vllm" in box.read("svc.failed")["why"]


def test_it_is_not_back_before_the_gap_is_over(box: Box) -> None:
    box.end(box.spec(min_gap_s=1.5).up())
    ended = box.record()["ended_unix"]
    box.up()
    assert box.record()["started_unix"] - ended > 1.4


@pytest.mark.parametrize("jump_s", [-1e6, 1e6])
def test_a_clock_that_jumped_does_not_change_the_gap(box: Box, jump_s: float) -> None:
    box.end(box.spec(min_gap_s=1.5).up())
    record = box.record()
    record["ended_unix"] += jump_s
    (box.root / "run/svc.json").write_text(json.dumps(record))
    began = time.monotonic()
    box.up()
    assert 1 < time.monotonic() - began < 10


def test_an_unusable_spec_says_everything_that_is_wrong(box: Box) -> None:
    box.spec_path.write_text('{"service": "svc", "argv": "x"}')
    assert box.start().wait(10) == 78
    why = box.read("svc.failed")["why"]
    assert "argv (not a list)" in why
    assert "env (missing)" in why
    assert "record (missing)" in why
    box.spec_path.write_text("{")
    assert box.start().wait(10) == 78
    assert str(box.spec_path) in box.read("svc.failed")["why"]


def test_the_digest_follows_spec_files_links_and_secrets(box: Box, tmp_path: Path) -> None:
    watched, key = tmp_path / "w", tmp_path / "key"
    link, other = tmp_path / "link", tmp_path / "other"
    key.write_text("1")
    link.symlink_to("a")
    other.symlink_to("b")
    box.spec(watch=[str(watched), str(link)], secret_env={"K": str(key)})
    digests = [box.digest()]
    assert box.digest() == digests[0]

    def changed(change: Callable[[], object]) -> None:
        change()
        assert box.digest() not in digests
        digests.append(box.digest())

    changed(watched.touch)  # an empty file is not the same as none
    changed(lambda: watched.write_text("x"))
    changed(lambda: other.replace(link))
    changed(lambda: os.utime(key, ns=(1, 1)))
    changed(lambda: box.spec(watch=[str(watched), str(link)], secret_env={"K": str(key)}, a=1))


def test_a_well_service_has_no_reason_of_failure_left(box: Box, tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    code = f"import os, sys\nif not os.path.exists({str(flag)!r}): sys.exit(1)\n"
    box.spec(code + IDLE).start().wait(10)
    assert box.read("svc.failed")["count"] == 1
    flag.touch()
    (box.root / "run" / "svc.now").touch()
    box.end(box.up())
    assert box.read("svc.failed") == {}
