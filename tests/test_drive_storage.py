"""storage.py, release.py and grow.py through pyinfra, on loop devices of this machine."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvhost.onhost import drive_mount
from tests.drive_runs import here, run
from tests.drive_tools import ONHOST
from tests.lab.loop import MIB, Loop, Loops, digest

pytestmark = [
    pytest.mark.drives,
    pytest.mark.skipif(os.geteuid() != 0, reason="loop devices and mounts need root"),
]
TOP = Path("/var/lib/kvhost-drives")
DRIVE = "storage: the drive"


def clear() -> None:
    """Also what a run that was killed has left: mounted, or immutable."""
    for mount in (TOP / "a/drive", TOP / "b/drive"):
        subprocess.run(["umount", mount], capture_output=True, check=False)
        with contextlib.suppress(OSError):
            drive_mount.change_immutable(str(mount), False)
    shutil.rmtree(TOP, ignore_errors=True)


@pytest.fixture
def loops() -> Iterator[Loops]:
    clear()
    fstab = Path("/etc/fstab").read_bytes()
    with Loops(TOP / "images") as made:
        try:
            yield made
        finally:
            for mount in (TOP / "a/drive", TOP / "b/drive"):
                subprocess.run(["umount", mount], capture_output=True, check=False)
            Path("/etc/fstab").write_bytes(fstab)
    clear()


def settings(name: str, loop: Loop, **more: Any) -> dict[str, Any]:
    return here(
        {
            "base_dir": str(TOP / name),
            "drive_serial": str(loop.image),
            "drive_transport": "loop",
            "drive_filesystem": "ext4",
            "cache_limit_gib": 0.01,
            "free_floor_gib": 0.001,
            **more,
        }
    )


def spoil_scripts(where: Path) -> None:
    (where / "drive_sys.py").write_text("noise")
    (where / "drive_fs.py").chmod(0o777)
    os.chown(where / "drive_gpt.py", 65534, 65534)
    (where / "drive_probe.py").unlink()
    (where / "drive_mount.py").rename(where / "elsewhere")
    (where / "drive_mount.py").symlink_to("elsewhere")


def assert_scripts_are_whole(where: Path) -> None:
    spoilt = ("drive_sys.py", "drive_fs.py", "drive_gpt.py", "drive_probe.py", "drive_mount.py")
    for there in [where / name for name in spoilt]:
        st = there.lstat()
        found = (stat.S_ISREG(st.st_mode), oct(stat.S_IMODE(st.st_mode)), st.st_uid, st.st_gid)
        assert found == (True, "0o755", 0, 0), there
        assert there.read_bytes() == (ONHOST / there.name).read_bytes(), there
    assert not (where.parent / "state/scripts.tar").exists()


def test_one_is_formatted_one_refused_and_all_of_it_given_back(
    loops: Loops, tmp_path: Path
) -> None:
    blank = loops.make("blank", 72 * MIB, partitions=True)
    full = loops.make("full", 72 * MIB, partitions=True)
    subprocess.run(["mkfs.ext4", "-q", full.node], check=True)
    before = digest(full)
    hosts = {"a": settings("a", blank), "b": settings("b", full)}
    first = run(tmp_path, "storage.py", hosts)
    assert first.code != 0 and "drive_not_blank" in first.refusals("b"), first.text
    assert first.operations()[DRIVE] == (1, 0, 0), first.text
    assert (TOP / "a/drive/tier").is_dir() and not (TOP / "b").exists()
    assert digest(full) == before

    one = {"a": hosts["a"]}
    second = run(tmp_path, "storage.py", one)
    assert second.code == 0 and second.changed() == [], second.text
    grown = run(tmp_path, "grow.py", one)
    assert grown.code == 0 and grown.changed() == [], grown.text

    (TOP / "a/drive/tier/file").write_text("KV")
    spoil_scripts(TOP / "a/bin")
    back = run(tmp_path, "release.py", one)
    assert back.code == 0 and "host: scripts" in back.changed(), back.text
    assert_scripts_are_whole(TOP / "a/bin")
    assert not (TOP / "a/drive").exists()
    assert "x-kvhost" not in Path("/etc/fstab").read_text()
    token = re.search(r"drive_erase = '(erase-[0-9a-f]{32})'", back.text)
    assert token is not None, back.text
    left = digest(blank)
    wrong = {"a": settings("a", blank, drive_erase="erase-" + "0" * 32)}
    assert run(tmp_path, "release.py", wrong).code != 0
    assert digest(blank) == left
    right = {"a": settings("a", blank, drive_erase=token[1])}
    wiped = run(tmp_path, "release.py", right)
    assert wiped.operations()["storage: the drive wiped"] == (1, 0, 0), wiped.text
    assert digest(blank) != left
    assert run(tmp_path, "release.py", right).changed() == []


def test_data_that_only_reading_finds_is_refused(loops: Loops, tmp_path: Path) -> None:
    """A plan sees no header; the step that writes finds the byte and says where."""
    drive = loops.make("middle", 72 * MIB, partitions=True)
    with drive.node.open("r+b") as handle:
        handle.seek(40 * MIB + 7)
        handle.write(b"\x01")
    before, fstab = digest(drive), Path("/etc/fstab").read_text()
    told = run(tmp_path, "storage.py", {"a": settings("a", drive)})
    assert told.code != 0 and told.refusals("a") == {}, told.text
    assert f"data at byte {40 * MIB + 7}" in told.text and "erase-" in told.text, told.text
    assert digest(drive) == before
    assert Path("/etc/fstab").read_text() == fstab
    assert not (TOP / "a/drive/tier").exists()


def test_without_a_claim_storage_says_so(tmp_path: Path) -> None:
    told = run(tmp_path, "storage.py", {"a": here({"base_dir": str(TOP / "none")})})
    assert told.code != 0 and "no drive is claimed" in told.text, told.text
    assert not (TOP / "none").exists()
    shutil.rmtree(TOP, ignore_errors=True)


@pytest.mark.parametrize("file", ["release.py", "grow.py"])
def test_on_a_host_where_no_run_ever_was_nothing_is_made(tmp_path: Path, file: str) -> None:
    told = run(tmp_path, file, {"a": here({"base_dir": str(TOP / "none")})})
    assert told.code == 0 and told.changed() == [], told.text
    assert not (TOP / "none").exists()
