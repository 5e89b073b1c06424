"""Stale shared memory goes, and only that: not what is used, foreign, or of another name.

Run as nobody where the tests are root's: the sweep is a service user's, and it removes nothing at
all when it cannot look at one of its user's processes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "kvhost/onhost/shm_sweep.py"
SHM = Path("/dev/shm")
NOBODY = 65534
USER = NOBODY if os.geteuid() == 0 else os.geteuid()

HOLD = """
import mmap, sys
handle = open(sys.argv[1], "r+b")
view = mmap.mmap(handle.fileno(), 4096) if sys.argv[2] == "map" else None
if view:
    handle.close()
print("held", flush=True)
sys.stdin.read()
"""


def as_user(*argv: str) -> list[str]:
    ids = [f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    return ["setpriv", *ids, *argv] if os.geteuid() == 0 else list(argv)


@dataclass
class Shm:
    """Files in /dev/shm that begin with a prefix of their own, and the sweep over them."""

    prefix: str
    script: Path

    def make(self, name: str, uid: int = USER) -> Path:
        path = SHM / f"{self.prefix}{name}"
        path.write_bytes(b"x" * 4096)
        os.chown(path, uid, -1)
        path.chmod(0o600)
        return path

    def sweep(self, pattern: str = "*") -> str:
        argv = as_user("/usr/bin/python3", str(self.script), self.prefix + pattern)
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture
def shm() -> Iterator[Shm]:
    folder = Path(tempfile.mkdtemp())  # tmp_path is closed to other users
    folder.chmod(0o755)
    script = shutil.copy(SCRIPT, folder)
    here = Shm(f"kvtest-{uuid.uuid4().hex[:8]}-", Path(script))
    yield here
    for path in SHM.glob(f"{here.prefix}*"):
        path.unlink()
    shutil.rmtree(folder)


def test_what_nobody_uses_goes_and_another_name_stays(shm: Shm) -> None:
    for name in ("psm_a", "psm_b", "other"):
        shm.make(name)
    said = shm.sweep("psm_*")
    assert [p.name for p in SHM.glob(f"{shm.prefix}*")] == [f"{shm.prefix}other"]
    assert said.count("removed") == 2


@pytest.mark.parametrize("how", ["map", "open"])
def test_what_is_mapped_or_open_stays_until_it_is_not(shm: Shm, how: str) -> None:
    path = shm.make("psm_held")
    holder = subprocess.Popen(
        as_user("/usr/bin/python3", "-c", HOLD, str(path), how),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdin and holder.stdout
    assert holder.stdout.readline() == b"held\n"
    shm.sweep()
    assert path.exists()
    holder.stdin.close()
    holder.wait(10)
    shm.sweep()
    assert not path.exists()


def test_a_link_stays_and_its_target(shm: Shm, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"x")
    link = SHM / f"{shm.prefix}psm_link"
    link.symlink_to(target)
    os.chown(link, USER, -1, follow_symlinks=False)
    shm.sweep()
    assert link.is_symlink()
    assert target.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="making another user's file needs root")
def test_another_users_file_stays(shm: Shm) -> None:
    path = shm.make("psm_foreign", uid=0)
    assert shm.sweep() == ""
    assert path.exists()
