"""What the tests of the report share."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvhost.onhost import report as machine
from kvhost.onhost import report_held as held
from kvhost.report import HostReport, parse_report

SCRIPTS = Path(machine.__file__).parent
CANARY = "canary4f2a9c"
# One that every user can run: the tests' own may be in a closed home directory.
PYTHON = next(
    (p for p in ("/usr/bin/python3", "/usr/local/bin/python3") if Path(p).exists()),
    os.path.realpath(sys.executable),
)
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")


@pytest.fixture
def open_dir() -> Iterator[Path]:
    """A directory that every user may enter (pytest's own are closed to others)."""
    path = Path(tempfile.mkdtemp(prefix="report-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def run_script(base: Path, *more: str, prefix: tuple[str, ...] = (), env: Any = None) -> str:
    script = base.parent / "scripts"
    if not script.exists():
        script.mkdir(mode=0o755)
        for name in ("report.py", "bounded.py", "forked.py", "report_held.py", "report_gpu.py"):
            shutil.copy(SCRIPTS / name, script / name)
    argv = [*prefix, PYTHON, str(script / "report.py")]
    argv += ["--base-dir", str(base), "--tier-dir", str(base / "tier")]
    argv += ["--service-user", "kvhost-no-such-user", *more]
    env = env or {**os.environ, "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
    got = subprocess.run(argv, capture_output=True, text=True, env=env, check=False, timeout=60)
    assert got.returncode == 0, got.stderr
    assert got.stderr == ""
    return got.stdout


def real(base: Path, *more: str, **how: Any) -> HostReport:
    return parse_report(run_script(base, *more, **how))


def ok(part: Any) -> Any:
    assert part.status == "ok", part
    return part.data


def put(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty / for the scripts."""
    for module in (machine, held):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    caches = (machine.mounts, held.processes)
    for cached in caches:
        cached.cache_clear()
    yield tmp_path
    for cached in caches:
        cached.cache_clear()


MOUNT = "36 35 {dev} / {at} {options} shared:1 - {fs} {source} {super}\n"


def mount(at: str, fs: str = "ext4", **more: str) -> str:
    row = {"dev": "8:1", "options": "rw,relatime", "source": "none", "super": "rw", **more}
    return MOUNT.format(at=at, fs=fs, **row)
