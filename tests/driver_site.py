"""A host of the lab that looks like one with a GPU, and repositories with doubles of its driver.

Doubles: the packages (NVIDIA's names and dependencies, a few bytes each), the building of the
module (a file at its place), the kernel's files of a GPU (over /sys/bus/pci and /proc/driver, by a
unit, at boot, as the kernel would lay them out: nouveau has the card until it is kept away and
a module lies ready). apt, dpkg, gpgv, systemd, sshd and the reboot are real.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.e2e_tools import Done, make_site
from tests.lab.apt_repo import Deb, Repo, served
from tests.lab.nspawn import Host, Lab
from tests.lab.nspawn_image import sh
from tests.test_driver import smi_xml

BASE = "/var/lib/kvhost"
VERSION, OLDER, LATEST = "580.95.05", "580.65.06", "590.48.01"
KERNEL = os.uname().release
MODULE = f"/lib/modules/{KERNEL}/updates/dkms/nvidia.ko"

#: "kernel": before sshd, so that nobody sees the host without it
UNIT = """[Unit]
Before=ssh.service
[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/usr/local/sbin/gpu-double
[Install]
WantedBy=multi-user.target
"""
GPU = f"""#!/bin/sh -e
mount --bind /dev/null /proc/1/environ  # which says that this is a container
mount -t tmpfs none /sys/bus/pci
card=/sys/bus/pci/devices/0000:01:00.0
mkdir -p "$card" /sys/bus/pci/drivers/nouveau /sys/bus/pci/drivers/nvidia
echo 0x10de > $card/vendor; echo 0x030000 > $card/class; echo 0x2684 > $card/device
mount -t tmpfs none /proc/driver
if [ ! -e /etc/no-nouveau ] && ! grep -qs '^blacklist nouveau' /etc/modprobe.d/*.conf; then
    ln -s ../../drivers/nouveau $card/driver
elif [ -s {MODULE} ]; then
    ln -s ../../drivers/nvidia $card/driver
    mkdir /proc/driver/nvidia
    line='NVRM version: NVIDIA UNIX Open Kernel Module for x86_64'
    echo "$line  $(cat {MODULE})  Release Build" > /proc/driver/nvidia/version
fi
"""
SMI = """#!/bin/sh
[ -e /proc/driver/nvidia/version ] || { echo 'NVIDIA-SMI has failed'; exit 9; }
cat /usr/share/nvidia-double.xml
"""
#: as dkms does it: for every kernel whose headers are there
DKMS = """for build in /lib/modules/*/build; do
    [ -d "$build" ] || continue
    mkdir -p "${{build%/build}}/updates/dkms"
    echo {version} > "${{build%/build}}/updates/dkms/nvidia.ko"
done
"""


def driver_debs(version: str) -> tuple[Deb, ...]:
    """What a host gets of NVIDIA's repository for Debian, compute-only."""
    full = f"{version}-1"
    smi = {"driver": version, "cuda": "13.0",
           "gpus": [["NVIDIA GeForce RTX 4090", "Ada Lovelace", "0x2684", 24564]]}  # fmt: skip
    library = f"usr/lib/x86_64-linux-gnu/libnvidia-ml.so.{version}"
    daemon = "lib/systemd/system/nvidia-persistenced.service"
    service = (
        "[Service]\nType=oneshot\nRemainAfterExit=yes\nExecStart=/bin/true\n"
        "[Install]\nWantedBy=multi-user.target\n"
    )
    same = f"nvidia-smi (= {full}), libcuda1 (= {full}), libnvidia-ml1 (= {full})"
    return (
        Deb("nvidia-driver-cuda", full, same),
        Deb("libcuda1", full),
        Deb("libnvidia-ml1", full, files={library: "a double\n"}),
        Deb("nvidia-smi", full, f"libnvidia-ml1 (= {full})",
            {"usr/bin/nvidia-smi": SMI, "usr/share/nvidia-double.xml": smi_xml(smi)}),
        Deb("nvidia-persistenced", full, files={daemon: service}),
        Deb("nvidia-kernel-open-dkms", full, "dkms", postinst=DKMS.format(version=version),
            conflicts="nvidia-kernel-dkms"),
        Deb("nvidia-kernel-dkms", full, "dkms", postinst=DKMS.format(version=version),
            conflicts="nvidia-kernel-open-dkms"),
    )  # fmt: skip


#: the distribution's: what the stage host installs on a GPU host, headers, and a bystander
DISTRIBUTION = (
    *(Deb(name, "1.0") for name in ("gcc", "libc6-dev", "python3.11-dev", "dkms")),
    Deb(f"linux-headers-{KERNEL}", "1.0", files={f"lib/modules/{KERNEL}/build/Makefile": "\n"}),
    Deb("bystander", "1.0"),
)


class DriverSite:
    """A copy of the repository as the controller, the repositories, and one host."""

    def __init__(self, lab: Lab, folder: Path, address: str) -> None:
        self.lab, self.folder, self.address = lab, folder, address
        self.copy = make_site(folder / "controller")
        debs = [deb for version in (VERSION, OLDER, LATEST) for deb in driver_debs(version)]
        self.vendor = Repo(folder / "served/vendor", tuple(debs))
        self.other = Repo(folder / "served/other", driver_debs(VERSION))
        self.distribution = Repo(folder / "served/debian", DISTRIBUTION)
        self.key = self.copy.home / "vendor.asc"
        self.key.write_text(self.vendor.key)
        self.host = self.new_host("gpu")
        self.inventory = lab.inventory(folder / "hosts.py")

    def new_host(self, name: str, *, nouveau: bool = True) -> Host:
        host = self.lab.host(name, boot=False)
        tree = host.tree
        (tree / "etc/apt/sources.list").write_text("")
        for old in (tree / "etc/apt/sources.list.d").iterdir():
            old.unlink()
        (tree / "etc/apt/keyrings").mkdir(exist_ok=True)
        (tree / "etc/apt/keyrings/lab.asc").write_text(self.distribution.key)
        (tree / "etc/apt/sources.list.d/lab.sources").write_text(
            f"Types: deb\nURIs: {self.address}debian/files/\nSuites: /\n"
            "Signed-By: /etc/apt/keyrings/lab.asc\n"
        )
        program = tree / "usr/local/sbin/gpu-double"
        program.write_text(GPU)
        program.chmod(0o755)
        units = tree / "etc/systemd/system"
        (units / "gpu-double.service").write_text(UNIT)
        (units / "multi-user.target.wants").mkdir(exist_ok=True)
        (units / "multi-user.target.wants/gpu-double.service").symlink_to("../gpu-double.service")
        if not nouveau:
            (tree / "etc/no-nouveau").write_text("")
        host.boot()
        return host

    @property
    def data(self) -> dict[str, str]:
        return {
            "driver_install": "true",
            "driver_repository": f"{self.address}vendor/files/",
            "driver_repository_key": str(self.key),
        }

    def pyinfra(self, *words: str, script: str = "driver.py", **data: str) -> Done:
        """`pyinfra hosts.py driver.py`, over SSH as an unprivileged user."""
        given = [w for key, value in data.items() for w in ("--data", f"{key}={value}")]
        program = Path(sys.executable).with_name("pyinfra")
        argv = self.lab.argv(str(program), str(self.inventory), script, "-y", *words)
        done = subprocess.run(
            [*argv, *given], cwd=self.copy.repo, text=True, timeout=300, check=False,
            env=self.copy.own_env, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        return Done(done.returncode, done.stdout)


def versions(host: Host) -> dict[str, tuple[str, bool]]:
    """Installed package -> (version, held), of the driver, and the bystander."""
    said = host.root("dpkg-query", "-W", "-f=${Package} ${Version} ${Status}\\n")
    rows = [line.split() for line in said.splitlines()]
    return {
        row[0]: (row[1], row[2] == "hold") for row in rows
        if row[4] == "installed" and ("nvidia" in row[0] or row[0] in ("libcuda1", "bystander"))
    }  # fmt: skip


@contextlib.contextmanager
def driver_site(folder: Path) -> Iterator[DriverSite]:
    sh("mkdir", "-p", str(folder / "served"))
    with Lab() as lab, served(lab, folder / "served") as address:
        yield DriverSite(lab, folder, address)
