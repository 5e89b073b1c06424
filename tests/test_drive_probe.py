"""The probe on loop devices of this machine, and on drives as sysfs shows them elsewhere."""

from __future__ import annotations

import errno
import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvhost.drives.types import Drive
from kvhost.onhost import (
    DRIVE_SCRIPTS,
    drive_content,
    drive_magic,
    drive_probe,
    drive_sys,
    report_drives,
)
from kvhost.report import parse_drives
from tests.lab.loop import MIB, Loop, Loops, digest
from tests.lab.recipe import install

pytestmark = [pytest.mark.drives]
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="loop devices need root")
SCRIPTS = Path(drive_probe.__file__).parent


@pytest.fixture(scope="module")
def tools() -> None:
    install(("e2fsprogs", "gdisk"))


@pytest.fixture
def loops(tmp_path: Path, tools: None) -> Iterator[Loops]:
    with Loops(tmp_path / "images") as made:
        yield made


def run(*argv: str | Path) -> None:
    subprocess.run([str(word) for word in argv], check=True, capture_output=True)


def put(loop: Loop, at: int, content: bytes) -> None:
    with loop.node.open("r+b") as handle:
        handle.seek(at, os.SEEK_SET if at >= 0 else os.SEEK_END)
        handle.write(content)


def probed(loop: Loop) -> Drive:
    return Drive.model_validate(drive_probe.probe(str(loop.node)))


def kinds(loop: Loop) -> set[str]:
    found = probed(loop)
    assert found.status == "ok", found.why
    return {finding.kind for finding in found.findings}


# ---- on real block devices


@as_root
def test_a_blank_device_has_no_finding_and_an_identity(loops: Loops) -> None:
    loop = loops.make("blank", 64 * MIB)
    found = probed(loop)
    assert (found.status, found.findings) == ("ok", [])
    device, image = found.device, loop.image.stat()
    assert device is not None and device.backing is not None
    assert (device.transport, device.size_bytes, device.by_id) == ("loop", 64 * MIB, None)
    assert device.serial == str(loop.image) and device.backing.path == str(loop.image)
    assert (device.backing.dev, device.backing.inode) == (image.st_dev, image.st_ino)
    number = loop.node.stat().st_rdev
    assert device.maj_min == f"{os.major(number)}:{os.minor(number)}"
    assert device.diskseq and device.path == str(loop.node)


@as_root
def test_a_link_is_followed_and_what_is_no_block_device_is_said(
    loops: Loops, tmp_path: Path
) -> None:
    loop = loops.make("blank", 64 * MIB)
    (tmp_path / "link").symlink_to(loop.node)
    assert drive_probe.probe(str(tmp_path / "link")) == drive_probe.probe(str(loop.node))
    for path in (tmp_path / "nothing", loop.image, Path("/dev/null")):
        found = Drive.model_validate(drive_probe.probe(str(path)))
        assert found.status == "unreadable" and "no block device" in str(found.why)


@as_root
@pytest.mark.parametrize("sector", [512, 4096])
def test_a_filesystem_a_label_and_a_uuid_are_told(loops: Loops, sector: int) -> None:
    loop = loops.make("ext4", 64 * MIB, sector_size=sector)
    run("mkfs.ext4", "-q", "-L", "photos", loop.node)
    (told, *_) = [f.detail for f in probed(loop).findings if f.kind == "signature"]
    assert told.startswith("ext4 photos ") and told.endswith(" at 1080")


@as_root
def test_the_same_state_is_told_in_the_same_words(loops: Loops) -> None:
    loop = loops.make("ext4", 64 * MIB)
    run("mkfs.ext4", "-q", loop.node)
    before, first = digest(loop), drive_probe.probe(str(loop.node))
    assert drive_probe.probe(str(loop.node)) == first
    assert digest(loop) == before, "and nothing was written"
    assert loop.sectors_written() == probed_writes(loop)


def probed_writes(loop: Loop) -> int:
    drive_probe.probe(str(loop.node))
    return loop.sectors_written()


@as_root
def test_labels_with_control_characters_stay_on_their_line(loops: Loops) -> None:
    loop = loops.make("ext4", 64 * MIB)
    run("mkfs.ext4", "-q", "-L", "a\x1b[31m\nb", loop.node)
    for finding in probed(loop).findings:
        assert finding.detail.isprintable()


@as_root
def test_partitions_are_told_by_their_number(loops: Loops) -> None:
    loop = loops.make("gpt", 64 * MIB, partitions=True)
    run("sgdisk", "-n", "1:0:+16M", "-c", "1:first", "-n", "2:0:0", loop.node)
    first, second = loop.scan_partitions()
    run("mkfs.ext4", "-q", "-L", "data", first)
    found = [f"{f.kind}: {f.detail}" for f in probed(loop).findings]
    assert any(word.startswith("partition_table: gpt ") for word in found)
    assert any("partition 1: ext4, label data" in word and "first" in word for word in found)
    assert any("partition 2: no known format" in word for word in found)
    assert "loop" not in "".join(found), "the kernel's name is another one after a boot"
    inside = Drive.model_validate(drive_probe.probe(str(second)))
    assert [(f.kind, f.detail) for f in inside.findings] == [
        ("not_a_drive", f"a partition of {loop.node.name}")
    ]


@as_root
def test_a_table_whose_first_copy_is_lost_is_told(loops: Loops) -> None:
    for sector in (512, 4096):
        loop = loops.make(f"gpt{sector}", 64 * MIB, sector_size=sector, partitions=True)
        run("sgdisk", "-n", "1:0:0", loop.node)
        subprocess.run(["partx", "--delete", loop.node], capture_output=True, check=False)
        put(loop, 0, bytes(8 * sector))
        found = " ".join(f.detail for f in probed(loop).findings)
        assert "gpt" in found and f"at {64 * MIB - sector}" in found
        put(loop, -sector, b"EFI_PART")
        assert not probed(loop).findings


@as_root
def test_what_is_mounted_is_told_with_every_layer(loops: Loops, tmp_path: Path) -> None:
    loop = loops.make("ext4", 64 * MIB)
    run("mkfs.ext4", "-q", loop.node)
    point = tmp_path / "a b"
    point.mkdir()
    run("mount", loop.node, point)
    try:
        found = probed(loop)
        assert found.has("mounted") and found.has("busy")
        assert f"{loop.node.name} at {point} (ext4)" in [f.detail for f in found.findings]
        inner = point / "inner.img"
        inner.write_bytes(bytes(MIB))
        name = loop.node.name
        with Loops(point) as nested:
            deep = nested.make("deep", 16 * MIB)
            assert drive_sys.below(deep.node.name)[:2] == [deep.node.name, name]
    finally:
        run("umount", point)
    assert kinds(loop) == {"signature", "leftover"}


@as_root
def test_what_a_mount_of_another_namespace_holds_is_busy(loops: Loops, tmp_path: Path) -> None:
    loop = loops.make("ext4", 64 * MIB)
    run("mkfs.ext4", "-q", loop.node)
    script = f"mount {loop.node} '{tmp_path}' && echo up && cat"
    with subprocess.Popen(
        ["unshare", "--mount", "sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None and other.stdin is not None
        assert other.stdout.readline() == b"up\n"
        assert "busy" in kinds(loop) and "mounted" not in kinds(loop)
        other.stdin.close()


@as_root
def test_a_process_that_has_it_open_is_named(loops: Loops) -> None:
    loop = loops.make("blank", 64 * MIB)
    code = (
        f"import sys; f = open({str(loop.node)!r}, 'rb'); print('up', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None and other.stdin is not None
        other.stdout.readline()
        (finding,) = [f for f in probed(loop).findings if f.kind == "in_use"]
        assert f"({other.pid})" in finding.detail
        other.stdin.close()
    assert kinds(loop) == set()


@as_root
def test_a_loop_device_on_a_device_is_told_and_seen_through(loops: Loops) -> None:
    loop = loops.make("blank", 64 * MIB)
    upper = loops.attach(loop.node)
    name = upper.node.name
    assert [(f.kind, f.detail) for f in probed(loop).findings] == [
        ("holder", f"{name} (loop) is built on it")
    ]
    assert drive_sys.below(name)[:2] == [name, loop.node.name]


@as_root
def test_swap_is_told(loops: Loops, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = loops.make("swap", 64 * MIB)
    run("mkswap", loop.node)
    assert kinds(loop) == {"signature"}
    monkeypatch.setattr(drive_sys, "swaps", lambda: [loop.node.name])
    assert "swap" in kinds(loop)


@as_root
def test_read_only_is_told(loops: Loops) -> None:
    assert kinds(loops.make("ro", 64 * MIB, read_only=True)) == {"read_only"}


@as_root
def test_a_line_of_fstab_is_told_and_kvhosts_own_is_not(
    loops: Loops, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = loops.make("ext4", 64 * MIB)
    run("mkfs.ext4", "-q", "-L", "photos", "-U", "8ad9b906-7389-43ef-bf41-d7b7727b055b", loop.node)
    real = drive_sys.host
    table = tmp_path / "fstab"
    monkeypatch.setattr(drive_sys, "host", lambda *p: table if p == ("etc/fstab",) else real(*p))
    for what, told in (
        ("UUID=8AD9B906-7389-43ef-bf41-d7b7727b055b", True),
        ("LABEL=photos", True),
        (str(loop.node), True),
        ("LABEL=music", False),
        ("# LABEL=photos", False),
    ):
        table.write_text(f"proc /proc proc defaults 0 0\n{what} /data\\040x ext4 defaults 0 0\n")
        assert ("fstab" in kinds(loop)) == told, what
    assert "fstab" not in kinds(loop)
    table.write_text("LABEL=photos /data ext4 nofail,x-kvhost 0 0\n")
    assert "fstab" not in kinds(loop)


@as_root
def test_a_drive_of_kvhosts_is_known_by_name_and_label_together(
    loops: Loops, tmp_path: Path
) -> None:
    loop = loops.make("own", 64 * MIB, partitions=True)
    run("sgdisk", "-n", "1:0:0", "-c", "1:kvhost", loop.node)
    (part,) = loop.scan_partitions()
    run("mkfs.ext4", "-q", "-L", "data", part)
    device = probed(loop).device
    assert device and device.kvhost is None, "the name alone is not enough"
    run("e2label", part, "kvhost")
    run("sgdisk", "-c", "1:other", loop.node)
    device = probed(loop).device
    assert device and device.kvhost is None, "nor is the label alone"
    run("sgdisk", "-c", "1:kvhost", loop.node)
    loop.scan_partitions()
    device = probed(loop).device
    assert device and device.kvhost and device.kvhost.mounted_at == []
    assert (device.kvhost.partition, device.kvhost.filesystem) == (str(part), "ext4")
    assert device.kvhost.marker.status == "absent"
    run("mount", part, tmp_path)
    try:
        (tmp_path / ".kvhost-drive.json").write_text('{"uuid": "x"}')
        device = probed(loop).device
        assert device and device.kvhost and device.kvhost.mounted_at == [str(tmp_path)]
        assert device.kvhost.marker.data == {"uuid": "x"}
        (tmp_path / ".kvhost-drive.json").write_text("{")
        device = probed(loop).device
        assert device and device.kvhost and device.kvhost.marker.status == "unreadable"
    finally:
        run("umount", tmp_path)


# ---- it fails closed


@as_root
@pytest.mark.parametrize("tool", ["blkid", "wipefs"])
def test_a_missing_or_failing_tool_is_no_blank_drive(
    loops: Loops, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: str
) -> None:
    loop = loops.make("blank", 64 * MIB)
    real = subprocess.run

    def missing(argv: list[str], **how: Any) -> Any:
        if argv[0] == tool:
            raise FileNotFoundError(tool)
        return real(argv, **how)

    def failing(argv: list[str], **how: Any) -> Any:
        return real(["sh", "-c", "echo broken >&2; exit 4"] if argv[0] == tool else argv, **how)

    def other_words(argv: list[str], **how: Any) -> Any:
        return real(["echo", '{"a": "b"}'] if argv[0] == tool else argv, **how)

    for double, said in (
        (missing, f"{tool} is not installed"), (failing, "exits 4: broken"), (other_words, "")
    ):  # fmt: skip
        monkeypatch.setattr(subprocess, "run", double)
        found = probed(loop)
        assert found.status == "unreadable" and said in str(found.why)


@as_root
def test_who_is_not_root_is_told_nothing_is_blank(loops: Loops) -> None:
    loop = loops.make("blank", 64 * MIB)
    open_dir = Path("/tmp") / f"probe-{os.getpid()}"
    open_dir.mkdir(mode=0o755)
    try:
        for name in DRIVE_SCRIPTS:
            shutil.copy(SCRIPTS / name, open_dir / name)
        done = subprocess.run(
            ["setpriv", "--reuid=65534", "--clear-groups", "--regid=65534", "/usr/bin/python3",
             open_dir / "drive_probe.py", "show", loop.node, "--json"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    finally:
        shutil.rmtree(open_dir)
    assert done.returncode == 1
    (row,) = json.loads(done.stdout)["drives"]
    assert row["status"] == "unreadable" and "not root" in row["why"]


@as_root
def test_what_cannot_be_read_is_no_blank_drive(
    loops: Loops, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = loops.make("blank", 64 * MIB)
    real = os.pread

    def bad(fd: int, count: int, at: int) -> bytes:
        if at > 32 * MIB:
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, count, at)

    monkeypatch.setattr(os, "pread", bad)
    found = probed(loop)
    assert found.status == "unreadable" and "Input/output error" in str(found.why)


@pytest.mark.parametrize("part", ["mounts", "swaps", "fstab", "open_by_processes"])
@as_root
def test_facts_of_the_host_that_cannot_be_read_make_every_drive_unreadable(
    loops: Loops, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    loop = loops.make("blank", 64 * MIB)

    def broken() -> None:
        raise OSError(f"{part}: torn")

    monkeypatch.setattr(drive_sys, part, broken)
    found = probed(loop)
    assert found.status == "unreadable" and f"{part}: torn" in str(found.why)


@as_root
def test_a_tool_of_another_language_is_asked_in_english(
    loops: Loops, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = loops.make("blank", 64 * MIB)
    with monkeypatch.context() as patch:
        patch.setenv("LC_ALL", "de_DE.UTF-8")
        patch.setenv("PATH", "/nowhere")
        assert probed(loop).status == "ok"


# ---- leftovers


def file_with(path: Path, at: int, content: bytes, size: int) -> int:
    with path.open("wb") as handle:
        handle.truncate(size)
        handle.seek(at if at >= 0 else size + at)
        handle.write(content)
    return os.open(path, os.O_RDONLY)


SIZE = 300 << 30  # sparse


@pytest.mark.parametrize("mark", drive_magic.MARKS, ids=lambda m: f"{m.name} {m.offset}")
def test_each_mark_is_found_at_its_place(tmp_path: Path, mark: drive_magic.Mark) -> None:
    content = mark.magic
    if mark.name.startswith("ext"):  # magic, then block size and group where they must be
        block = bytearray(104)
        block[56:58], block[24:28], block[90:92] = mark.magic, struct.pack("<I", 0), b"\x01\x00"
        content = bytes(block)
    at = mark.offset - 56 if mark.name.startswith("ext") else mark.offset
    fd = file_with(tmp_path / "image", at, content, SIZE)
    try:
        where = mark.offset if mark.offset >= 0 else SIZE + mark.offset
        assert f"{mark.name} at {where}" in drive_magic.leftovers(fd, SIZE)
        assert mark.source
    finally:
        os.close(fd)


ZFS = struct.pack("<Q", 0x00BAB10C)


@pytest.mark.parametrize(
    ("at", "content", "name"),
    [
        *[(label + (128 << 10) + slot, ZFS, "zfs") for label in (0, 256 << 10)
          for slot in (0, 1024, 127 << 10)],
        *[(64 * MIB - back + (136 << 10), ZFS[::-1], "zfs") for back in (512 << 10, 256 << 10)],
        (64 * MIB - (64 << 10), bytes.fromhex("fc4e2ba9"), "md 0.90"),
        (64 * MIB - (64 << 10), bytes.fromhex("a92b4efc"), "md 0.90"),
        (64 * MIB - 8192, bytes.fromhex("fc4e2ba9"), "md 1.0"),
    ],
)  # fmt: skip
def test_marks_at_the_end_are_found(tmp_path: Path, at: int, content: bytes, name: str) -> None:
    fd = file_with(tmp_path / "image", at, content, 64 * MIB)
    try:
        assert any(found.startswith(name) for found in drive_magic.leftovers(fd, 64 * MIB))
    finally:
        os.close(fd)


@pytest.mark.parametrize("size", [1, 511, 512, 4096, 1 << 20, 64 * MIB, 64 * MIB + 512])
def test_nothing_is_found_in_zeros_of_any_size(tmp_path: Path, size: int) -> None:
    fd = file_with(tmp_path / "image", 0, b"\0", size)
    try:
        assert drive_magic.leftovers(fd, size) == []
    finally:
        os.close(fd)


# ---- drives of other machines, as sysfs shows them


class Sys:
    """A /sys, /proc and /dev with what is put there."""

    def __init__(self, top: Path) -> None:
        self.top = top

    def disk(self, name: str, way: str, **files: str) -> Path:
        """A drive below /sys/devices/`way`; `files`: names with __ for /."""
        at = self.top / "sys/devices" / way
        link = self.top / "sys/class/block" / name
        link.parent.mkdir(parents=True, exist_ok=True)
        at.mkdir(parents=True, exist_ok=True)
        link.symlink_to(at)
        for key, value in {"size": "4096", "dev": "259:0", **files}.items():
            path = at / key.replace("__", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{value}\n")
        return at


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sys:
    monkeypatch.setattr(drive_sys, "ROOT", tmp_path)
    return Sys(tmp_path)


def nvme(machine: Sys, transport: str = "pcie") -> Path:
    controller = machine.top / "sys/devices/pci0000:00/0000:01:00.0/nvme/nvme0"
    controller.mkdir(parents=True, exist_ok=True)
    for key, value in (("transport", transport), ("model", "Samsung SSD 990 PRO 2TB     "),
                       ("serial", "S7KHNJ0W123456A     ")):  # fmt: skip
        (controller / key).write_text(f"{value}\n")
    for key, value in (("current_link_speed", "8.0 GT/s PCIe"), ("current_link_width", "2"),
                       ("max_link_speed", "16.0 GT/s PCIe"), ("max_link_width", "4")):  # fmt: skip
        (controller.parents[1] / key).write_text(f"{value}\n")
    at = machine.disk("nvme0n1", "pci0000:00/0000:01:00.0/nvme/nvme0/nvme0n1",
                      wwid="eui.0025385b71b00001")  # fmt: skip
    (at / "device").symlink_to(controller)
    return at


def test_an_nvme_drive(machine: Sys) -> None:
    nvme(machine)
    found = drive_sys.identity("nvme0n1")
    assert found["model"] == "Samsung SSD 990 PRO 2TB" and found["serial"] == "S7KHNJ0W123456A"
    assert found["wwn"] == "eui.0025385b71b00001"
    assert drive_sys.transport("nvme0n1") == "nvme"
    assert drive_sys.pcie("nvme0n1") == {
        "address": "0000:01:00.0", "speed_gts": 8.0, "max_speed_gts": 16.0, "width": 2,
        "max_width": 4,
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["tcp", "rdma", "fc", "loop"])
def test_nvme_over_a_network_is_no_drive_of_this_host(machine: Sys, kind: str) -> None:
    nvme(machine, kind)
    assert drive_sys.transport("nvme0n1") == f"nvme-{kind}"
    assert drive_sys.transport("nvme0n1") not in drive_probe.LOCAL


def test_nvme_with_native_multipath_lists_its_controllers(machine: Sys) -> None:
    subsystem = machine.top / "sys/devices/virtual/nvme-subsystem/nvme-subsys0"
    for name, kind in (("nvme0", "pcie"), ("nvme1", "tcp")):
        at = machine.top / "sys/devices/x" / name
        at.mkdir(parents=True)
        (at / "transport").write_text(kind)
        subsystem.mkdir(parents=True, exist_ok=True)
        (subsystem / name).symlink_to(at)
    at = machine.disk("nvme0n1", "virtual/nvme-subsystem/nvme-subsys0/nvme0n1")
    (at / "device").symlink_to(subsystem)
    assert [path.name for path in drive_sys.controllers("nvme0n1")] == ["nvme0", "nvme1"]
    assert drive_sys.transport("nvme0n1") == "nvme-tcp"


@pytest.mark.parametrize(
    ("way", "name", "kind"),
    [
        ("pci0000:00/0000:00:17.0/ata1/host0/target0:0:0/0:0:0:0/block/sda", "sda", "sata"),
        ("pci0000:00/usb2/2-1/2-1:1.0/host6/target6:0:0/6:0:0:0/block/sdb", "sdb", "usb"),
        ("platform/host3/session1/target3:0:0/3:0:0:1/block/sdc", "sdc", "iscsi"),
        ("pci0000:00/host7/rport-7:0-2/target7:0:0/7:0:0:0/block/sdd", "sdd", "fc"),
        ("pci0000:00/host0/port-0:0/end_device-0:0/target/0:0:0:0/block/sde", "sde", "sas"),
        ("pci0000:00/virtio2/host2/target2:0:0/2:0:0:0/block/sdf", "sdf", "scsi"),
        ("pci0000:00/virtio3/block/vda", "vda", "virtio"),
        ("platform/mmc_host/mmc0/mmc0:0001/block/mmcblk0", "mmcblk0", "mmc"),
        ("vbd-51712/block/xvda", "xvda", "xen"),
    ],
)
def test_transports(machine: Sys, way: str, name: str, kind: str) -> None:
    machine.disk(name, way)
    assert drive_sys.transport(name) == kind
    assert (kind in drive_probe.LOCAL) == (kind not in ("iscsi", "fc"))


def test_a_scsi_drive_has_its_serial_from_the_page_of_the_drive(machine: Sys) -> None:
    at = machine.disk("sda", "ata1/block/sda", device__model="CT500MX500SSD1  ",
                      device__wwid="naa.500a0751e295abcd")  # fmt: skip
    (at / "device/vpd_pg80").write_bytes(b"\x00\x80\x00\x14        2012E295ABCD")
    found = drive_sys.identity("sda")
    assert (found["model"], found["serial"], found["wwn"]) == (
        "CT500MX500SSD1", "2012E295ABCD", "naa.500a0751e295abcd"
    )  # fmt: skip


def test_zeros_and_blanks_are_no_identity(machine: Sys) -> None:
    machine.disk("vda", "virtio1/block/vda", serial="   ", wwid="___")
    found = drive_sys.identity("vda")
    assert (found["serial"], found["wwn"], found["by_id"]) == (None, None, None)


def test_zoned_drives_and_layers_are_told(machine: Sys) -> None:
    machine.disk("sda", "ata1/block/sda", queue__zoned="host-managed")
    for name in ("dm-0", "md127", "zram0", "sr0", "nbd0", "drbd1", "mmcblk0boot0", "md_d1"):
        machine.disk(name, f"virtual/block/{name}")
        assert drive_probe.NO_DRIVE.match(name) and not drive_probe.is_listed(name)
    machine.disk("nvme0c0n1", "x/nvme0c0n1", hidden="1")
    assert not drive_probe.is_listed("nvme0c0n1"), "a path of a drive is not the drive"
    machine.disk("mmcblk0", "mmc0/block/mmcblk0")
    assert drive_probe.is_listed("mmcblk0")
    machine.disk("sdz", "ata2/block/sdz", size="0")
    assert drive_probe.is_listed("sda") and not drive_probe.is_listed("sdz")
    why: list[str] = []
    device = drive_probe._device("sda", why)
    assert device is not None and device["zoned"] == "host-managed"


def test_the_system_is_found_through_every_layer(machine: Sys) -> None:
    top = machine.top
    disk = machine.disk("sda", "ata1/block/sda", dev="8:0")
    part = disk / "sda2"
    part.mkdir()
    for key, value in (("partition", "2"), ("dev", "8:2"), ("size", "2048")):
        (part / key).write_text(value)
    (top / "sys/class/block/sda2").symlink_to(part)
    raid = machine.disk("md0", "virtual/block/md0", dev="9:0", md__level="raid1")
    volume = machine.disk("dm-0", "virtual/block/dm-0", dev="253:0", dm__uuid="LVM-abc")
    for lower, upper, name in ((part, raid, "md0"), (raid, volume, "dm-0")):
        (lower / "holders").mkdir()
        (lower / "holders" / name).symlink_to(upper)
        (upper / "slaves").mkdir()
        (upper / "slaves" / lower.name).symlink_to(lower)
    assert set(drive_sys.below("dm-0")) == {"dm-0", "md0", "sda2", "sda"}
    assert drive_sys.above("sda") == ["sda", "sda2", "md0", "dm-0"]
    assert drive_probe._layer("md0") == "md raid1" and drive_probe._layer("dm-0") == "lvm"


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"read_only": True}, "read_only"),
        ({"hidden": True}, "hidden"),
        ({"zoned": "host-managed"}, "zoned"),
        *[({"transport": way}, "fabric") for way in ("iscsi", "fc", "nvme-tcp", "ib", "unknown")],
        ({"wwn": None, "serial": None, "by_id": None}, "no_identity"),
        ({}, None),
        *[({"wwn": None, "serial": None, "by_id": None, key: "x"}, None)
          for key in ("wwn", "serial", "by_id")],
    ],
)  # fmt: skip
def test_what_a_drive_is_stands_against_it(changes: dict[str, Any], kind: str | None) -> None:
    device = {"transport": "nvme", "read_only": False, "hidden": False, "zoned": "none",
              "wwn": "eui.01", "serial": "S1", "by_id": "nvme-x", **changes}  # fmt: skip
    context = drive_probe.Context()
    looks = (drive_probe._state, drive_probe._identity)
    found = [one for look in looks for one, _ in look("nvme9n1", device, context)]
    assert found == ([kind] if kind else [])


def test_the_drive_of_the_running_system_is_told() -> None:
    device = {"transport": "nvme", "read_only": False, "hidden": False, "zoned": "none"}
    context = drive_probe.Context()
    context.system = {"nvme0n1"}
    assert [k for k, _ in drive_probe._state("nvme0n1", device, context)] == ["system"]
    assert not list(drive_probe._state("nvme1n1", device, context))


SMART = bytes([4]) + struct.pack("<H", 273 + 52) + bytes([90, 10, 7])


def test_the_health_log_is_read_as_the_specification_lays_it_out() -> None:
    log = bytearray(512)
    log[:6] = SMART
    for at, value in ((48, 3), (128, 1000), (144, 5), (160, 2)):
        log[at : at + 16] = value.to_bytes(16, "little")
    assert drive_sys.parse_smart(bytes(log)) == {
        "critical_warning": 4, "temperature_c": 52, "available_spare_percent": 90,
        "spare_threshold_percent": 10, "percentage_used": 7, "bytes_written": 1_536_000,
        "power_on_hours": 1000, "unsafe_shutdowns": 5, "media_errors": 2,
    }  # fmt: skip


def test_a_critical_warning_and_a_shared_namespace_are_findings(
    machine: Sys, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvme(machine)
    device = {"transport": "nvme", "path": str(machine.top / "sys/class/block/nvme0n1/dev")}
    log = bytearray(512)
    log[:6] = SMART
    monkeypatch.setattr(drive_sys, "smart", lambda fd: drive_sys.parse_smart(bytes(log)))
    monkeypatch.setattr(drive_sys, "shareable", lambda fd, nsid: True)
    found = dict(drive_probe._nvme("nvme0n1", device, None))  # type: ignore[arg-type]
    assert found["health"] == "critical warning 0x4: reliability is degraded"
    assert "shareable" in found

    def broken(fd: int) -> None:
        raise OSError(errno.ENOTTY, "Inappropriate ioctl")

    monkeypatch.setattr(drive_sys, "smart", broken)
    with pytest.raises(OSError, match="NVMe health"):
        dict(drive_probe._nvme("nvme0n1", device, None))  # type: ignore[arg-type]


# ---- the whole, as it is sent


@as_root
def test_the_scripts_run_from_a_directory_of_their_own(loops: Loops, tmp_path: Path) -> None:
    loop = loops.make("blank", 64 * MIB)
    place, inside = tmp_path / "scripts", tmp_path / "drive"
    place.mkdir()
    inside.mkdir()
    (inside / "file").touch()
    for name in DRIVE_SCRIPTS:
        shutil.copy(SCRIPTS / name, place / name)
    done = subprocess.run(
        ["/usr/bin/python3", place / "report_drives.py", "--mount", inside, "--state", tmp_path],
        capture_output=True, text=True, check=True, cwd="/",
    )  # fmt: skip
    found = parse_drives(done.stdout)
    assert str(loop.node) in [d.device.path for d in found.drives if d.device]
    where = found.mount_point.data
    assert where is not None and (where.kind, where.entries) == ("directory", ["file"])
    assert (where.mounts, found.journal.status) == ([], "absent")
    assert sorted(path.name for path in place.iterdir()) == sorted(DRIVE_SCRIPTS), (
        "no bytecode is left"
    )


@as_root
def test_a_mount_point_is_told_with_what_is_mounted_on_it(loops: Loops, tmp_path: Path) -> None:
    loop = loops.make("ext4", 64 * MIB)
    run("mkfs.ext4", "-q", loop.node)
    run("mount", loop.node, tmp_path)
    try:
        found = report_drives.mount_point(str(tmp_path))
    finally:
        run("umount", tmp_path)
    assert loop.node.name in found["drives"] and found["filesystem"] == "ext4"
    assert found["entries"] == ["lost+found"] and found["mounts"] == [f"{loop.node} (ext4)"]
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    assert report_drives.mount_point(str(tmp_path / "link"))["kind"] == "other"
    assert report_drives.mount_point(str(tmp_path / "none"))["kind"] == "none"


def test_a_host_without_sysfs_says_so(machine: Sys, capsys: pytest.CaptureFixture[str]) -> None:
    assert report_drives.main([]) == 1
    assert "cannot be listed" in capsys.readouterr().err


def test_what_blkid_prints_is_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def says(code: int, out: str) -> Any:
        monkeypatch.setattr(drive_content, "_tool", lambda argv, fine: (code, out))
        return drive_content.blkid("/dev/x")

    assert says(0, "DEVNAME=/dev/x\nLABEL=a\\ b\\=c\nTYPE=xfs\n") == {
        "LABEL": "a b=c",
        "TYPE": "xfs",
    }
    assert says(2, "") == {}
    assert "contradict" in says(8, "")["TYPE"]
    with pytest.raises(OSError, match="nothing that can be read"):
        says(0, "")
