"""Test hosts with a kernel of their own, NVMe drives, reboots and power cuts.

    with Lab() as lab:
        host = lab.host("a", drives=["KVDRIVE1"])
        host.ssh("lsblk")
        host.reboot()

The image is made once (about a minute, see recipe.py), booted once and saved as a snapshot; a host
is a copy of it that goes on from there, in a few seconds. No KVM: everything is emulated, so a
reboot takes about half a minute. Each host listens for SSH on an address of loopback of its own.
"""

from __future__ import annotations

import shutil
import socket
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from tests.lab.qemu import Drive, Machine
from tests.lab.recipe import TOOLS_HERE, LabError, base_image, image_lock, install, lab_dir, run

SNAPSHOT = "ready"


def template() -> Path:
    """Directory of the image with template.qcow2, which holds the snapshot. Raises LabError."""
    with image_lock(lab_dir()):
        install(TOOLS_HERE)
        image = base_image()
        done = image / "template.qcow2"
        if done.exists():
            return image
        work = Path(tempfile.mkdtemp(dir=lab_dir(), prefix="template-"))
        machine = Machine("template", free_address(), work, image)
        try:
            run("qemu-img", "create", "-q", "-f", "qcow2", "-F", "qcow2", "-b",
                image / "base.qcow2", machine.root_disk)  # fmt: skip
            machine.start()
            machine.wait()
            state = machine.ssh("systemctl is-system-running --wait; sync", check=False).stdout
            if state.strip() != "running":
                failed = machine.ssh("systemctl --failed --no-legend").stdout
                raise LabError(f"the image's system is {state.strip()}: {failed}")
            # savevm refuses once an NVMe drive is there, so the template has none
            machine.human(f"savevm {SNAPSHOT}")
            machine.monitor({"execute": "quit"})
            if machine.process is not None:
                machine.process.wait(60)
            machine.root_disk.rename(done)
        finally:
            machine.stop()
            shutil.rmtree(work, ignore_errors=True)
        return image


def free_address() -> str:
    """An address 127.77.0.N on whose port 22 nothing listens. Raises LabError."""
    for last in range(1, 250):
        address = f"127.77.0.{last}"
        with socket.socket() as probe:
            try:
                probe.bind((address, 22))
            except OSError:
                continue
            return address
    raise LabError("no free address in 127.77.0.0/24")


class Lab:
    """Makes hosts, and ends all of them when it is left."""

    def __init__(self, folder: Path | None = None) -> None:
        self.image = template()
        self.folder = Path(tempfile.mkdtemp(dir=folder or lab_dir(), prefix="hosts-"))
        self.machines: list[Machine] = []

    def __enter__(self) -> Lab:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.close()

    def close(self) -> None:
        for machine in self.machines:
            machine.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def drive(self, serial: str, size: str = "2G", block_size: int = 512) -> Drive:
        """A blank drive that is in no host yet."""
        return Drive(serial, self.folder / f"{serial}.raw", size, block_size).create()

    def host(self, name: str, drives: Sequence[Drive | str] = ()) -> Machine:
        """A host that answers, with the drives in its slots 0, 1, …"""
        folder = self.folder / name
        folder.mkdir()
        made = [self.drive(one) if isinstance(one, str) else one for one in drives]
        machine = Machine(name, free_address(), folder, self.image, dict(enumerate(made)))
        # a copy, not an overlay: the snapshot is inside the file
        run("cp", "--reflink=auto", "--sparse=always", self.image / "template.qcow2",
            machine.root_disk)  # fmt: skip
        self.machines.append(machine)
        machine.start(snapshot=SNAPSHOT)
        machine.wait()
        # the clock goes on from the snapshot's time, and all hosts would share a machine-id
        machine.ssh(
            f"date -s @{time.time():.0f} >/dev/null && hostname {name}"
            f" && echo {name} >/etc/hostname"
            f" && sed -i 's/ lab$/ {name}/' /etc/hosts"
            " && rm -f /etc/machine-id && systemd-machine-id-setup >/dev/null 2>&1 && sync"
        )
        settle(machine)
        return machine


def settle(machine: Machine, timeout_s: float = 60) -> None:
    """Until the guest sees every drive of its slots. Raises LabError."""
    wanted = {drive.serial for drive in machine.slots.values()}
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if wanted <= set(machine.names()):
            machine.ssh("udevadm settle")
            return
        time.sleep(0.3)
    raise LabError(f"{machine.name}: of {sorted(wanted)} it sees {machine.names()}")
