"""The report of a host: the real script on this machine."""

from __future__ import annotations

import ast
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvhost.onhost import report as machine
from kvhost.onhost import report_held as held
from kvhost.report import ReportError, parse_report
from tests.report_tools import CANARY, PYTHON, SCRIPTS, as_root, ok, open_dir, put, real, run_script

__all__ = ["open_dir"]  # fixtures


def test_tells_of_this_machine_what_other_sources_tell(open_dir: Path) -> None:
    base = open_dir / "base"
    got = real(base, "--packages", "dpkg,no-such-package-1")
    release = platform.freedesktop_os_release()
    assert ok(got.os).id == release["ID"]
    assert ok(got.os).version_id == release.get("VERSION_ID")
    assert ok(got.arch).machine == os.uname().machine
    assert ok(got.pid1).comm == Path("/proc/1/comm").read_text().strip()
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert abs(ok(got.memory).total - total) < total / 20
    assert 0 < ok(got.memory).available <= ok(got.memory).total
    assert ok(got.cpus).count == len(os.sched_getaffinity(0))
    assert ok(got.shm).size == shutil.disk_usage("/dev/shm").total
    disk = ok(got.disk(str(base)))
    usage = shutil.disk_usage(open_dir)
    assert (disk.total, disk.exists, disk.ancestor) == (usage.total, False, str(open_dir))
    assert abs(disk.avail - usage.free) < 1 << 30
    findmnt = ["findmnt", "-no", "TARGET,FSTYPE", "-T", str(open_dir)]
    where = subprocess.run(findmnt, capture_output=True, text=True, check=True).stdout.split()
    assert [disk.mount_point, disk.fs] == where
    assert ok(got.users).uid == os.geteuid()
    assert ok(got.users).service_user is None
    assert ok(got.gpu).nvidia.smi is None or shutil.which("nvidia-smi")
    if shutil.which("dpkg-query"):
        assert ok(got.packages) == {"dpkg": "installed", "no-such-package-1": "absent"}
    assert abs(got.time_unix - time.time()) < 60


def test_prints_one_line_and_no_environment(open_dir: Path) -> None:
    text = run_script(open_dir / "base", env={**os.environ, "HF_TOKEN": CANARY})
    assert text.count("\n") == 1
    assert CANARY not in text


@pytest.mark.parametrize("family, address", [(2, "127.0.0.1"), (10, "::1"), (2, "0.0.0.0")])
def test_sees_who_listens(open_dir: Path, family: int, address: str) -> None:
    with socket.socket(family, socket.SOCK_STREAM) as server:
        try:
            server.bind((address, 0))
        except OSError as why:
            pytest.skip(f"no {address} here: {why}")
        port = server.getsockname()[1]
        before = ok(real(open_dir / "base").ports).listening
        assert not [row for row in before if row.port == port]  # bound is not listening
        server.listen()
        rows = [r for r in ok(real(open_dir / "base").ports).listening if r.port == port]
    assert [(r.address, r.pid, r.uid) for r in rows] == [(address, os.getpid(), os.geteuid())]
    assert rows[0].comm == Path("/proc/self/comm").read_text().strip()


def test_finds_the_python_it_is_asked_for(open_dir: Path) -> None:
    here = os.path.realpath(sys.executable)
    rows = ok(real(open_dir / "base", "--python", here).pythons)
    mine = next(row for row in rows if row.path == here)
    assert (mine.version, mine.error) == (platform.python_version(), None)
    none = ok(real(open_dir / "base", "--python", "/no/python3.11").pythons)
    assert none[0].path == "/no/python3.11"
    assert "FileNotFoundError" in none[0].error
    assert not none[0].usable_by_service


@as_root
@pytest.mark.parametrize("mode, usable", [(0o700, False), (0o711, True)])
def test_a_python_behind_a_closed_directory_is_not_usable(
    open_dir: Path, mode: int, usable: bool
) -> None:
    closed = open_dir / "closed"
    closed.mkdir()
    python = closed / "python3.11"
    python.symlink_to(PYTHON)
    closed.chmod(mode)
    row = ok(real(open_dir / "base", "--python", str(python)).pythons)[0]
    assert row.path == str(python)
    assert row.error is None
    assert (row.usable_by_service, row.blocked_by) == (usable, None if usable else str(closed))


@as_root
@pytest.mark.parametrize("mode", [0o700, 0o750])  # root's group is not the user's
def test_a_python_whose_file_is_closed_is_tried_as_the_user(open_dir: Path, mode: int) -> None:
    python = open_dir / "python3.11"
    shutil.copy(PYTHON, python)
    python.chmod(mode)
    row = ok(real(open_dir / "base", "--python", str(python)).pythons)[0]
    assert (row.error, row.usable_by_service, row.blocked_by) == (None, False, None)


@as_root
def test_names_the_directory_that_keeps_the_user_out(open_dir: Path) -> None:
    (open_dir / "data2").mkdir()
    (open_dir / "data2").chmod(0o700)
    (open_dir / "data2/models").mkdir(mode=0o775)
    path = open_dir / "data2/models/one"
    assert ok(real(open_dir / "base", "--path-free", str(path)).disk(str(path))).blocked_by == str(
        open_dir / "data2"
    )
    (open_dir / "data2").chmod(0o711)
    assert ok(real(open_dir / "base", "--path-free", str(path)).disk(str(path))).blocked_by is None


def test_odd_paths_cost_only_their_own_row(open_dir: Path) -> None:
    (open_dir / "loop").symlink_to(open_dir / "loop")
    (open_dir / "dangling").symlink_to(open_dir / "nowhere")
    put(open_dir / "file", "x")
    paths = [str(open_dir / p) for p in ("loop/a", "dangling", "file/below")]
    got = real(open_dir / "base", *(a for p in paths for a in ("--path-free", p)))
    loop, dangling, below = (got.disk(p) for p in paths)
    assert loop.status == "unreadable"
    assert "Too many levels" in (loop.why or "")
    assert dangling.status == "unreadable"
    assert "symlink to nothing" in (dangling.why or "")
    assert (ok(below).directory, ok(below).ancestor) == (False, str(open_dir / "file"))
    assert ok(got.disk(str(open_dir / "base"))).directory
    assert got.disk("/never/asked").status == "unreadable"


def test_tmpfs_is_seen_as_tmpfs(open_dir: Path) -> None:
    assert ok(real(open_dir / "base", "--path-free", "/dev/shm/x").disk("/dev/shm/x")).fs == "tmpfs"


@as_root
def test_an_unprivileged_user_gets_reasons_not_emptiness(open_dir: Path) -> None:
    base = open_dir / "base"
    put(base / "state/receipt.json", "{}")
    put(base / "state/run.lock", "{}")
    put(base / "tier/ns-ab/chunk", "123")
    for name in ("state", "tier/ns-ab"):
        (base / name).chmod(0o700)
    # the kernel does not see pid 1's environment, so its container is not said to be none
    nobody = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
    got = real(base, prefix=nobody)
    assert (ok(got.users).uid, ok(got.users).sudo) == (65534, False)
    kvhost = ok(got.kvhost)
    for part in (kvhost.base, kvhost.receipt, kvhost.run_lock, kvhost.tier):
        assert part.status == "unreadable", part
        assert "PermissionError" in (part.why or "")
    assert kvhost.envs.status == "absent"
    assert ok(got.pid1).container is not None
    assert ok(got.memory).total > 0
    root = real(base)
    assert ok(ok(root.kvhost).receipt) == {}
    assert [n.files for n in ok(ok(root.kvhost).tier).namespaces] == [1]


def test_without_its_second_half_the_first_is_still_told(open_dir: Path) -> None:
    run_script(open_dir / "base")
    (open_dir / "scripts/report_held.py").unlink()
    got = real(open_dir / "base")
    assert ok(got.memory).total > 0
    for name in machine.HELD:
        part = getattr(got, name)
        assert (part.status, "report_held.py exits 2" in part.why) == ("unreadable", True)


def test_a_part_that_hangs_or_fails_costs_only_itself() -> None:
    def fails() -> None:
        raise KeyError("MemTotal")

    parts: dict[str, Callable[[], Any]]
    parts = {"hangs": lambda: time.sleep(5), "fails": fails, "fine": lambda: 1}
    for module in (machine, held):
        got = module.gather(parts, 0.3)
        assert got["hangs"]["why"] == "did not answer within 0.3 s"
        assert got["hangs"]["status"] == got["fails"]["status"] == "unreadable"
        assert got["fails"]["why"] == "KeyError: 'MemTotal'"
        assert got["fine"] == {"status": "ok", "why": None, "data": 1}


def test_a_program_that_hangs_does_not_hold_the_report(open_dir: Path) -> None:
    slow = put(open_dir / "bin/dpkg-query", "#!/bin/sh\nexec sleep 20\n")
    slow.chmod(0o755)
    env = {**os.environ, "PATH": f"{open_dir}/bin:/usr/bin:/bin"}
    began = time.monotonic()
    got = real(open_dir / "base", "--packages", "a", "--timeout-s", "5", env=env)
    assert time.monotonic() - began < 15
    assert got.packages.why == "did not answer within 5 s"
    assert ok(got.users).uid == os.geteuid()


@pytest.mark.parametrize(
    "script", ["report.py", "bounded.py", "forked.py", "report_held.py", "report_gpu.py"]
)
def test_runs_on_python_3_9(script: str) -> None:
    text = (SCRIPTS / script).read_text()
    ast.parse(text, feature_version=(3, 9))
    assert "from __future__ import annotations" in text
    used = {n.names[0].name.split(".")[0] for n in ast.walk(ast.parse(text))
            if isinstance(n, ast.Import)}  # fmt: skip
    assert used <= sys.stdlib_module_names


def test_anything_else_than_a_report_is_quoted(open_dir: Path) -> None:
    with pytest.raises(ReportError, match="printed nothing"):
        parse_report(" \n")
    with pytest.raises(ReportError, match="first line that came is: 'sudo: a password is"):
        parse_report("sudo: a password is required\nmore\n")
    with pytest.raises(ReportError, match=r"JSON but not a report.*'\[1\]'"):
        parse_report("[1]")
    data = json.loads(run_script(open_dir / "base"))
    parse_report(json.dumps(data))
    for change, message in (
        ({"os": {"status": "ok", "why": None, "data": None}}, "os.*a part that is ok with data"),
        ({"os": {"status": "absent", "why": None, "data": None}}, "os.*without a reason"),
        ({"os": {"status": "fine", "why": None, "data": None}}, "os.status"),
        ({"kvhost_report": 2}, "kvhost_report"),
        ({"more": 1}, "more"),
    ):
        with pytest.raises(ReportError, match=message):
            parse_report(json.dumps({**data, **change}))
