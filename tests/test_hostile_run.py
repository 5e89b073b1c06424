"""Runs whose controller has a full disk, a closed terminal, damaged journals and receipts."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvhost import cli
from kvhost.commands import running
from kvhost.records import journal, receipts
from kvhost.reports.kept import check_writable, load_report
from kvhost.working_copy import make

pytestmark = pytest.mark.fleet

REPO = Path(__file__).parents[1]
#: this machine, which a copy does not take by itself
HERE = ("--inventory", "inventory.py")
#: far more than a pipe holds: who is not read any more waits for ever
LOUD = "import sys\nfor i in range(5000): print('line', i, 'x' * 60)\nsys.exit(3)"
RUN = f"""import sys
from pathlib import Path
from kvhost.commands import running
sys.exit(running.run([sys.executable, "-c", {LOUD!r}], Path("/"), Path(sys.argv[1]), "plan"))
"""


def run_with(stdout: Any, logs: Path, *, close: bool = False) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(REPO)}
    argv = [sys.executable, "-c", RUN, str(logs)]
    if close:
        argv = ["/bin/sh", "-c", 'exec "$@" >&-', "sh", *argv]
    return subprocess.run(
        argv, stdout=stdout, stderr=subprocess.PIPE, text=True, env=env, timeout=60, check=False
    )


@pytest.mark.parametrize("how", ["nobody reads", "full", "closed"])
def test_a_stdout_that_takes_nothing(how: str, tmp_path: Path) -> None:
    """`| head`: the run goes to its end, with its exit code and its whole log."""
    if how == "nobody reads":
        reader, writer = os.pipe()
        os.close(reader)
        ended = run_with(writer, tmp_path)
        os.close(writer)
    elif how == "full":
        with Path("/dev/full").open("w") as full:
            ended = run_with(full, tmp_path)
    else:
        ended = run_with(None, tmp_path, close=True)
    assert ended.returncode == 3, ended.stderr
    assert "Traceback" not in ended.stderr
    (log,) = tmp_path.glob("*.log")
    assert len(log.read_text().splitlines()) == 5000


def test_a_log_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is said, and the run goes to its end: one that waited would keep the hosts' locks."""
    full = Path("/dev/full").open("w")  # noqa: SIM115 - the run closes it
    monkeypatch.setattr(running, "open_log", lambda folder, what: (tmp_path / "x.log", full))
    code = running.run([sys.executable, "-c", LOUD], tmp_path, tmp_path, "plan")
    out, err = capfd.readouterr()
    assert (code, len(out.splitlines())) == (3, 5000)
    assert "that log is not whole: [Errno 28]" in err


def test_a_terminal_of_ascii(tmp_path: Path) -> None:
    code = "import sys; sys.stdout.buffer.write('h\\u00f6st\\n'.encode())"
    out = tmp_path / "out"
    with out.open("w", encoding="ascii") as sink:
        assert running.run([sys.executable, "-c", code], tmp_path, tmp_path, "x", stdout=sink) == 0
    assert out.read_text() == "h\\xf6st\n"


def test_a_known_secret_is_on_no_pipe(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """What only looks like one goes on as it is: a program may read it."""
    code = "import sys\nfor out in (sys.stdout, sys.stderr): print('a hunter22 token=b', file=out)"
    argv = [sys.executable, "-c", code]
    assert running.run(argv, tmp_path, tmp_path, "plan", lambda: ["hunter22"]) == 0
    out, err = capfd.readouterr()
    assert out == "a ******** token=b\n"
    assert err.startswith(out)
    (log,) = tmp_path.glob("*.log")
    assert log.read_text() == 2 * "a ******** token=********\n"


def test_a_journal_on_a_full_disk(capsys: pytest.CaptureFixture[str]) -> None:
    """What is done to the hosts goes on; a host that is not told done does not count as done."""
    journal.tell("done", "/dev/full", host="a", changed=1)
    assert "the journal of this run lacks a line" in capsys.readouterr().err


DAMAGED = ['{"event": "run"}', '{"event": "run", "command": 5, "time": 1, "pid": 1}', "[" * 9000]
DAMAGED += [
    '{"event": "hosts", "names": 5}',
    '{"event": "hosts", "names": [[]], "unreachable": []}',
]
DAMAGED += ['{"host": ["a"], "event": "done"}', '{"host": "b", "event": "refused"}', "5", "\udcff"]
DAMAGED += ['{"event": "run", "time": "1", "pid": "..", "start_ticks": null, "command": [1]}']


def test_damaged_journals_do_not_stop_the_next_run(tmp_path: Path) -> None:
    from kvhost.commands.up import tell_of_the_last

    good = '{"event": "done", "host": "a", "changed": 0}'
    for number, text in enumerate([*DAMAGED, "\n".join(DAMAGED)]):
        path = tmp_path / f"{number}.jsonl"
        path.write_bytes(f"{text}\n{good}\n{good[:20]}".encode("utf-8", "surrogateescape"))
        told = journal.read_journal(path)
        assert told.rows["a"].result == "unchanged"
        assert not told.alive
        tell_of_the_last(tmp_path)
    (tmp_path / "9.jsonl").unlink()
    (tmp_path / "9.jsonl").mkdir()
    tell_of_the_last(tmp_path)


RECEIPTS: list[Any] = [None, [], 5, {}, {"schema": receipts.SCHEMA}]
RECEIPTS += [{"schema": receipts.SCHEMA, "host": "a", "receipt": 5}]
RECEIPTS += [{"schema": receipts.SCHEMA, "host": "a", "receipt": {"system": None}}]
RECEIPTS += [{"schema": receipts.SCHEMA, "host": "b", "receipt": {}}]  # another host's


def test_damaged_receipts(tmp_path: Path) -> None:
    path = receipts.path_of(tmp_path, "a")
    for data in RECEIPTS:
        path.write_text(json.dumps(data))
        with pytest.raises(receipts.NoReceipt):
            receipts.load(tmp_path, "a")
    for text in ("", '{"schema": "kv', "[" * 100_000, "\0"):
        path.write_text(text)
        with pytest.raises(receipts.NoReceipt, match="cannot be read"):
            receipts.load(tmp_path, "a")
    for odd in (Path.mkdir, os.mkfifo):
        path.unlink(missing_ok=True)
        odd(path)
        with pytest.raises(receipts.NoReceipt, match="cannot be read"):
            receipts.load(tmp_path, "a")
        if path.is_dir():
            path.rmdir()


def test_a_report_that_is_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.json")
    with pytest.raises(OSError, match="not a regular file"):
        load_report(tmp_path / "x.json")
    os.mkfifo(tmp_path / "x.jsonl")
    with pytest.raises(OSError, match="not a regular file"):
        journal.read_journal(tmp_path / "x.jsonl")


def test_a_receipt_that_cannot_be_set_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`kvhost rebuild` ends before it touches the host."""
    make(tmp_path)
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "receipts"
    receipts.keep(folder, "a", {"engine": {}}, None)
    monkeypatch.setattr(Path, "hardlink_to", lambda *_: os.mkdir("/proc/none"))  # noqa: PTH102
    result = CliRunner().invoke(cli.main, ["rebuild", *HERE, "a"])
    assert (result.exit_code, type(result.exception)) == (1, SystemExit)
    assert "cannot be set aside, and nothing was done" in result.output


def test_a_full_disk_takes_no_reports(tmp_path: Path) -> None:
    """It takes an empty file: asked is for the room of a report, before a server is restarted."""
    if os.geteuid() != 0:
        pytest.skip("mounts need root")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(tmp_path)], check=True)
    try:
        with pytest.raises(OSError, match="No space left"):
            check_writable(tmp_path)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_up_in_batches_is_broken_off_while_it_plans(number: int, tmp_path: Path) -> None:
    """Before any host is known: 130, and what is left is all of it."""
    make(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # no sshd: it is waited for
        port = silent.getsockname()[1]
        data = f'{{"ssh_hostname": "127.0.0.1", "ssh_port": {port}}}'
        (tmp_path / "inventory.py").write_text(f'hosts = [("a", {data})]\n')
        words = ["up", "--json", *HERE, "--batch", "1", "--canary", "a"]
        process = subprocess.Popen(
            [sys.executable, "-m", "kvhost.cli", *words], cwd=tmp_path, text=True,
            env={**os.environ, "PYTHONPATH": str(REPO)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        try:
            silent.settimeout(60)
            with silent.accept()[0]:
                process.send_signal(number)
                out, said = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130, said
    told = json.loads(out)
    assert (told["exit"], told["hosts"]) == (130, [])
    assert told["retry"].endswith("up --inventory inventory.py --batch 1 --canary a")
    assert f"\n  {told['retry']}\n" in said
    assert "Traceback" not in said


def test_ctrl_c_that_comes_too_late_for_pyinfra_is_heard(tmp_path: Path) -> None:
    """It ended well, and a command that would begin another run of it does not."""
    deaf = "import os, signal; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    deaf += "os.kill(os.getppid(), signal.SIGINT); import time; time.sleep(0.5)"
    assert running.run([sys.executable, "-c", deaf], tmp_path, tmp_path, "x") == 130


@pytest.mark.parametrize("seen", ["", "Loading inventory", "Preparing operation files"])
def test_ctrl_c(seen: str, tmp_path: Path) -> None:
    """As pyinfra starts, and as it works: 130, where pyinfra's own would be a traceback, or 0."""
    make(tmp_path)
    env = {**os.environ, "PYTHONPATH": str(REPO)}
    argv = [sys.executable, "-m", "kvhost.cli", "plan", *HERE]
    process = subprocess.Popen(
        argv, cwd=tmp_path, env=env, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        end = time.monotonic() + 60
        while not any(seen in log.read_text() for log in (tmp_path / "logs").glob("*.log")):
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGINT)
        said, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, said
    assert "interrupted: " in said
    assert "Traceback" not in said


def test_an_answer_that_is_not_whole_is_no_success(tmp_path: Path) -> None:
    """`kvhost plan --json > FILE` on a full disk."""
    argv = [sys.executable, "-c", "print('{}')"]
    with Path("/dev/full").open("wb", buffering=0) as full:
        stdout = io.TextIOWrapper(full, write_through=True)
        assert running.run(argv, tmp_path, tmp_path, "plan", stdout=stdout) == 1
        stdout.detach()


@pytest.mark.parametrize("command", ["plan", "matrix"])
def test_a_locale_without_utf_8(command: str, tmp_path: Path) -> None:
    make(tmp_path)
    env = {**os.environ, "PYTHONPATH": str(REPO), "LC_ALL": "POSIX", "COLUMNS": "20"}
    env |= {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    argv = [sys.executable, "-m", "kvhost.cli", command, *(HERE if command == "plan" else ())]
    done = subprocess.run(
        argv, cwd=tmp_path, env=env, capture_output=True, timeout=120, check=False
    )
    said = (done.stdout + done.stderr).decode("ascii")
    assert "Traceback" not in said
    assert "UnicodeEncodeError" not in said and "UnicodeDecodeError" not in said


def test_a_closed_stdout_has_no_json(tmp_path: Path) -> None:
    make(tmp_path)
    words = (
        f'exec "{sys.executable}" -m kvhost.cli up --json --inventory inventory.py --limit x >&-'
    )
    env = {**os.environ, "PYTHONPATH": str(REPO)}
    done = subprocess.run(
        ["/bin/sh", "-c", words], cwd=tmp_path, env=env, timeout=60, check=False,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == "Error: --json needs a stdout, and it is closed\n"


def test_a_place_that_cannot_be_written_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".kvhost/candidate.yaml.new").mkdir()
    result = CliRunner().invoke(cli.main, ["inventory", "add", "--no-look", "root@192.0.2.1"])
    assert (result.exit_code, type(result.exception)) == (1, SystemExit)
    assert result.output.startswith("Error: [Errno 21] Is a directory")
    assert result.output.count("\n") == 1
