"""Hosts with a real systemd: containers of systemd-nspawn, each with a network of its own.

    with Lab() as lab:
        host = lab.host("one")             # booted; sshd answers
        host.ssh("sudo", "systemctl", "…")  # the way of pyinfra: user deploy, sudo without password
        host.root("systemctl", "…")         # the short way, as root
        host.reboot()

What they have: systemd as PID 1, journald, sshd, native speed, their own /tmp and /dev/shm. What
they lack: udev, a kernel of their own (modules, sysctls of vm.*; boot_id is nspawn's, a new one at
each boot), a way to any network but the lab's. Everything of a lab is named after the process that
made it; one
whose process is gone is removed by the next. Needs root.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from tests.lab import cgroups
from tests.lab.nspawn_image import LabError, image, lab_dir, sh, ssh_key

USER = "deploy"
NETWORK = "10.77.0"
#: nspawn's exit when the host asked for a reboot, without a service manager that starts it again
REBOOT = 133


def until(done: Callable[[], object], seconds: float, what: str) -> None:
    """Raises LabError when it does not come true in time."""
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            raise LabError(f"not within {seconds:.0f} s: {what}")
        time.sleep(0.1)


def children(pid: int) -> list[int]:
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    return [int(word) for word in text.split()]


def ticks(pid: int) -> int:
    """Start time of a process, field 22 of /proc/PID/stat; 0 when there is none, or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return 0 if fields[0] in "ZX" else int(fields[19])
    except (OSError, ValueError, IndexError):
        return 0


@dataclass
class Host:
    """One machine of the lab. Methods raise LabError when it does not do as told."""

    lab: Lab
    name: str
    number: int
    #: target on the host -> directory or device of this machine; read-only
    binds_ro: Mapping[str, str]
    #: the same, writable
    binds: Mapping[str, str]
    process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"{NETWORK}.{10 + self.number}"

    @property
    def folder(self) -> Path:
        return self.lab.folder / self.name

    @property
    def tree(self) -> Path:
        """Its root file system, as seen from here (mounts made inside are not)."""
        return self.folder / "root"

    @property
    def lower(self) -> str:
        """What it starts from: directories that are read only, the upper first."""
        return str(self.lab.image)

    @property
    def netns(self) -> str:
        return f"{self.lab.name}-{self.number}"

    @property
    def console(self) -> str:
        return (self.folder / "console.log").read_text(errors="replace")

    # Its life

    def make(self) -> None:
        self.make_disk()
        self.make_network()

    def make_disk(self) -> None:
        """A root file system as the image has it."""
        for name in ("root", "upper", "work"):
            (self.folder / name).mkdir(parents=True)
        options = f"lowerdir={self.lower},upperdir={self.folder}/upper,workdir={self.folder}/work"
        sh("mount", "-t", "overlay", "overlay", "-o", options, str(self.tree))
        (self.tree / "etc/hostname").write_text(self.name + "\n")
        (self.tree / "etc/hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {self.name}\n")
        keys = self.tree / f"home/{USER}/.ssh/authorized_keys"
        keys.write_text(self.lab.key.with_suffix(".pub").read_text())

    def make_network(self) -> None:
        net, end = self.netns, f"v{self.number}"
        sh("ip", "netns", "add", net)
        sh("ip", "link", "add", end, "netns", self.lab.name, "type", "veth",
           "peer", "name", "host0", "netns", net)  # fmt: skip
        sh("ip", "-n", self.lab.name, "link", "set", end, "master", "br0", "up")
        sh("ip", "-n", net, "addr", "add", f"{self.address}/24", "dev", "host0")
        sh("ip", "-n", net, "link", "set", "host0", "up")
        sh("ip", "-n", net, "link", "set", "lo", "up")

    def argv(self) -> list[str]:
        binds = [f"--bind-ro={source}:{target}" for target, source in self.binds_ro.items()]
        binds += [f"--bind={source}:{target}" for target, source in self.binds.items()]
        # a PID namespace around nspawn: the host's systemd survives nspawn's death, but not this
        return [
            "unshare", "--pid", "--fork", "--kill-child=KILL", "--mount-proc",
            "systemd-nspawn", "-q", "-b", "-D", str(self.tree), "-M", self.netns,
            "--hostname", self.name,
            "--register=no", "--keep-unit", "--resolv-conf=off", "--timezone=off",
            "--capability=CAP_NET_ADMIN",  # of its own network: what nspawn gives a private one
            "--link-journal=no", "--console=pipe",
            f"--network-namespace-path=/run/netns/{self.netns}", *binds,
        ]  # fmt: skip

    def boot(self, wait: bool = True) -> None:
        """Starts it; a reboot that it asks for itself is done until it is stopped."""
        die = ["setpriv", "--pdeathsig", "KILL"]  # no host outlives its lab
        # a shell of its own enters the group, for nspawn wants it without another process
        one = f"{cgroups.entering(self.netns)} && exec {shlex.join([*die, *self.argv()])}"
        loop = (
            f"while :; do echo boot >> {self.folder}/boots; sh -c {shlex.quote(one)}; "
            f"code=$?; [ $code -eq {REBOOT} ] || exit $code; done"
        )
        with (self.folder / "console.log").open("ab") as log:
            self.process = subprocess.Popen(
                [*die, "sh", "-c", loop], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        if wait:
            self.wait()

    @property
    def boots(self) -> int:
        """How often it was booted."""
        try:
            return len((self.folder / "boots").read_text().splitlines())
        except FileNotFoundError:
            return 0

    @property
    def leader(self) -> int:
        """Its PID 1, in numbers of this machine; 0 while there is none."""
        shell = self.process.pid if self.process else 0
        pids = [shell]
        for _ in ("unshare", "nspawn", "PID 1 of the host"):
            pids = [child for pid in pids for child in children(pid)]
        return pids[0] if pids else 0

    def banner(self) -> bool:
        """Whether sshd answers."""
        script = "import socket,sys; print(socket.create_connection((sys.argv[1], 22), 1).recv(4))"
        done = self.lab.run("timeout", "2", "/usr/bin/python3", "-c", script, self.address)
        return "SSH-" in done.stdout

    def lets_in(self) -> bool:
        shown = "test -e /run/nologin || echo open"
        return self.alive() and "open" in self.root("sh", "-c", shown, ok=False)

    def wait(self, seconds: float = 60) -> None:
        """Until sshd answers, and lets users in: while it boots pam_nologin lets none."""
        self.alive()
        try:
            until(lambda: self.alive() and self.banner(), seconds, f"sshd of {self.name}")
            until(self.lets_in, seconds, f"users may log in to {self.name}")
        except LabError as error:
            failed = self.root("systemctl", "--failed", ok=False) if self.leader else ""
            raise LabError(f"{error}\n{self.console[-2000:]}{failed}") from error

    def alive(self) -> bool:
        if self.process is None or self.process.poll() is not None:
            raise LabError(f"{self.name} does not run:\n{self.console[-2000:]}")
        return True

    def signal(self, number: int) -> None:
        leader = self.leader
        if not leader:
            raise LabError(f"{self.name} has no PID 1")
        os.kill(leader, number)

    def reboot(self, wait: bool = True, seconds: float = 240) -> None:
        """In order, as by `systemctl reboot`: services are stopped first."""
        before = self.boots
        self.signal(signal.SIGRTMIN + 5)  # systemd(1)
        until(lambda: self.alive() and self.boots > before, seconds, f"{self.name} comes back")
        if wait:
            self.wait()

    def power_cut(self) -> None:
        """Everything in it is killed at once (what was written is in the page cache, not lost)."""
        if self.process is not None and self.process.poll() is None:
            if self.leader:
                self.signal(signal.SIGKILL)
            else:  # it is just booting: nspawn takes its children with it
                for pid in children(self.process.pid):
                    os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait(20)

    def stop(self, seconds: float = 120) -> None:
        """In order, as by `systemctl poweroff`."""
        self.signal(signal.SIGRTMIN + 4)
        assert self.process is not None
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired as error:
            raise LabError(f"{self.name} did not stop in {seconds:.0f} s") from error

    def remove(self) -> None:
        self.power_cut()
        unmake(self.netns, self.tree)

    # What is done on it

    def ssh_argv(self, *words: str) -> list[str]:
        options = ("BatchMode=yes", f"UserKnownHostsFile={self.lab.known_hosts}", "LogLevel=ERROR")
        given = [part for option in options for part in ("-o", option)]
        target = f"{USER}@{self.address}"
        return self.lab.argv("ssh", *given, "-i", str(self.lab.key), target, shlex.join(words))

    def ssh(self, *words: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        """A command as the user deploy, over SSH."""
        return run(self.ssh_argv(*words), timeout)

    def root_argv(self, *words: str) -> list[str]:
        leader = self.leader
        if not leader:
            raise LabError(f"{self.name} has no PID 1")
        clean = ("env", "-i", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root", "LC_ALL=C.UTF-8")
        return ["nsenter", "-t", str(leader), "-m", "-u", "-i", "-n", "-p", "--", *clean, *words]

    def root(self, *words: str, timeout: float = 120, ok: bool = True) -> str:
        """Stdout of a command as root in it. Raises LabError if it fails, or with ok=False not."""
        done = run(self.root_argv(*words), timeout)
        if ok and done.returncode != 0:
            said = (done.stderr or done.stdout).strip()[-2000:]
            raise LabError(f"{self.name}: {shlex.join(words)[:300]} ({done.returncode}): {said}")
        return done.stdout

    def in_network(self, *words: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        """A program of this machine in the host's network: what it reaches on loopback."""
        return run(["ip", "netns", "exec", self.netns, *words], timeout)

    def read(self, path: str) -> str:
        return self.root("cat", path)

    def write(self, path: str, text: str) -> None:
        sh(*self.root_argv("sh", "-c", f"cat > {shlex.quote(path)}"), stdin=text)


def run(argv: list[str], timeout: float) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            argv, capture_output=True, text=True, timeout=timeout, check=False,
            stdin=subprocess.DEVNULL, errors="replace",
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise LabError(f"not within {timeout:.0f} s: {shlex.join(argv)[-300:]}") from error


def unmake(netns: str, tree: Path | None) -> None:
    if tree is not None and tree.exists() and os.path.ismount(tree):
        # a process of the host may be a moment behind its PID 1
        until(lambda: run(["umount", "-R", str(tree)], 60).returncode == 0, 20, f"umount {tree}")
    if netns:
        until(lambda: cgroups.remove(netns), 20, f"the control group {netns} is empty")
        if Path("/run/netns", netns).exists():
            sh("ip", "netns", "delete", netns)


@dataclass
class Lab:
    """Some hosts in a network of their own. A context; at its end all of them are gone."""

    image: Path = field(init=False)
    key: Path = field(init=False)
    hosts: list[Host] = field(default_factory=list)
    kind: type[Host] = Host

    @property
    def name(self) -> str:
        return f"kvlab-{os.getpid()}-{id(self) % 9973}"

    @property
    def folder(self) -> Path:
        return lab_dir() / "labs" / self.name

    @property
    def known_hosts(self) -> Path:
        return self.folder / "known_hosts"

    def __enter__(self) -> Lab:
        self.image, self.key = image(), ssh_key()
        sweep()
        self.folder.mkdir(parents=True)
        (self.folder / "owner").write_text(str(ticks(os.getpid())))
        sh("ip", "netns", "add", self.name)
        for line in (
            "link set lo up",
            "link add br0 type bridge",
            f"addr add {NETWORK}.1/24 dev br0",
            "link set br0 up",
        ):
            sh("ip", "-n", self.name, *line.split())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            for host in self.hosts:
                host.remove()
        finally:
            unmake(self.name, None)
            shutil.rmtree(self.folder)

    def host(
        self,
        name: str,
        *,
        binds_ro: Mapping[str, str] | None = None,
        binds: Mapping[str, str] | None = None,
        boot: bool = True,
    ) -> Host:
        """A new host. The binds: path on the host -> directory or device of this machine."""
        if not re.fullmatch(r"[a-z][a-z0-9-]{0,20}", name):
            raise LabError(f"no name for a host: {name!r}")
        made = self.kind(self, name, len(self.hosts) + 1, binds_ro or {}, binds or {})
        self.hosts.append(made)
        made.make()
        keys = sorted((self.image / "etc/ssh").glob("ssh_host_*_key.pub"))
        with self.known_hosts.open("a") as known:
            for key in keys:
                known.write(f"{made.address} {' '.join(key.read_text().split()[:2])}\n")
        if boot:
            made.boot()
        return made

    def argv(self, *words: str) -> list[str]:
        """A command of this machine in the lab's network, from where the hosts are reached."""
        return ["ip", "netns", "exec", self.name, *words]

    def run(self, *words: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        return run(self.argv(*words), timeout)

    def inventory(self, path: Path, **data: object) -> Path:
        """Writes an inventory of pyinfra with all hosts: by SSH, as deploy, with sudo."""
        rows = []
        for host in self.hosts:
            given = {
                "ssh_hostname": host.address,
                "ssh_user": USER,
                "ssh_key": str(self.key),
                "ssh_known_hosts_file": str(self.known_hosts),
                "ssh_strict_host_key_checking": "yes",
                "_sudo": True,
                **data,
            }
            rows.append(f"    ({host.name!r}, {given!r}),\n")
        path.write_text('"""Hosts of the lab."""\n\nlab_hosts = [\n' + "".join(rows) + "]\n")
        return path


def sweep() -> None:
    """Removes what labs left whose process is gone; their hosts ended with it."""
    top = lab_dir() / "labs"
    for folder in top.iterdir() if top.exists() else []:
        try:
            pid = int(folder.name.split("-")[1])
            owner = int((folder / "owner").read_text() or 0)
        except (OSError, ValueError, IndexError):
            continue  # just being made, or not ours
        if ticks(pid) == owner:
            continue
        for tree in folder.glob("*/root"):
            unmake("", tree)
        for space in Path("/run/netns").glob(f"{folder.name}*"):
            unmake(space.name, None)
        shutil.rmtree(folder)
