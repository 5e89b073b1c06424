"""What somebody or something else did to kvhost's drive or its files: refused, said, or mended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvhost.onhost import (
    drive_apply,
    drive_fs,
    drive_journal,
    drive_mount,
    drive_probe,
    report_drives,
)
from tests.drive_tools import Host, host_with
from tests.lab.loop import digest

pytestmark = [
    pytest.mark.drives,
    pytest.mark.skipif(os.geteuid() != 0, reason="loop devices and mounts need root"),
]


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    with host_with(tmp_path) as made:
        yield made


def run(*argv: str | Path) -> str:
    words = [str(word) for word in argv]
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()


def with_data(node: Path, at: Path) -> None:
    run("mkfs.ext4", "-q", node)
    at.mkdir()
    run("mount", node, at)
    (at / "precious").write_text("x")
    run("sync", "-f", at)


@pytest.mark.parametrize("over", ["the drive", "its file"])
def test_no_token_erases_what_another_loop_device_has_mounted(
    host: Host, tmp_path: Path, over: str
) -> None:
    """A second loop device, over the first one or over its file, shows no mount of its own."""
    loop, at = host.drive(), tmp_path / "at"
    with_data(loop.node, at)
    second = run("losetup", "--find", "--show", loop.node if over == "the drive" else loop.image)
    try:
        found = drive_probe.probe(second)
        never = {one["kind"] for one in found["findings"]} & drive_probe.NEVER
        assert never == ({"not_a_drive"} if over == "the drive" else {"holder"}), found["findings"]
        order = {**host.order(loop), "drive": found["device"], "findings": found["findings"]}
        before = digest(loop)
        order["token"] = drive_probe.token(found["device"], "0" * 32, found["findings"])
        told = host.apply(order)
        assert (told["exit"], told["code"]) == (3, "drive_in_use"), told
        assert "token" not in told and digest(loop) == before
    finally:
        run("losetup", "--detach", second)
        run("umount", at)


@pytest.mark.parametrize("what", ["a pipe", "a link"])
def test_a_marker_that_is_no_file_stops_no_look_at_drives(host: Host, what: str) -> None:
    loop = host.drive()
    order = host.order(loop)
    assert host.apply(order)["exit"] == 0
    marker = host.mount / ".kvhost-drive.json"
    marker.rename(host.mount / "tier/real")
    os.mkfifo(marker) if what == "a pipe" else marker.symlink_to("tier/real")
    script = Path(report_drives.__file__)
    argv = [sys.executable, str(script), "--mount", str(host.mount), "--state", str(host.state)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60)
    told = json.loads(done.stdout)
    assert told["mount_point"]["data"]["marker"]["status"] == "unreadable"
    (own,) = [
        d["device"] for d in told["drives"] if (d["device"] or {}).get("path") == str(loop.node)
    ]
    assert own["kvhost"]["marker"]["status"] == "unreadable"
    assert host.apply({**host.order(loop), "action": "keep"})["exit"] == 1


def test_a_part_of_a_filesystem_is_not_adopted(host: Host, tmp_path: Path) -> None:
    """An empty directory of a filesystem that is full, bound to the mount point."""
    loop, at = host.drive(), tmp_path / "at"
    with_data(loop.node, at)
    (at / "empty").mkdir()
    host.mount.mkdir()
    run("mount", "--bind", at / "empty", host.mount)
    run("umount", at)
    assert report_drives.mount_point(str(host.mount))["root"] == "/empty"
    told = host.apply(host.order(loop, "adopt"))
    assert (told["exit"], told["code"]) == (3, "not_adoptable"), told
    assert "/empty" in told["why"] and not any(host.mount.iterdir())


def test_the_mount_point_of_an_adopted_drive_stays(host: Host) -> None:
    """Its line in fstab is somebody else's, and needs it at the next boot."""
    loop = host.drive()
    run("mkfs.ext4", "-q", loop.node)
    uuid = run("blkid", "-s", "UUID", "-o", "value", loop.node)
    host.mount.mkdir()
    line = f"UUID={uuid} {host.mount} ext4 defaults 0 2\n"
    host.fstab.write_text(line)
    run("mount", loop.node, host.mount)
    assert host.apply(host.order(loop, "adopt"))["exit"] == 0
    told = host.script("drive_release.py", "release")
    assert told["exit"] == 0 and drive_mount.mounted_at(str(host.mount)) is None, told
    assert host.mount.is_dir() and host.fstab.read_text() == line


@pytest.mark.parametrize("what", ["read-only", "below a file", "fstab immutable", "fstab mounted"])
def test_what_could_not_be_mounted_in_the_end_is_not_formatted(
    host: Host, tmp_path: Path, what: str
) -> None:
    loop, at = host.drive(), tmp_path / "at"
    at.mkdir()
    order, before = host.order(loop), digest(loop)
    undo: tuple[str | Path, ...] = ("true",)
    if what == "read-only":
        run("mount", "-t", "tmpfs", "-o", "ro", "none", at)
        order["mount"], undo = str(at / "a/b"), ("umount", at)
    elif what == "below a file":
        order["mount"] = str(host.fstab / "a")
    elif what == "fstab immutable":
        run("chattr", "+i", host.fstab)
        undo = ("chattr", "-i", host.fstab)
    else:
        run("mount", "--bind", host.fstab, host.fstab)
        undo = ("umount", host.fstab)
    try:
        told = host.apply(order)
    finally:
        run(*undo)
    assert told["exit"] == 3 and told["changed"] == [], told
    assert digest(loop) == before


def test_the_marker_that_a_power_cut_left_in_the_log_alone_is_not_missed(tmp_path: Path) -> None:
    """XFS as it lies on the drive just after it was made: without replay it shows no marker."""
    with host_with(tmp_path, "xfs") as host:
        loop = host.drive()
        order = host.order(loop)
        assert host.apply(order)["exit"] == 0
        run("sync", loop.node)
        as_cut_off = loop.image.read_bytes()
        host.unmount()
        with loop.node.open("r+b") as node:
            node.write(as_cut_off)
            os.fsync(node.fileno())
        record = (host.state / "drive.json").read_text()
        (host.state / "drive.json").unlink()  # of any host but this one it stays foreign
        stranger = host.apply({**host.order(loop), "action": "mount"})
        assert (stranger["exit"], stranger["code"]) == (3, "not_ours"), stranger
        (host.state / "drive.json").write_text(record)
        told = host.apply({**host.order(loop), "action": "mount"})
        assert told["exit"] == 0, told
        assert host.check(order) == []


def test_a_filesystem_that_takes_no_writes_is_not_called_good(host: Host) -> None:
    loop = host.drive()
    order = host.order(loop)
    assert host.apply(order)["exit"] == 0
    run("mount", "-o", "remount,errors=remount-ro", host.mount)
    there = drive_mount.mounted_at(str(host.mount))
    assert there is not None
    trigger = Path("/sys/fs/ext4", Path(there.source).name, "trigger_fs_error")
    trigger.write_text("test")
    assert host.check(order) == [f"{host.mount} is mounted with other options"]
    told = host.apply({**host.order(loop), "action": "keep"})
    assert told["exit"] == 1 and "takes no writes" in told["why"], told


@pytest.mark.parametrize("text", ["", '{"schema": 1, "mou', "[]", "null", '{"schema": 1}'])
def test_a_damaged_record_is_not_no_drive(host: Host, text: str) -> None:
    loop = host.drive()
    order = host.order(loop)
    assert host.apply(order)["exit"] == 0
    (host.state / "drive.json").write_text(text)
    for script, words in (("drive_release.py", ("release",)), ("drive_grow.py", ())):
        told = host.script(script, *words)
        assert told["exit"] == 1 and "drive.json is damaged" in told["why"], told
    assert drive_mount.mounted_at(str(host.mount)) is not None
    assert "x-kvhost" in host.fstab.read_text()
    assert host.apply({**host.order(loop), "action": "keep"})["exit"] == 0
    assert host.check(order) == []
    assert host.script("drive_release.py", "release")["exit"] == 0


def test_a_damaged_journal_is_no_licence_and_no_blank_page(host: Host) -> None:
    """Every key of a journal taken away, or of another kind: the plan and the writing step stop."""
    loop = host.drive()
    order = host.order(loop)
    assert host.apply(order, stop="made:kill")["exit"] == -9
    whole = drive_journal.read(str(host.state))
    assert whole is not None
    before = digest(loop)
    damaged: list[Any] = ["", "[]", "null", "5"]
    damaged += [{k: v for k, v in whole.items() if k != key} for key in whole]
    (entry,) = whole["drives"]
    damaged += [{**whole, "drives": drives} for drives in (5, [], [5], [{**entry, "drive": 5}])]
    damaged += [
        {**whole, "drives": [{k: v for k, v in entry.items() if k != key}]}
        for key in entry
        if key != "signatures"
    ]
    damaged.append({**whole, "drives": [{**entry, "disk_guid": "../x"}]})
    path = host.state / "drive-apply.json"
    for one in damaged:
        path.write_text(one if isinstance(one, str) else json.dumps(one))
        with pytest.raises(ValueError, match=r"journal|JSON|Expecting"):
            drive_journal.read(str(host.state))
        assert report_drives.drives(None, str(host.state))["journal"]["status"] == "unreadable"
    told = host.apply(order)
    assert told["exit"] == 1 and "no journal" in told["why"], told
    assert digest(loop) == before
    path.write_text(json.dumps(whole))
    assert host.apply(order)["exit"] == 0


WRONG: dict[str, list[Any]] = {
    "mount": ["/", "/etc", "//etc/x", "x/y", "/mnt/../etc/x", "/a\0/b", "/a/b\nc", "/a/b c", 5],
    "owner": ["root", None, 5, "nobody-like-this"],
    "filesystem": ["vfat", [], None],
    "findings": [None, 5, [5], [{}]],
    "drive": [None, {}, {"path": 5, "maj_min": "7:0"}, {"path": "/dev/\0", "maj_min": "7:0"}],
    "members": [5, [5], [{}]],
    "blank_check": ["none", None],
    "token": [["x"], 5],
    "action": ["erase", [], None],
    "schema": [2],
}


@pytest.mark.parametrize("key", WRONG)
def test_a_wrong_order_is_one_clear_error(key: str) -> None:
    good = {
        "schema": 1,
        "drive": {"path": "/dev/loop0", "maj_min": "7:0"},
        "findings": [],
        "action": "format",
        "filesystem": "ext4",
        "mount": "/mnt/kv",
        "owner": "daemon",
        "token": None,
        "blank_check": "full",
    }
    assert drive_apply.parse_order(json.dumps(good)) == good
    for value in WRONG[key]:
        with pytest.raises(ValueError, match="the order is not usable"):
            drive_apply.parse_order(json.dumps({**good, key: value}))


def test_a_look_into_a_filesystem_shows_no_mount_to_others(host: Host) -> None:
    """In a mount namespace of its own: a run that is killed meanwhile leaves no mount behind."""
    loop = host.drive()
    assert host.apply(host.order(loop))["exit"] == 0
    there = drive_mount.mounted_at(str(host.mount))
    assert there is not None
    host.unmount()
    ended, seen = threading.Event(), []

    def watch() -> None:
        while not ended.is_set():
            seen.append("kvhost-look-" in Path("/proc/self/mountinfo").read_text())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        inside = [drive_fs.look(there.source, "ext4") for _ in range(5)]
    finally:
        ended.set()
        watcher.join()
    assert all(one["marker"] for one in inside), inside
    assert len(seen) > 50 and not any(seen)
