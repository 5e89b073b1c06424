"""The measurement on NVMe drives of a virtual machine: one that is worth it, and one held slow."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvhost.drives.worth import judge_drive, parse_measured
from tests.lab.qemu import Machine
from tests.lab.recipe import install
from tests.lab.recipe import run as tool
from tests.lab.vm import Lab

pytestmark = [
    pytest.mark.runners,
    pytest.mark.full,
    pytest.mark.skipif(os.geteuid() != 0, reason="the image of the test host is made as root"),
]
ONHOST = Path(__file__).parents[1] / "kvhost" / "onhost"
MIB = 1 << 20
SLOW = 8_000_000


def make_tools(lab: Lab) -> None:
    """An ext4 with this machine's fio and the libraries that the guest lacks; no network is there
    to install it with."""
    install(("fio",))
    fio = shutil.which("fio")
    assert fio is not None
    folder = lab.folder / "tools"
    (folder / "lib").mkdir(parents=True)
    shutil.copy(fio, folder / "fio")
    told = subprocess.run(["ldd", fio], capture_output=True, text=True, check=True).stdout
    for line in told.splitlines():
        _, arrow, rest = line.partition(" => ")
        path = rest.split(" ")[0]
        if arrow and not Path(path).name.startswith(("libc.so", "libm.so", "ld-")):
            shutil.copy(path, folder / "lib")
    image = lab.drive("TOOLS", "512M")
    tool("mkfs.ext4", "-q", "-F", "-d", folder, image.image)


@pytest.fixture(scope="module")
def host() -> Iterator[Machine]:
    with Lab() as lab:
        make_tools(lab)
        machine = lab.host("measure", drives=("FAST", "SLOW", lab.drive("TOOLS", "512M")))
        names = machine.names()
        machine.ssh(f"mkdir -p /opt/t /opt/m && mount -o ro /dev/{names['TOOLS']} /opt/t")
        machine.put('#!/bin/sh\nLD_LIBRARY_PATH=/opt/t/lib exec /opt/t/fio "$@"\n',
                    "/usr/bin/fio", "0755")  # fmt: skip
        for name in ("drive_measure", "drive_health", "drive_sys", "bounded"):
            machine.put((ONHOST / f"{name}.py").read_text(), f"/opt/m/{name}.py", "0755")
        for serial in ("FAST", "SLOW"):
            at = f"/srv/{serial}"
            machine.ssh(
                f"mkdir {at} && mkfs.xfs -q /dev/{names[serial]} && mount /dev/{names[serial]} {at}"
                f" && install -d -m 700 -o nobody {at}/tier"
            )
        limit = {"bps": SLOW} | dict.fromkeys(("bps_rd", "bps_wr", "iops", "iops_rd", "iops_wr"), 0)
        machine.monitor({"execute": "block_set_io_throttle",
                         "arguments": {"id": "nvme-slot1", **limit}})  # fmt: skip
        yield machine


@pytest.mark.parametrize(("serial", "worth"), [("FAST", True), ("SLOW", False)])
def test_a_drive_of_its_own_is_measured_and_judged(host: Machine, serial: str, worth: bool) -> None:
    """An engine of 1500 tokens/s, 16 KiB a token: 25 MB/s are as fast as computing."""
    told = host.ssh(
        f"python3 /opt/m/drive_measure.py --tier /srv/{serial}/tier --user nobody --memory /root/m"
        f" --write-bytes {48 * MIB} --file-bytes {4 * MIB} --keep-bytes 0 --seconds 20"
    )
    found = parse_measured(json.loads(told.stdout))
    (disk,) = found.after
    assert (disk.transport, disk.serial, found.filesystem) == ("nvme", serial, "xfs")
    assert disk.health is not None and disk.thermal is not None and disk.why is None
    before = found.before[0].health
    assert before is not None and disk.health.bytes_written > before.bytes_written
    judged = judge_drive(found, bytes_per_token=16384, prefill=1500.0, tokens=32768)
    print(judged.words, found.read_files.bytes_per_s, found.write.bytes_per_s)
    assert judged.worth is worth, judged.words
    if not worth:
        assert found.read_files.bytes_per_s < 1.3 * SLOW
    assert host.ssh(f"ls -A /srv/{serial}/tier").stdout == ""
