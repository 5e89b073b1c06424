"""One machine under QEMU in software emulation: start, monitor, drives, power cut, SSH."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.lab.recipe import COMMAND_LINE, CPU, MEMORY_MIB, LabError, run

DIGESTS = Path(__file__).with_name("digests.py")
SLOTS = 6
BOOT_TIMEOUT_S = 240


@dataclass(frozen=True)
class Drive:
    """An NVMe drive of a test host: a sparse raw file, so that its bytes can be read from outside.

    A raw file also makes killing the emulator an honest power cut: what the guest had written is in
    the file, what it had not is lost, and there is no metadata of an image format in between.
    """

    serial: str
    image: Path
    size: str = "2G"
    block_size: int = 512

    def create(self) -> Drive:
        if not self.image.exists():
            run("truncate", "-s", self.size, self.image)
        return self

    def digest(self) -> str:
        """sha256 of all bytes, by a process of its own."""
        return run(sys.executable, "-I", DIGESTS, self.image).split()[0]


@dataclass(eq=False)
class Machine:
    """A virtual machine; ``folder`` holds its disk, sockets and logs.

    ``slots`` maps the number of a PCIe port (0 to 5) to the drive in it. Names such as nvme0n1 are
    given by the guest's kernel in the order of the ports, more or less.
    """

    name: str
    address: str
    folder: Path
    image: Path
    slots: dict[int, Drive] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None

    @property
    def root_disk(self) -> Path:
        return self.folder / "root.qcow2"

    def arguments(self) -> list[str]:
        args: list[str | Path] = [
            # a test run that is killed leaves no machine behind
            "setpriv", "--pdeathsig", "KILL",
            # never a list of accelerators: /dev/kvm may be there and boot nothing
            "qemu-system-x86_64", "-name", self.name, "-machine", "q35,hpet=off",
            "-accel", "tcg,thread=multi,tb-size=128", "-cpu", CPU, "-m", str(MEMORY_MIB),
            "-smp", "1", "-display", "none", "-nodefaults", "-no-user-config",
            "-chardev", f"file,id=c0,path={self.folder}/console.log,append=on",
            "-serial", "chardev:c0",
            "-qmp", f"unix:{self.folder}/qmp,server=on,wait=off",
            "-kernel", self.image / "vmlinux", "-initrd", self.image / "initrd",
            "-append", COMMAND_LINE,
            # writeback, not unsafe: what the guest flushed is there after the emulator was killed
            "-drive", f"file={self.root_disk},if=none,id=r0,format=qcow2,cache=writeback",
            "-device", "virtio-blk-pci,drive=r0,serial=ROOT,addr=2",
            "-netdev", f"user,id=n0,hostfwd=tcp:{self.address}:22-:22",
            "-device", "virtio-net-pci,netdev=n0,romfile=,addr=3",
            "-object", "rng-random,id=g0,filename=/dev/urandom",
            "-device", "virtio-rng-pci,rng=g0,addr=4",
        ]  # fmt: skip
        for slot in range(SLOTS):
            port = (
                f"pcie-root-port,id=rp{slot},chassis={slot + 1},slot={slot + 1},addr={5 + slot:x}"
            )
            args += ["-device", port]
        return [str(arg) for arg in args]

    def start(self, *, snapshot: str | None = None) -> None:
        """Powers on, with the drives of ``slots`` in place; from a snapshot they are plugged in.

        Returns as soon as the emulator answers; see wait(). The machine ends with the thread that
        started it.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "qmp").unlink(missing_ok=True)
        args = self.arguments()
        if snapshot is None:
            for slot, drive in sorted(self.slots.items()):
                args += _cold(slot, drive)
        else:
            args += ["-loadvm", snapshot]
        with (self.folder / "qemu.log").open("ab") as log:
            self.process = subprocess.Popen(
                args, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        deadline = time.monotonic() + 30
        while not (self.folder / "qmp").exists():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise LabError(f"{self.name}: {(self.folder / 'qemu.log').read_text()[-2000:]}")
            time.sleep(0.02)
        if snapshot is not None:
            for slot, drive in sorted(self.slots.items()):
                self.plug(slot, drive)

    def monitor(self, *commands: Mapping[str, Any]) -> list[Any]:
        """Answers of QEMU's monitor. Raises LabError when it refuses one."""
        answers = []
        with socket.socket(socket.AF_UNIX) as channel:
            channel.settimeout(120)
            self._connect(channel)
            with channel.makefile("rw") as stream:
                stream.readline()  # the greeting
                for command in ({"execute": "qmp_capabilities"}, *commands):
                    stream.write(json.dumps(command) + "\n")
                    stream.flush()
                    answers.append(_answer(stream.readline, command))
        return answers[1:]

    def _connect(self, channel: socket.socket) -> None:
        """The socket's file is there a moment before anybody listens on it."""
        deadline = time.monotonic() + 10
        while True:
            try:
                channel.connect(str(self.folder / "qmp"))
                return
            except ConnectionRefusedError:
                ended = self.process is None or self.process.poll() is not None
                if ended or time.monotonic() > deadline:
                    said = (self.folder / "qemu.log").read_text()[-2000:]
                    raise LabError(f"{self.name}: the emulator does not answer: {said}") from None
            time.sleep(0.05)

    def human(self, line: str) -> str:
        """One line of the monitor for people, which has savevm. Raises LabError."""
        command = {"execute": "human-monitor-command", "arguments": {"command-line": line}}
        told = str(self.monitor(command)[0])
        if told.startswith("Error"):
            raise LabError(f"{self.name}: {line}: {told}")
        return told

    def plug(self, slot: int, drive: Drive) -> None:
        """Hot-plugs the drive."""
        drive.create()
        self.slots[slot] = drive
        self.monitor(
            {"execute": "blockdev-add", "arguments": {
                "driver": "raw", "node-name": f"d{slot}",
                "file": {"driver": "file", "filename": str(drive.image)},
            }},
            {"execute": "device_add", "arguments": {
                "driver": "nvme", "id": f"nvme-slot{slot}", "drive": f"d{slot}",
                "serial": drive.serial, "bus": f"rp{slot}",
                "logical_block_size": drive.block_size, "physical_block_size": drive.block_size,
            }},
        )  # fmt: skip

    def kill(self) -> None:
        """Power cut: the emulator is killed, with all that was only in the guest's memory."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait(30)
        self.process = None

    def rewire(self, slots: dict[int, Drive]) -> None:
        """Power off by a cut, other drives in the slots, power on, wait for sshd."""
        self.kill()
        self.slots = slots
        self.start()
        self.wait()

    def reboot(self) -> None:
        """An orderly reboot; waits until another boot answers."""
        before = self.ssh("cat /proc/sys/kernel/random/boot_id; sync").stdout.strip()
        self.ssh("systemctl reboot --no-block", check=False)
        self._another_boot(before)

    def reset(self) -> None:
        """Power cut with the same drives: the guest begins anew without having been told."""
        before = self.ssh("cat /proc/sys/kernel/random/boot_id").stdout.strip()
        self.monitor({"execute": "system_reset"})
        self._another_boot(before)

    def _another_boot(self, before: str) -> None:
        deadline = time.monotonic() + BOOT_TIMEOUT_S
        while time.monotonic() < deadline:
            self.wait(deadline - time.monotonic())
            told = self.ssh("cat /proc/sys/kernel/random/boot_id", check=False)
            if told.returncode == 0 and told.stdout.strip() not in ("", before):
                return
            time.sleep(0.5)
        raise LabError(f"{self.name}: it did not boot again; see {self.folder}/console.log")

    def wait(self, timeout_s: float = BOOT_TIMEOUT_S) -> None:
        """Until sshd speaks. The emulator takes connections before the guest listens: only the
        banner counts."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            try:
                with socket.create_connection((self.address, 22), 2) as channel:
                    channel.settimeout(3)
                    if channel.recv(4) == b"SSH-":
                        return
            except OSError:
                if self.process is not None and self.process.poll() is not None:
                    raise LabError(f"{self.name}: the emulator ended") from None
            time.sleep(0.2)
        raise LabError(f"{self.name}: no sshd in {timeout_s:.0f} s; see {self.folder}/console.log")

    def ssh(self, command: str, *, check: bool = True, user: str = "root",
            timeout_s: float = 300) -> subprocess.CompletedProcess[str]:  # fmt: skip
        """Runs a shell command in the guest. Raises LabError if it fails and ``check`` is set."""
        done = subprocess.run(
            ["ssh", "-F", "none", "-q", "-i", str(self.image / "key"), *_options(),
             f"{user}@{self.address}", command],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=timeout_s, check=False,
        )  # fmt: skip
        if check and done.returncode:
            raise LabError(
                f"{self.name}: {command!r} ended with {done.returncode}: "
                f"{done.stdout[-1500:]}{done.stderr[-1500:]}"
            )
        return done

    def put(self, content: str, path: str, mode: str = "0600") -> None:
        """Writes a file in the guest."""
        done = subprocess.run(
            ["ssh", "-F", "none", "-q", "-i", str(self.image / "key"), *_options(),
             f"root@{self.address}", f"umask 077; cat > {path} && chmod {mode} {path}"],
            input=content, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        if done.returncode:
            raise LabError(f"{self.name}: could not write {path}: {done.stderr}")

    def names(self) -> dict[str, str]:
        """Serial -> kernel name (nvme0n1) of the guest's NVMe drives."""
        told = self.ssh("lsblk -dno NAME,SERIAL -I 259").stdout
        return {serial: name for name, serial in (line.split() for line in told.splitlines())}

    def stop(self) -> None:
        self.kill()


def _cold(slot: int, drive: Drive) -> Sequence[str]:
    drive.create()
    return [
        "-blockdev",
        f"driver=raw,node-name=d{slot},file.driver=file,file.filename={drive.image}",
        "-device",
        f"nvme,id=nvme-slot{slot},drive=d{slot},serial={drive.serial},bus=rp{slot},"
        f"logical_block_size={drive.block_size},physical_block_size={drive.block_size}",
    ]


def _options() -> list[str]:
    options = ("StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "BatchMode=yes",
               "ConnectTimeout=20", "ServerAliveInterval=10", "ServerAliveCountMax=3")  # fmt: skip
    return [part for option in options for part in ("-o", option)]


def _answer(readline: Any, command: Mapping[str, Any]) -> Any:
    while True:
        line = readline()
        if not line:
            raise LabError(f"the monitor hung up at {command['execute']}")
        told = json.loads(line)
        if "error" in told:
            raise LabError(f"{command}: {told['error']['desc']}")
        if "return" in told:
            return told["return"]


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
