"""Drives given back, wiped, grown and moved, on real loop devices."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvhost.onhost import drive_mount
from tests.drive_tools import SMALL, Filesystem, Host, host_with
from tests.lab.loop import MIB, digest
from tests.test_drive_apply import is_whole

pytestmark = [
    pytest.mark.drives,
    pytest.mark.skipif(os.geteuid() != 0, reason="loop devices and mounts need root"),
]
CAP_SYS_RESOURCE = 24
RELEASE_STEPS = ("unmount", "fstab-line", "mount-point", "forget")
GROW_STEPS = (*(f"grow-{n}" for n in range(1, 5)), "grow-kernel", "grow-filesystem", "grow-marker")


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    with host_with(tmp_path) as made:
        yield made


def as_before(host: Host) -> None:
    assert drive_mount.mounted_at(str(host.mount)) is None
    assert host.fstab.read_text() == "# of this host\n"
    assert not host.mount.exists()
    assert not (host.state / "drive.json").exists()


@pytest.mark.parametrize("step", ["", *RELEASE_STEPS])
def test_released_and_used_again_with_its_data(host: Host, step: str) -> None:
    loop = host.drive()
    assert host.apply(host.order(loop))["exit"] == 0
    (host.mount / "tier" / "file").write_text("KV")
    if step:
        assert host.script("drive_release.py", "release", stop=f"{step}:kill")["exit"] == -9
    told = host.script("drive_release.py", "release")
    assert told["exit"] == 0, told
    as_before(host)
    assert host.script("drive_release.py", "release")["changed"] == []
    again = host.apply(host.order(loop, "mount"))
    assert again["exit"] == 0, again
    assert (host.mount / "tier" / "file").read_text() == "KV"


def test_a_drive_in_use_stays(host: Host) -> None:
    order = host.order(host.drive())
    assert host.apply(order)["exit"] == 0
    with (host.mount / "tier" / "file").open("w"):
        told = host.script("drive_release.py", "release")
    assert (told["exit"], told["code"]) == (3, "drive_busy"), told
    is_whole(host, order)


def test_a_drive_that_is_mounted_elsewhere_too_stays(host: Host, tmp_path: Path) -> None:
    order = host.order(host.drive())
    assert host.apply(order)["exit"] == 0
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    now = drive_mount.mounted_at(str(host.mount))
    assert now is not None
    for source, words in ((now.source, ()), (str(host.mount / "tier"), ("--bind",))):
        subprocess.run(["mount", *words, source, elsewhere], check=True)
        try:
            told = host.script("drive_release.py", "release")
        finally:
            subprocess.run(["umount", elsewhere], check=True)
        assert (told["exit"], told["code"]) == (3, "drive_busy"), told
        assert str(elsewhere) in told["why"]
        is_whole(host, order)
    assert host.script("drive_release.py", "release")["exit"] == 0


def test_released_while_the_drive_is_gone(host: Host) -> None:
    loop = host.drive()
    assert host.apply(host.order(loop))["exit"] == 0
    host.unmount()
    subprocess.run(["partx", "--delete", loop.node], check=True)
    host.loops.detach(loop)
    assert host.script("drive_release.py", "release")["exit"] == 0
    as_before(host)


def test_what_another_mounted_there_is_not_unmounted(host: Host) -> None:
    assert host.apply(host.order(host.drive()))["exit"] == 0
    host.unmount()
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", host.mount], check=True)
    told = host.script("drive_release.py", "release")
    assert (told["exit"], told["code"]) == (3, "not_ours"), told
    assert drive_mount.mounted_at(str(host.mount)) is not None


def test_wiped_with_the_token_alone(host: Host) -> None:
    loop = host.drive()
    assert host.apply(host.order(loop))["exit"] == 0
    used = host.script("drive_release.py", "wipe", order=host.order(loop))
    assert (used["exit"], used["code"]) == (3, "drive_in_use"), used
    token = host.script("drive_release.py", "release")["tokens"][str(loop.node)]
    before = digest(loop)
    for wrong in (None, "erase-" + "0" * 32):
        told = host.script("drive_release.py", "wipe", order=host.order(loop, token=wrong))
        assert (told["exit"], told["code"], told["token"]) == (3, "no_token", token), told
    assert digest(loop) == before
    told = host.script("drive_release.py", "wipe", order=host.order(loop, token=token))
    assert (told["exit"], told["erased"]) == (0, False), told
    order = host.order(loop)
    assert order["findings"] == []
    again = host.apply(order)
    assert again["code"] == "drive_not_blank", "signatures are gone, data are not"


def test_a_foreign_drive_is_not_wiped_with_its_token(host: Host) -> None:
    loop = host.drive()
    subprocess.run(["mkfs.ext4", "-q", loop.node], check=True)
    token = host.apply(host.order(loop))["token"]
    before = digest(loop)
    told = host.script("drive_release.py", "wipe", order=host.order(loop, token=token))
    assert (told["exit"], told["code"]) == (3, "not_ours"), told
    assert digest(loop) == before


@pytest.mark.parametrize(
    ("filesystem", "step"),
    [
        *(("xfs", ""), ("btrfs", ""), ("ext4", ""), ("xfs", "grow-3"), ("xfs", "grow-filesystem")),
        *(pytest.param("xfs", step, marks=pytest.mark.full) for step in GROW_STEPS),
    ],
)
def test_grown_with_the_disk(tmp_path: Path, filesystem: Filesystem, step: str) -> None:
    capabilities = Path("/proc/self/status").read_text().partition("CapEff:")[2].split()[0]
    if filesystem == "ext4" and not int(capabilities, 16) >> CAP_SYS_RESOURCE & 1:
        pytest.skip("ext4 is grown only with CAP_SYS_RESOURCE")
    with host_with(tmp_path, filesystem) as host:
        size = SMALL[filesystem]
        loop = host.drive(size=size)
        assert host.apply(host.order(loop))["exit"] == 0
        (host.mount / "tier" / "file").write_text("KV")
        before = shutil.disk_usage(host.mount).total
        same = host.script("drive_grow.py")
        assert (same["exit"], same.get("changed")) == (0, []), same
        os.truncate(loop.image, size + 64 * MIB)
        subprocess.run(["losetup", "--set-capacity", loop.node], check=True)
        if step:
            assert host.script("drive_grow.py", stop=f"{step}:kill")["exit"] == -9
        told = host.script("drive_grow.py")
        assert told["exit"] == 0, told
        assert shutil.disk_usage(host.mount).total > before + 55 * MIB
        subprocess.run(["sfdisk", "--verify", loop.node], check=True, capture_output=True)
        assert host.script("drive_grow.py")["changed"] == []
        host.unmount()
        order = host.order(loop, "mount")
        assert host.apply(order)["exit"] == 0
        assert host.check(order) == []
        assert (host.mount / "tier" / "file").read_text() == "KV"


def test_a_tier_is_moved_to_another_drive(host: Host, tmp_path: Path) -> None:
    """The steps of docs/drives.md, "Move a tier to another drive"."""
    old, new = host.drive("old"), host.drive("new")
    assert host.apply(host.order(old))["exit"] == 0
    space = host.mount / "tier" / "ns-aa"
    space.mkdir(mode=0o700)
    (space / "file").write_text("KV")
    place = tmp_path / "second"
    order = {**host.order(new), "mount": str(place)}
    try:
        assert host.apply(order)["exit"] == 0
        assert host.fstab.read_text().count("UUID=") == 1
        subprocess.run(["cp", "-a", f"{host.mount}/tier/.", f"{place}/tier/"], check=True)
        host.unmount()
        assert (place / "tier" / "ns-aa" / "file").read_text() == "KV"
        assert host.check(order) == []
    finally:
        subprocess.run(["umount", place], check=False)
        drive_mount.change_immutable(str(place), False)
