"""The helper that gives sudo its password: where it lies, and that it can be executed there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.fleet,
    pytest.mark.skipif(os.geteuid() != 0, reason="root: mounts, in a namespace of their own"),
]
REPO = Path(__file__).parents[1]
#: sudo asks by the helper, and takes one password
SUDO = """#!/bin/sh
[ "$1" != -n ] || exit 1
[ "$("$SUDO_ASKPASS")" = right ]
"""
#: $1: the script; the others are directories that are mounted noexec before
_IN_PLACE = """
script=$1; shift
mount -t tmpfs none /mnt && cp "$PWD/sudo" /mnt/sudo
mount -t tmpfs none /dev/shm; mount -t tmpfs none /tmp
for d; do mount -o remount,noexec "$d"; done
PATH=/mnt:$PATH sh -c "$script"; code=$?
echo "left: $(ls /dev/shm /tmp "$XDG_RUNTIME_DIR"/kvhost-askpass-* 2>/dev/null | grep askpass)"
exit $code
"""


@pytest.fixture(scope="module")
def script() -> str:
    asked = "from deploys.common.sudo import TRY_SUDO; print(TRY_SUDO)"
    return subprocess.run(
        [sys.executable, "-c", asked], cwd=REPO, capture_output=True, text=True, check=True
    ).stdout


def tried(script: str, folder: Path, *noexec: str, word: str = "right", run: str = "") -> list[str]:
    program = folder / "sudo"
    program.write_text(SUDO)
    program.chmod(0o755)
    argv = ["unshare", "--mount", "sh", "-c", _IN_PLACE, "sh", script, *noexec]
    helper = f"#!/bin/sh\nprintf '%s\\n' {word}\n" if word else ""
    done = subprocess.run(
        argv, cwd=folder, input=helper, capture_output=True, text=True, check=False, timeout=60,
        env={"PATH": os.environ["PATH"], "XDG_RUNTIME_DIR": run},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout.splitlines()


def test_the_helper_lies_where_it_can_be_executed(script: str, tmp_path: Path) -> None:
    """Docker mounts /dev/shm noexec: a right password was called wrong there."""
    assert tried(script, tmp_path)[0].startswith("/dev/shm/kvhost-askpass-")
    path, left = tried(script, tmp_path, "/dev/shm")
    assert path.startswith("/tmp/kvhost-askpass-")
    assert left == f"left: {Path(path).name}"
    assert tried(script, tmp_path, "/dev/shm", run="/mnt")[0].startswith("/mnt/kvhost-askpass-")


def test_a_wrong_password_is_called_wrong_and_nothing_else_is(script: str, tmp_path: Path) -> None:
    nowhere = ("/dev/shm", "/tmp")
    assert tried(script, tmp_path, "/dev/shm", word="wrong") == ["wrong", "left: "]
    assert tried(script, tmp_path, *nowhere) == ["nowhere", "left: "]
    assert tried(script, tmp_path, *nowhere, run="/nowhere") == ["nowhere", "left: "]
    assert tried(script, tmp_path, word="") == ["asks", "left: "]
