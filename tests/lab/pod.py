"""A rented container on a host of the lab: no systemd, sshd as its first process, a volume.

What is lost when it is stopped is what its provider throws away: the whole disk but the volume.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from tests.lab.nspawn import Host, Lab, unmake
from tests.lab.nspawn_image import sh

SSH_PORT = 40022
VOLUME = "/workspace"
#: as the image of a provider starts: sshd, and nothing that would start services
FIRST = f"mkdir -p /run/sshd && exec /usr/sbin/sshd -D -e -p 22 -p {SSH_PORT}"


class Pod(Host):
    """One container. Each of its disks has SSH host keys of its own."""

    def argv(self) -> list[str]:
        words = [word for word in super().argv() if word != "-b"]
        return [*words, "/bin/sh", "-c", FIRST]

    def make_disk(self) -> None:
        super().make_disk()
        root = self.tree / "root/.ssh"
        root.mkdir(mode=0o700, exist_ok=True)
        keys = root / "authorized_keys"
        keys.write_text(self.lab.key.with_suffix(".pub").read_text())
        keys.chmod(0o600)
        for old in (self.tree / "etc/ssh").glob("ssh_host_*"):
            old.unlink()
        sh("ssh-keygen", "-q", "-A", "-f", str(self.tree))

    def throw_away(self) -> None:
        """Stopped: its disk is gone, the volume is not."""
        self.power_cut()
        unmake("", self.tree)
        for name in ("root", "upper", "work"):
            shutil.rmtree(self.folder / name)

    def start_again(self) -> None:
        """On another machine, as far as it can tell: a new disk from the same image."""
        self.make_disk()
        self.boot()


def pod(lab: Lab, name: str, volume: Path, binds_ro: Mapping[str, str] | None = None) -> Pod:
    """A booted container with ``volume`` of this machine at /workspace. The lab: Lab(kind=Pod)."""
    volume.mkdir(parents=True, exist_ok=True)
    made = lab.host(name, binds={VOLUME: str(volume)}, binds_ro=binds_ro)
    assert isinstance(made, Pod)
    return made
