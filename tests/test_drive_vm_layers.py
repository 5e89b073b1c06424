"""Members of md, LVM, LUKS and bcache, in use by the kernel and idle: refused, and kept whole."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.drive_vm_tools import storage
from tests.lab.qemu import Drive, Machine
from tests.lab.vm import Lab

pytestmark = [
    pytest.mark.full,
    pytest.mark.drives,
    pytest.mark.skipif(os.geteuid() != 0, reason="the test hosts need root"),
]


@dataclass(frozen=True)
class Layer:
    """``up``, ``down``: shell lines; {d} is the drive."""

    serial: str
    make: str
    up: str
    down: str


LAYERS = (
    Layer("LAYERMD", "mdadm -CR /dev/md/a --assume-clean -l1 -n2 {d} missing", "true",
          "mdadm --stop /dev/md/a"),
    Layer("LAYERLVM", "pvcreate -q {d} && vgcreate -q vga {d} && lvcreate -q -n lva -L 32M vga",
          "vgchange -ay vga", "vgchange -an vga"),
    Layer("LAYERLUKS", "echo -n pw > /root/pw && cryptsetup luksFormat -q --pbkdf pbkdf2"
          " --pbkdf-force-iterations 1000 {d} /root/pw",
          "cryptsetup open --key-file /root/pw {d} secret", "cryptsetup close secret"),
    Layer("LAYERBCACHE", "modprobe bcache; make-bcache -B {d}",
          "for i in 1 2 3 4 5 6 7 8 9; do [ -e /dev/bcache0 ] && break;"
          " echo {d} > /sys/fs/bcache/register; sleep 1; done; test -e /dev/bcache0",
          "echo 1 > /sys/block/bcache0/bcache/stop; sleep 2; test ! -e /dev/bcache0"),
)  # fmt: skip


@dataclass
class Made:
    host: Machine
    drives: dict[str, Drive]
    folder: Path

    def node(self, layer: Layer) -> str:
        return f"/dev/{self.host.names()[layer.serial]}"

    def digests(self) -> dict[str, str]:
        self.host.ssh("sync")
        return {serial: drive.digest() for serial, drive in self.drives.items()}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    with Lab() as lab:
        drives = {one.serial: lab.drive(one.serial, "128M") for one in LAYERS}
        host = lab.host("layers", list(drives.values()))
        found = Made(host, drives, tmp_path_factory.mktemp("layers"))
        for layer in LAYERS:
            for line in (layer.make, layer.up):
                host.ssh(line.format(d=found.node(layer)))
        host.ssh("udevadm settle; sleep 2")  # md marks itself clean when it was idle for a moment
        yield found


def judge(made: Made, code: str, word: str) -> None:
    before = made.digests()
    for layer in LAYERS:
        # one after the other: several reports at once are too much for one emulated core
        ran = storage(made.folder, {made.host: {"drive_serial": layer.serial}})
        assert ran.code != 0
        said = ran.refusals(made.host.name)
        assert code in said, (layer.serial, said or ran.text)
        assert word in said[code].split("all drives here")[0], said
    assert made.digests() == before


def test_in_use(made: Made) -> None:
    judge(made, "drive_in_use", "holder")


def test_idle(made: Made) -> None:
    for layer in LAYERS:
        made.host.ssh(layer.down.format(d=made.node(layer)))
    told = json.loads(made.host.ssh("lsblk -J").stdout)
    assert not any("children" in one for one in told["blockdevices"]), told
    judge(made, "drive_not_blank", "signature")
