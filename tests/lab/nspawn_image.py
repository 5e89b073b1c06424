"""The root file system that nspawn hosts start from: Debian 12 with what the stage host installs.

Made once and cached outside of the repository, named by the digest of its recipe. Root needed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

SUITE = "bookworm"
#: the private network of a host reaches no archive: what kvhost would install is in the image
KVHOST_NEEDS = ("libnuma1", "ca-certificates", "util-linux", "python3.11-venv")
PACKAGES = (
    *("systemd", "systemd-sysv", "dbus", "openssh-server", "sudo", "python3", *KVHOST_NEEDS),
    *("iproute2", "procps", "kmod", "e2fsprogs", "curl", "nftables"),
)
LEAVE_OUT = ("doc", "man", "locale", "info")
#: run in the new root file system, as root
SETUP = """
useradd --create-home --shell /bin/bash deploy
echo 'deploy ALL=(ALL:ALL) NOPASSWD: ALL' > /etc/sudoers.d/deploy
chmod 440 /etc/sudoers.d/deploy
install -d -m 700 -o deploy -g deploy /home/deploy/.ssh
mkdir -p /var/log/journal
: > /etc/machine-id
rm -f /var/lib/dbus/machine-id /etc/hostname
echo 'UseDNS no' > /etc/ssh/sshd_config.d/lab.conf
systemctl mask systemd-timesyncd.service apt-daily.timer apt-daily-upgrade.timer fstrim.timer
"""
#: Debian packages of the machine that the tests run on
TOOLS = {
    "systemd-nspawn": "systemd-container",
    "mmdebstrap": "mmdebstrap",
    "ip": "iproute2",
    "ssh": "openssh-client",
    "mkfs.ext4": "e2fsprogs",
    "gpg": "gpg",
    "gpg-agent": "gpg-agent",
}


class LabError(RuntimeError):
    """Why the lab cannot do it, for people."""


def lab_dir() -> Path:
    """Where images and environments are kept between runs: $KVHOST_LAB_DIR, ~/.cache/kvhost-lab."""
    given = os.environ.get("KVHOST_LAB_DIR")
    return Path(given) if given else Path.home() / ".cache" / "kvhost-lab"


def sh(*argv: str, timeout: float = 600, stdin: str | None = None) -> str:
    """Stdout of a command. Raises LabError with what it said."""
    try:
        done = subprocess.run(
            argv, input=stdin, capture_output=True, text=True, timeout=timeout, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LabError(f"{' '.join(argv)}: {error}") from error
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip()[-2000:]
        raise LabError(f"{' '.join(argv)[:300]} failed ({done.returncode}): {said}")
    return done.stdout


@contextlib.contextmanager
def only_one(folder: Path, name: str) -> Iterator[None]:
    """Holds a lock, so that two test runs do not make the same thing."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def install_tools() -> None:
    """Installs what the lab needs on this machine. Raises LabError."""
    if os.geteuid() != 0:
        raise LabError("the lab needs root: namespaces, mounts and containers")
    missing = sorted({package for program, package in TOOLS.items() if not shutil.which(program)})
    if not missing:
        return
    apt = ("apt-get", "-q", "-o", "DPkg::Lock::Timeout=300")
    sh(*apt, "update")
    sh("env", "DEBIAN_FRONTEND=noninteractive", *apt, "install", "-y", "--no-install-recommends",
       *missing)  # fmt: skip


def recipe() -> str:
    return repr((1, SUITE, PACKAGES, LEAVE_OUT, SETUP))


def image() -> Path:
    """The root file system; made now if this machine has none of this recipe. Raises LabError."""
    install_tools()
    digest = hashlib.sha256(recipe().encode()).hexdigest()[:16]
    top = lab_dir()
    root = top / f"debian-{digest}"
    with only_one(top, "image"):
        if not root.exists():
            unfinished = top / f"debian-{digest}.unfinished"
            if unfinished.exists():
                shutil.rmtree(unfinished)
            left_out = [f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in LEAVE_OUT]
            sh("mmdebstrap", "--quiet", "--variant=minbase", f"--include={','.join(PACKAGES)}",
               *left_out, f"--customize-hook=chroot \"$1\" sh -eu -c '{quoted(SETUP)}'",
               SUITE, str(unfinished))  # fmt: skip
            unfinished.rename(root)
    return root


def quoted(text: str) -> str:
    """For a place between single quotes of the shell."""
    return text.replace("'", "'\\''")


def ssh_key() -> Path:
    """The key that opens the hosts; made on this machine, never in an image."""
    path = lab_dir() / "id_ed25519"
    with only_one(lab_dir(), "key"):
        if not path.exists():
            sh("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "kvhost-lab", "-f", str(path))
    return path
