"""`kvhost drift` of a host with a claimed drive: a loop device, an engine's double."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvhost.onhost import drive_mount
from tests.fleet_tools import Fleet
from tests.lab.loop import MIB, Loops

pytestmark = [
    pytest.mark.drives,
    pytest.mark.fleet,
    pytest.mark.skipif(os.geteuid() != 0, reason="loop devices and mounts need root"),
]
TOP = Path(os.environ.get("KVHOST_FLEET_BASE", "/var/lib/kvhost-fleet")) / "drift-drive"
FSTAB = Path("/etc/fstab")


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    shutil.rmtree(TOP, ignore_errors=True)
    made, fstab = Fleet(tmp_path), FSTAB.read_bytes()
    with Loops(TOP / "images") as loops:
        loop = loops.make("drive", 256 * MIB, partitions=True)
        made.add_here(
            "a", TOP, drive_serial=str(loop.image), drive_transport="loop",
            drive_filesystem="ext4",
        )  # fmt: skip
        mount = made.bases["a"] / "drive"
        try:
            yield made
        finally:
            made.stop()
            subprocess.run(["umount", "-R", mount], capture_output=True, check=False)
            with contextlib.suppress(OSError):
                drive_mount.change_immutable(str(mount), False)
            FSTAB.write_bytes(fstab)
            made.remove()
    shutil.rmtree(TOP, ignore_errors=True)


def rows(fleet: Fleet) -> tuple[int, set[tuple[str, str]]]:
    process = fleet.start("drift", "--json", stderr_apart=True)
    out, said = process.communicate(timeout=120)
    told = json.loads(out)["a"]
    assert told["status"] != "unreadable", (told, said)
    return process.returncode, {(row["part"], row["what"]) for row in told["rows"]}


def test_a_claimed_drive_that_is_not_as_it_was_claimed_is_drift(fleet: Fleet) -> None:
    ran = fleet.run("up")
    assert ran.code == 0, ran.text[-4000:]
    assert rows(fleet) == (0, set())
    fstab = FSTAB.read_text()
    FSTAB.write_text("".join(row for row in fstab.splitlines(True) if "x-kvhost" not in row))
    code, without_line = rows(fleet)
    assert code == 2
    assert {part for part, _ in without_line} == {"drive"}, without_line
    FSTAB.write_text(fstab)
    assert rows(fleet) == (0, set())
    fleet.stop()
    subprocess.run(["umount", fleet.bases["a"] / "drive"], check=True)
    code, away = rows(fleet)
    assert code == 2
    assert {"drive", "service"} <= {part for part, _ in away}, away
