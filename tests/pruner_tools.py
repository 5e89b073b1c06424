"""What the tests of the pruner share: tiers, files in them, mounts, runs of the script."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvhost.onhost import pruner, pruner_tier

KIB, MIB = 1 << 10, 1 << 20
HOUR = 3600.0
SCRIPT = str(Path(pruner.__file__))
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="mounts and other users need root")


def make_tier(path: Path) -> Path:
    path.mkdir(exist_ok=True)
    (path / pruner_tier.MARKER).touch()
    return path


def put(tier: Path, ns: str, name: str, size: int = 64 * KIB, age_s: float = HOUR) -> Path:
    """A file of ``size`` bytes, last written and read ``age_s`` seconds ago."""
    path = tier / ns / (name if "." in name else f"m@0x01000100@0@{name}.data")
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(os.urandom(size))
    when = time.time_ns() - int(age_s * 1e9)
    os.utime(path, ns=(when, when))
    return path


def cli(*argv: str | float | Path, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, SCRIPT, *map(str, argv)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **kwargs)


def once(tier: Path, limit: int, *extra: str, rc: int = 0) -> Any:
    done = cli("once", "--tier", tier, "--limit-bytes", limit, "--json", *extra)
    assert done.returncode == rc, done.stderr
    return json.loads(done.stdout)


def sweep(tier: Path, *extra: str | Path) -> Any:
    done = cli("sweep", "--tier", tier, "--json", *extra)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def usage(tier: Path) -> int:
    total = 0
    for path in tier.glob("ns-*/*"):
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_blocks * 512
    return total


def snapshot(where: Path) -> dict[str, object]:
    """Every name below a directory with its inode, times and content, links not followed."""
    found: dict[str, object] = {}
    for path in sorted(where.rglob("*")):
        st = path.lstat()
        content = path.read_bytes() if path.is_file() and not path.is_symlink() else None
        found[str(path)] = (st.st_ino, st.st_mtime_ns, st.st_ctime_ns, content)
    return found


@contextlib.contextmanager
def mounted(where: Path, *options: str) -> Iterator[Path]:
    where.mkdir(exist_ok=True)
    subprocess.run(["mount", *options, str(where)], check=True)
    try:
        yield where
    finally:
        subprocess.run(["umount", "-l", str(where)], check=True)


@contextlib.contextmanager
def running(tier: Path, limit: int, *extra: str | float | Path) -> Iterator[subprocess.Popen[str]]:
    argv = ["run", "--tier", tier, "--limit-bytes", limit, *extra]
    process = subprocess.Popen(
        [sys.executable, SCRIPT, *map(str, argv)], stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def until(true: Callable[[], bool], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.02)
