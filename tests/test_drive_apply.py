"""drive_apply.py on real loop devices: formatted, mounted, kept; refused, swapped, cut off."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvhost.onhost import drive_apply, drive_mount, drive_probe
from tests.drive_tools import SMALL, Filesystem, Host, host_with
from tests.lab.loop import MIB, Loop, digest

pytestmark = [
    pytest.mark.drives,
    pytest.mark.skipif(os.geteuid() != 0, reason="loop devices and mounts need root"),
]


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    with host_with(tmp_path) as made:
        yield made


def run(*argv: str | Path) -> None:
    subprocess.run([str(word) for word in argv], check=True, capture_output=True)


def put(loop: Loop, at: int, data: bytes) -> None:
    """Writes through the device, as another program would."""
    with loop.node.open("r+b") as handle:
        handle.seek(at)
        handle.write(data)


def is_whole(host: Host, order: dict[str, Any]) -> None:
    """Mounted, marked, as the order says; and a further run changes nothing."""
    assert host.check(order) == []
    again = host.apply({**order, "action": "keep"})
    assert (again["exit"], again["changed"]) == (0, []), again


@pytest.mark.parametrize("filesystem", ["xfs", "ext4", "btrfs"])
def test_a_blank_drive_is_formatted_mounted_and_kept(
    tmp_path: Path, filesystem: Filesystem
) -> None:
    with host_with(tmp_path, filesystem) as host:
        loop = host.drive()
        order = host.order(loop)
        told = host.apply(order)
        assert (told["exit"], told["status"]) == (0, "done"), told
        assert "100%" in told["said"]
        mount = drive_mount.mounted_at(str(host.mount))
        assert mount is not None and mount.filesystem == filesystem
        assert {"nodev", "nosuid", "noexec"} <= mount.options
        assert stat.S_IMODE(host.mount.stat().st_mode) == 0o711
        tier = (host.mount / "tier").stat()
        assert (tier.st_uid, stat.S_IMODE(tier.st_mode)) == (65534, 0o700)
        line = host.fstab.read_text().splitlines()[1]
        assert line.startswith(f"UUID={told['uuid']} {host.mount} {filesystem} ")
        assert "nofail" in line and "x-systemd.device-timeout" in line
        run("sfdisk", "--verify", loop.node)
        is_whole(host, order)
        host.unmount()  # as after a boot without the drive: nothing can be put here
        assert stat.S_IMODE(host.mount.stat().st_mode) == 0
        with pytest.raises(PermissionError):
            (host.mount / "file").write_text("x")
        (host.mount / "gone").exists()
        after = host.apply({**host.order(loop), "action": "mount"})
        assert after["exit"] == 0 and after["uuid"] == told["uuid"], after
        is_whole(host, order)


def test_sectors_of_4096_bytes(host: Host) -> None:
    loop = host.drive(sector_size=4096)
    order = host.order(loop)
    assert host.apply(order)["exit"] == 0
    run("sfdisk", "--verify", loop.node)
    is_whole(host, order)


@pytest.mark.parametrize("step", drive_apply.STEPS)
def test_killed_at_a_step_the_next_run_completes(host: Host, step: str) -> None:
    loop = host.drive()
    order = host.order(loop)
    extra = {}
    if step in ("erase", "cleared"):  # these come only with a token
        put(loop, 5 * MIB, b"data")
        extra = {"token": host.apply(order)["token"]}
    cut = host.apply({**order, **extra}, stop=f"{step}:kill")
    assert cut["exit"] == -9, cut
    again = host.apply({**host.claimed(loop), **extra})
    assert again["exit"] == 0, again
    assert host.check(order) == []
    assert not (host.state / "drive-apply.json").exists()


@pytest.mark.parametrize("filesystem", ["xfs", "ext4", "btrfs"])
@pytest.mark.parametrize(
    "after_ms", [10, *(pytest.param(ms, marks=pytest.mark.full) for ms in (3, 30, 60))]
)
def test_killed_while_mkfs_writes(tmp_path: Path, filesystem: Filesystem, after_ms: int) -> None:
    with host_with(tmp_path, filesystem) as host:
        order = host.order(host.drive())
        assert host.apply(order, stop=f"mkfs-running-{after_ms}:kill")["exit"] == -9
        told = host.apply(order)
        assert told["exit"] == 0, told
        is_whole(host, order)


def refused(host: Host, loop: Loop, told: dict[str, Any], code: str, before: str) -> None:
    assert (told["exit"], told["code"]) == (3, code), told
    assert digest(loop) == before
    assert drive_mount.mounted_at(str(host.mount)) is None
    assert host.fstab.read_text() == "# of this host\n"


def test_one_byte_in_the_middle_is_found_and_its_token_works(host: Host) -> None:
    loop = host.drive()
    put(loop, 17 * MIB + 4711, b"\1")
    before, order = digest(loop), host.order(loop)
    assert order["findings"] == []
    told = host.apply(order)
    refused(host, loop, told, "drive_not_blank", before)
    assert f"byte {17 * MIB + 4711}" in told["why"] and told["token"] in told["why"]
    wrong = host.apply({**order, "token": "erase-" + "0" * 32})
    refused(host, loop, wrong, "drive_not_blank", before)
    put(loop, 17 * MIB + 4712, b"\1")  # other data: the token is worth nothing
    stale = host.apply({**order, "token": told["token"]})
    refused(host, loop, stale, "drive_not_blank", digest(loop))
    done = host.apply({**order, "token": stale["token"]})
    assert done["exit"] == 0, done
    is_whole(host, order)


def test_sampled_says_what_it_covered(tmp_path: Path) -> None:
    with host_with(tmp_path) as host:
        loop = host.drive(size=2400 * MIB)
        told = host.apply(host.order(loop, blank_check="sampled"))
        assert told["exit"] == 0 and "1152 of 2400 MiB (48.00%)" in told["said"], told


def with_ext4(loop: Loop) -> None:
    run("mkfs.ext4", "-q", loop.node)


def with_partitions(loop: Loop) -> None:
    subprocess.run(
        ["sfdisk", "-q", loop.node], input="label: gpt\n,10M\n,\n", text=True, check=True
    )
    loop.scan_partitions()
    run("mkfs.ext4", "-q", loop.partitions()[0])


@pytest.mark.parametrize("fill", [with_ext4, with_partitions])
def test_what_is_found_needs_its_token(host: Host, fill: Any) -> None:
    loop = host.drive()
    fill(loop)
    order, before = host.order(loop), digest(loop)
    assert order["findings"]
    told = host.apply(order)
    refused(host, loop, told, "drive_not_blank", before)
    machine_id = Path("/etc/machine-id").read_text().strip()
    assert told["token"] == drive_probe.token(order["drive"], machine_id, order["findings"])
    for step in ("erase", "cleared"):
        assert host.apply({**order, "token": told["token"]}, stop=f"{step}:kill")["exit"] == -9
    done = host.apply({**order, "token": told["token"]})
    assert done["exit"] == 0, done
    is_whole(host, order)


@pytest.mark.parametrize("step", ["blank", "counter"])
def test_written_to_between_plan_and_writing(host: Host, step: str) -> None:
    loop = host.drive()
    order = host.order(loop)
    with host.paused(order, step) as told:
        put(loop, 3 * MIB, b"somebody's")
        run("sync", loop.node)
        put(loop, 3 * MIB, bytes(10))  # and gone again: the counter knows
    refused(host, loop, told, "drive_changed", digest(loop))
    assert told["status"] == "refused" and "written to" in told["why"]
    assert not any(loop.image.read_bytes())


def test_found_something_since_the_plan(host: Host) -> None:
    loop = host.drive()
    order = host.order(loop)
    with_ext4(loop)
    before = digest(loop)
    told = host.apply(order)
    refused(host, loop, told, "drive_changed", before)
    assert "something else" in told["why"]


@pytest.mark.parametrize("step", ["hold", "probe"])
def test_another_drive_has_got_the_name(host: Host, step: str) -> None:
    loop = host.drive()
    order = host.order(loop)
    other = host.loops.folder / "other.img"
    other.write_bytes(bytes(SMALL["ext4"]))

    def swap() -> None:
        run("losetup", "--detach", loop.node)
        run("losetup", loop.node, other)

    try:
        if step == "hold":
            with host.paused(order, step) as told:
                swap()
            assert told["exit"] == 3 and "diskseq" in told["why"], told
        else:  # held open: the detaching waits until apply lets go of it
            with host.paused(order, step) as told:
                run("losetup", "--detach", loop.node)
            assert told["exit"] in (0, 1, 3)
    finally:
        if not loop.is_ours() and step == "hold":
            run("losetup", "--detach", loop.node)
    assert not any(other.read_bytes())


def test_another_drive_with_the_same_numbers_is_not_the_plans(host: Host) -> None:
    loop, other = host.drive(), host.drive("other")
    order = host.order(loop)
    order["drive"] = {**order["drive"], "path": str(other.node)}
    told = host.apply(order)
    assert told["exit"] == 3 and "another drive has its name" in told["why"]
    order["drive"] = {**host.order(other)["drive"], "serial": "S1"}
    told = host.apply(order)
    assert told["exit"] == 3 and "serial" in told["why"]
    assert not any(other.image.read_bytes())


@pytest.mark.parametrize(
    ("stage", "what"),
    [(s, w) for s in ("table-4", "kernel", "mkfs", "made") for w in ("filesystem", "table")]
    + [("table-4", "data")],  # later the filesystem tells
)
def test_a_journal_makes_nothing_of_others_eatable(host: Host, stage: str, what: str) -> None:
    loop = host.drive()
    order = host.order(loop)
    assert host.apply(order, stop=f"{stage}:kill")["exit"] == -9
    if what == "filesystem":
        if stage == "table-4":
            with_ext4(loop)
        else:
            loop.scan_partitions()
            run("mkfs.ext4", "-q", "-F", loop.partitions()[0])
    elif what == "data":
        put(loop, 9 * MIB, b"somebody's data")
    else:
        subprocess.run(["sfdisk", "-q", "-w", "never", loop.node], input="label: gpt\n,8M\n",
                       text=True, check=True, capture_output=True)  # fmt: skip
    before = digest(loop)
    told = host.apply(host.order(loop))
    assert told["exit"] == 3, told
    assert digest(loop) == before


def test_files_in_a_half_made_filesystem_are_kept(host: Host) -> None:
    loop = host.drive()
    order = host.order(loop)
    assert host.apply(order, stop="made:kill")["exit"] == -9
    part = loop.scan_partitions()[0]
    host.mount.mkdir(exist_ok=True)
    run("mount", part, host.mount)
    (host.mount / "thesis.txt").write_text("of years")
    host.unmount()
    told = host.apply(host.order(loop))
    assert told["exit"] == 3 and "thesis.txt" in told["why"], told
    assert b"of years" in loop.image.read_bytes()


def test_a_foreign_filesystem_at_the_mount_point(host: Host) -> None:
    loop = host.drive()
    order, before = host.order(loop), digest(loop)
    host.mount.mkdir()
    run("mount", "-t", "tmpfs", "tmpfs", host.mount)
    told = host.apply(order)
    assert told["exit"] == 3 and "another filesystem is mounted" in told["why"], told
    assert digest(loop) == before, "found out only after the drive was formatted"


def test_a_mount_point_with_something_in_it(host: Host) -> None:
    loop = host.drive()
    order = host.order(loop)
    host.mount.mkdir()
    (host.mount / "mine").write_text("")
    told = host.apply(order)
    assert told["exit"] == 3 and "not empty (mine)" in told["why"], told
    assert not any(loop.image.read_bytes())


def test_a_label_alone_makes_no_drive_ours(host: Host) -> None:
    loop = host.drive()
    order = host.order(loop)
    assert host.apply(order)["exit"] == 0
    (host.mount / ".kvhost-drive.json").unlink()
    host.unmount()
    before = digest(loop)
    for action in ("mount", "keep", "format"):
        told = host.apply(host.order(loop, action))
        assert told["exit"] == 3 and "not its marker" in told["why"], told
    assert digest(loop) == before


def test_a_drive_that_lost_its_filesystem_is_formatted_again_only_if_it_may(host: Host) -> None:
    loop = host.drive()
    told = host.apply(host.order(loop))
    host.unmount()
    run("partx", "--delete", loop.node)
    run("fallocate", "--punch-hole", "--length", str(SMALL["ext4"]), loop.image)
    lost = host.apply(host.order(loop))
    assert (lost["exit"], lost["code"]) == (3, "came_back_blank"), lost
    assert not any(loop.image.read_bytes())
    order = host.order(loop, ephemeral=True, blank_check="sampled")
    again = host.apply(order)
    assert again["exit"] == 0 and again["uuid"] != told["uuid"], again
    assert "sampled" not in again["said"]
    assert host.fstab.read_text().count("UUID=") == 1
    assert host.check(order) == []


def test_a_dry_run_writes_nothing(host: Host) -> None:
    loop = host.drive()
    told = host.apply(host.order(loop), "--dry-run")
    assert told["exit"] == 0 and told["would"], told
    assert not any(loop.image.read_bytes()) and not host.mount.exists()
    assert sorted(path.name for path in host.state.iterdir()) == ["order.json"]


def test_adopted_without_formatting(host: Host) -> None:
    loop = host.drive()
    with_ext4(loop)
    host.mount.mkdir()
    run("mount", loop.node, host.mount)
    order = host.order(loop, "adopt")
    told = host.apply(order)
    assert told["exit"] == 0, told
    assert host.check(order) == []
    assert (host.mount / "lost+found").exists()
