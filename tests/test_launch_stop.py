"""launch.py before a stop: commands that need the service to answer run first, with its secrets."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import pytest

from tests.test_launch import SECRET, Box, box, lives, until

__all__ = ["box"]  # a fixture

#: notes each signal that the service is told, and when the hook ran
NOTED = """import signal, sys, time
def told(number, frame):
    open({note!r}, "a").write("told ")
    sys.exit(0)
signal.signal(signal.SIGTERM, told)
while True: time.sleep(0.05)
"""


def hook(code: str) -> list[list[str]]:
    return [[sys.executable, "-c", code]]


def test_it_runs_while_the_service_lives_with_its_secrets_and_then_comes_the_stop(
    box: Box, tmp_path: Path
) -> None:
    note, key = tmp_path / "note", tmp_path / "key"
    key.write_text(SECRET)
    pid = f"json.load(open({str(box.root / 'run/svc.json')!r}))['pid']"
    code = (
        f"import json, os\nos.kill({pid}, 0)\n"
        f"good = os.environ['KEY'][:6] == {SECRET[:6]!r}\n"
        f"open({str(note)!r}, 'a').write(f'saved {{good}} ')"
    )
    box.spec(NOTED.format(note=str(note)), before_stop=hook(code), secret_env={"KEY": str(key)})
    launcher = box.up()
    assert box.end(launcher) == 0
    assert note.read_text() == "saved True told "
    assert box.record()["clean_stop"] is True
    assert SECRET not in box.log.read_text()


@pytest.mark.parametrize("code", ["raise SystemExit(3)", "import time; time.sleep(60)"])
def test_one_that_fails_or_hangs_keeps_nothing_from_stopping(
    code: str, box: Box, tmp_path: Path
) -> None:
    note = tmp_path / "note"
    box.spec(NOTED.format(note=str(note)), before_stop=hook(code), stop_timeout_s=4)
    launcher = box.up()
    began = time.monotonic()
    assert box.end(launcher) == 0
    assert time.monotonic() - began < 4
    assert note.read_text() == "told "
    assert "failed (exit" in box.log.read_text() or "took too long" in box.log.read_text()


def test_a_service_that_ends_meanwhile_is_not_waited_for(box: Box) -> None:
    pid = f"json.load(open({str(box.root / 'run/svc.json')!r}))['pid']"
    code = f"import json, os, time\nos.kill({pid}, 9)\ntime.sleep(60)"
    launcher = box.spec(before_stop=hook(code), stop_timeout_s=40).up()
    began = time.monotonic()
    box.end(launcher)
    assert time.monotonic() - began < 8


def test_none_is_run_for_a_service_that_ended_by_itself(box: Box, tmp_path: Path) -> None:
    note = tmp_path / "note"
    box.spec("raise SystemExit(1)", before_stop=hook(f"open({str(note)!r}, 'w')"))
    launcher = box.start()
    until(lambda: launcher.poll() is not None)
    assert not note.exists() and launcher.returncode == 1


def test_a_hook_ends_with_a_killed_launch(box: Box, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    code = f"import os, time\nopen({str(note)!r}, 'w').write(str(os.getpid()))\ntime.sleep(60)"
    launcher = box.spec(before_stop=hook(code), stop_timeout_s=60).up()
    launcher.send_signal(signal.SIGTERM)
    until(lambda: note.exists() and note.read_text())
    launcher.kill()
    launcher.wait()
    until(lambda: not lives(int(note.read_text())))
