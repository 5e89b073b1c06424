"""Programs of somebody else's: what they may print, how long they may take, what they leave."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from kvhost.onhost import bounded, engine_pip, ollama_look, ollama_model, report_parts

TAIL = 1 << 16


def alive(pid: int) -> bool:
    """Whether it goes on; one that was killed is given a moment to end."""
    until = time.monotonic() + 3
    while (there := runs(pid)) and time.monotonic() < until:
        time.sleep(0.05)
    return there


def runs(pid: int) -> bool:
    """A zombie, whose parent has not asked for it yet, does not."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def shell(text: str) -> list[str]:
    return ["sh", "-c", text]


def test_what_it_says_and_how_it_ends(tmp_path: Path) -> None:
    done = bounded.run(
        shell('echo "$A"; pwd; cat; echo err >&2; exit 3'), 10, env={"A": "b"}, cwd=tmp_path
    )
    assert (done.code, done.out, done.err) == (3, f"b\n{tmp_path}\n", "err\n")
    both = bounded.run(shell("echo a; echo b >&2"), 10, stderr=subprocess.STDOUT)
    assert (both.out, both.err) == ("a\nb\n", "")
    assert bounded.run(shell("printf '\\377'"), 10).out == "\ufffd"
    with pytest.raises(OSError, match="no such program"):
        bounded.run(["/no such program"], 10)


@pytest.mark.parametrize("where", ["", " >&2"])
def test_one_that_prints_for_ever_is_ended(where: str) -> None:
    with pytest.raises(bounded.TooMuch, match="prints more than 1 MiB"):
        bounded.run(shell(f"yes{where}"), 60, 1 << 20)


def test_of_one_that_shows_its_progress_the_end_is_kept() -> None:
    done = bounded.run(shell("head -c 30000000 /dev/zero; echo the end"), 60, TAIL, tail=True)
    assert len(done.out) == TAIL and done.out.endswith("\0the end\n")
    with pytest.raises(bounded.TooMuch, match=r"not ended within 0\.3 s"):
        bounded.run(["yes"], 0.3, TAIL, tail=True)


#: each starts a program that writes its PID, the last three in a process group of its own
STARTS = ["sh -c '{}' & wait", "timeout 70 sh -c '{}'", "set -m; sh -c '{}' & wait"]
STARTS += ["set -m; timeout 70 timeout 69 sh -c '{}' & wait"]


@pytest.mark.parametrize("text", ["exec sleep 77", "exec >&- 2>&-; sleep 77", *STARTS])
def test_one_that_does_not_end_is_ended_with_all_it_started(text: str, tmp_path: Path) -> None:
    begun = time.monotonic()
    with pytest.raises(bounded.TooMuch, match=r"not ended within 0\.4 s"):
        bounded.run(shell(text.format("echo $$ >pid; exec sleep 77")), 0.4, cwd=tmp_path)
    assert time.monotonic() - begun < 10
    if text in STARTS:
        assert not alive(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize("start", ["", "timeout 70 "])
def test_a_child_that_holds_its_output_is_not_waited_for(start: str, tmp_path: Path) -> None:
    begun = time.monotonic()
    text = f"{start}sh -c 'echo $$ >pid; exec sleep 77' & echo found; exit 3"
    done = bounded.run(shell(text), 60, cwd=tmp_path)
    assert (done.code, done.out) == (3, "found\n")
    assert time.monotonic() - begun < 10
    assert not alive(int((tmp_path / "pid").read_text()))


def test_a_daemon_has_a_session_of_its_own(tmp_path: Path) -> None:
    bounded.run(shell("setsid sh -c 'echo $$ >pid; exec sleep 77' & sleep 0.5"), 60, cwd=tmp_path)
    pid = int((tmp_path / "pid").read_text())
    assert runs(pid)
    os.kill(pid, signal.SIGKILL)


def test_what_may_not_be_signalled_is_named_beside_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As with sudo, which is root's: it is stood in for by a kill that is refused."""
    started: list[int] = []

    def refused(pid: int, number: int) -> None:
        started.append(pid)
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "kill", refused)
    monkeypatch.setattr(bounded, "END_S", 0.1)
    try:
        with pytest.raises(bounded.TooMuch, match=r"within 0\.2 s, and .* PID \d+ runs on"):
            bounded.run(["sleep", "77"], 0.2)
        with tempfile.TemporaryFile() as output:
            with pytest.raises(bounded.TooMuch, match=r"within 0\.2 s"):
                bounded.run_into(output, shell(f"echo $$ >{tmp_path}/pid; exec sleep 77"), 0.2)
            started.append(int((tmp_path / "pid").read_text()))
            with pytest.raises(bounded.TooMuch, match=r"more than 1 MiB, and .* PID \d+ runs on"):
                bounded.run_into(output, ["yes"], 60, 1 << 20)
    finally:
        monkeypatch.undo()
        for pid in set(started):
            os.kill(pid, signal.SIGKILL)


def test_a_restart_command_may_leave_a_server_behind(tmp_path: Path) -> None:
    with tempfile.TemporaryFile() as output:
        words = shell(f"sleep 77 & echo $! >{tmp_path}/pid; seq 5000; exit 4")
        assert bounded.run_into(output, words, 10) == 4
        assert bounded.last_of(output, 10) == "4999\n5000\n"
        assert bounded.last_of(output, 7) == "5000\n"
        assert bounded.last_of(output, 3) == "00\n"
        pid = int((tmp_path / "pid").read_text())
        assert runs(pid)
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("start", ["{}", *STARTS])
def test_a_restart_command_neither_fills_the_disk_nor_is_waited_for(
    start: str, tmp_path: Path
) -> None:
    with tempfile.TemporaryFile() as output:
        words = shell(start.format(f"echo $$ >{tmp_path}/pid; exec yes"))
        with pytest.raises(bounded.TooMuch, match=r"prints more than 1 MiB$"):
            bounded.run_into(output, words, 60, 1 << 20)
        assert not alive(int((tmp_path / "pid").read_text()))
        with pytest.raises(bounded.TooMuch, match="not ended within"):
            bounded.run_into(output, ["sleep", "77"], 0.2)


# where it is used


def test_the_report_is_not_held_up_by_a_python_of_the_users(
    tmp_path: Path,
) -> None:
    with pytest.raises(OSError, match="prints more than"):
        report_parts.run(["yes"])
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec yes\n")
    python.chmod(0o755)
    with pytest.raises(OSError, match="prints more than"):
        engine_pip.read_settings(str(python))
    python.write_text('#!/bin/sh\necho "https://ada:s3same@h$(printf %01990d 0)" >&2; exit 1\n')
    with pytest.raises(ValueError, match="config list: ") as failed:
        engine_pip.read_settings(str(python))
    assert "3same" not in str(failed.value)


def test_ollama_that_makes_a_model_may_show_much(tmp_path: Path) -> None:
    program = tmp_path / "ollama"
    program.write_text("#!/bin/sh\nhead -c 9000000 /dev/zero >&2\necho 'no room' >&2\nexit 1\n")
    program.chmod(0o755)
    args = argparse.Namespace(url="http://127.0.0.1:1", gguf="/m.gguf", program=str(program))
    with pytest.raises(ollama_model.Failed, match=r"no room$"):
        ollama_model.create(args, "m:1")


def test_a_log_without_an_end_of_a_line_is_read_in_parts(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("one\n" + "x" * (2 * ollama_look.LONGEST + 5) + "\nlast")
    found = list(ollama_look.lines_of(None, str(log)))
    assert max(map(len, found)) == ollama_look.LONGEST
    assert "".join(found) == log.read_text()


def test_it_runs_without_the_package(tmp_path: Path) -> None:
    """As on a host, beside the scripts that import it."""
    for name in ("bounded", "llama_check"):
        text = Path(str(bounded.__file__)).with_name(f"{name}.py").read_text()
        (tmp_path / f"{name}.py").write_text(text)
    argv = [sys.executable, "-Es", str(tmp_path / "llama_check.py"), "--program", "/nowhere"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    assert "/nowhere is not there" in done.stdout, done.stderr
