"""Stale shared memory goes, and only that: not what is used, foreign, or of another name."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "kvhost/onhost/shm_sweep.py"
SHM = Path("/dev/shm")


@pytest.fixture
def prefix() -> Iterator[str]:
    name = f"kvtest-{uuid.uuid4().hex[:8]}-"
    yield name
    for path in SHM.glob(f"{name}*"):
        path.unlink()


def sweep(*patterns: str) -> str:
    done = subprocess.run(
        [sys.executable, SCRIPT, *patterns], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_nobody_uses_goes_and_another_name_stays(prefix: str) -> None:
    for name in ("psm_a", "psm_b", "other"):
        (SHM / f"{prefix}{name}").write_bytes(b"x")
    said = sweep(f"{prefix}psm_*")
    assert sorted(p.name for p in SHM.glob(f"{prefix}*")) == [f"{prefix}other"]
    assert said.count("removed") == 2


def test_what_is_mapped_stays_also_when_its_file_was_closed(prefix: str) -> None:
    path = SHM / f"{prefix}psm_mapped"
    path.write_bytes(b"x" * 4096)
    with path.open("r+b") as handle:
        view = mmap.mmap(handle.fileno(), 4096)
    sweep(f"{prefix}*")
    assert path.exists()
    view.close()
    sweep(f"{prefix}*")
    assert not path.exists()


def test_what_is_open_stays(prefix: str) -> None:
    path = SHM / f"{prefix}psm_open"
    with path.open("wb"):
        sweep(f"{prefix}*")
        assert path.exists()


def test_a_link_and_anothers_file_stay(prefix: str, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"x")
    (SHM / f"{prefix}psm_link").symlink_to(target)
    foreign = SHM / f"{prefix}psm_foreign"
    foreign.write_bytes(b"x")
    if os.geteuid() == 0:
        os.chown(foreign, 65534, 65534)
    sweep(f"{prefix}*")
    assert target.exists()
    assert (SHM / f"{prefix}psm_link").is_symlink()
    assert foreign.exists() == (os.geteuid() == 0)
