"""The image that the virtual test hosts start from, made once for each recipe.

A Debian with its own kernel, systemd, sshd and the tools of the block layer, as a qcow2 image
beside its uncompressed kernel and its initrd. It lies outside the repository, in $KVHOST_LAB_DIR or
~/.cache/kvhost-lab, in a directory named by the digest of all below that decides its content.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import lzma
import os
import re
import shutil
import struct
import subprocess
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SUITE = "bookworm"
MEMORY_MIB = 768
# the oldest model that has what a kernel of Debian 12 wants: fewer features to emulate is faster
CPU = "Nehalem"
COMMAND_LINE = "root=LABEL=labroot rw console=ttyS0 mitigations=off edd=off quiet"

TOOLS_HERE = (
    "qemu-system-x86", "qemu-utils", "mmdebstrap", "e2fsprogs", "openssh-client", "zstd", "lz4",
)  # fmt: skip
PACKAGES = (
    # not the cloud kernel: it has no bcache and no AHCI
    "linux-image-amd64", "systemd-sysv", "dbus", "libpam-systemd", "openssh-server", "udev", "kmod",
    "sudo", "python3", "python3-venv", "libnuma1", "util-linux", "ca-certificates", "iproute2",
    "procps", "pciutils", "initramfs-tools", "xfsprogs", "e2fsprogs", "btrfs-progs", "mdadm",
    "lvm2", "cryptsetup-bin", "bcache-tools", "nvme-cli", "fdisk", "gdisk",
)  # fmt: skip
INITRD_MODULES = ("virtio_pci", "virtio_blk", "ext4", "crc32c_generic", "nvme")

# what is written into the unpacked system; $1 is its root, $KEY the public key that may log in
CUSTOMISE = r"""set -e
R=$1
echo lab > $R/etc/hostname
printf '127.0.0.1 localhost lab\n::1 localhost\n' > $R/etc/hosts
printf 'LABEL=labroot / ext4 rw,relatime 0 1\n' > $R/etc/fstab
mkdir -p $R/etc/systemd/network
printf '[Match]\nName=en* eth*\n[Network]\nDHCP=ipv4\nLinkLocalAddressing=no\n' \
    > $R/etc/systemd/network/80-lab.network
chroot $R useradd -m -s /bin/bash deploy
echo 'deploy ALL=(ALL) NOPASSWD:ALL' > $R/etc/sudoers.d/deploy
chmod 440 $R/etc/sudoers.d/deploy
for home in root home/deploy; do
    mkdir -p $R/$home/.ssh
    cp "$KEY" $R/$home/.ssh/authorized_keys
    chmod 700 $R/$home/.ssh
    chmod 600 $R/$home/.ssh/authorized_keys
done
chroot $R chown -R deploy:deploy /home/deploy
printf 'UseDNS no\nPasswordAuthentication no\nMaxStartups 100\nMaxSessions 100\n' \
    > $R/etc/ssh/sshd_config.d/lab.conf
mkdir -p $R/var/lib/apt/periodic
touch $R/var/lib/apt/periodic/update-success-stamp
chroot $R systemctl -q enable systemd-networkd ssh
chroot $R systemctl -q mask apt-daily.timer apt-daily-upgrade.timer e2scrub_reap.service \
    e2scrub_all.timer fstrim.timer systemd-networkd-wait-online.service man-db.timer \
    nvmf-autoconnect.service mdcheck_start.timer mdcheck_continue.timer mdmonitor-oneshot.timer
rm -f $R/etc/machine-id
: > $R/etc/machine-id
"""


class LabError(RuntimeError):
    """The lab itself does not work; no verdict about what it was to test."""


def lab_dir() -> Path:
    given = os.environ.get("KVHOST_LAB_DIR")
    return Path(given) if given else Path.home() / ".cache" / "kvhost-lab"


def recipe_digest() -> str:
    parts = [SUITE, MEMORY_MIB, CPU, COMMAND_LINE, PACKAGES, INITRD_MODULES, CUSTOMISE]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]


def run(*argv: str | Path, log: Path | None = None, env: dict[str, str] | None = None) -> str:
    """Runs a program and returns what it printed. Raises LabError with its last words."""
    done = subprocess.run(
        [str(part) for part in argv],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
        env={**os.environ, **(env or {})},
    )
    if log is not None:
        log.write_text(done.stdout)
    if done.returncode:
        raise LabError(f"{argv[0]} ended with {done.returncode}: {done.stdout[-3000:]}")
    return done.stdout


def install(packages: tuple[str, ...]) -> None:
    """Installs those Debian packages on this machine that it lacks. Needs root."""
    missing = [name for name in packages if not _installed(name)]
    if not missing:
        return
    apt = ("apt-get", "-o", "DPkg::Lock::Timeout=300", "-qq")
    run(*apt, "update")
    run(*apt, "install", "-y", "--no-install-recommends", *missing,
        env={"DEBIAN_FRONTEND": "noninteractive"})  # fmt: skip


def _installed(package: str) -> bool:
    told = subprocess.run(
        ["dpkg-query", "-W", "-f=${db:Status-Status}", package],
        capture_output=True,
        text=True,
        check=False,
    )
    return told.stdout == "installed"


@contextmanager
def image_lock(folder: Path) -> Iterator[None]:
    """One process at a time makes the image; the others wait for it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def base_image() -> Path:
    """Directory of the image: base.qcow2, vmlinux, initrd, key. Made if it is not there yet.

    Raises LabError. The caller holds image_lock.
    """
    done = lab_dir() / recipe_digest()
    if done.is_dir():
        return done
    install(TOOLS_HERE)
    work = lab_dir() / f"{recipe_digest()}.partial"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "lab", "-f", work / "key")
    root = work / "root"
    unpack(root, work)
    kernel = max((root / "boot").glob("vmlinuz-*"))
    (work / "vmlinux").write_bytes(uncompressed_kernel(kernel.read_bytes()))
    shutil.copy(max((root / "boot").glob("initrd.img-*")), work / "initrd")
    raw = work / "base.raw"
    # mkfs copies the tree in by itself: nothing has to be mounted
    run("mkfs.ext4", "-q", "-F", "-L", "labroot", "-d", root, raw, "4G")
    run("qemu-img", "convert", "-O", "qcow2", raw, work / "base.qcow2")
    raw.unlink()
    shutil.rmtree(root)
    work.rename(done)
    return done


def unpack(root: Path, work: Path) -> None:
    """Debian with the packages and the customisation, below ``root``."""
    script = work / "customise.sh"
    script.write_text(CUSTOMISE)
    modules = " ".join(INITRD_MODULES)
    before = (
        'mkdir -p "$1/etc/initramfs-tools/conf.d" "$1/usr/share/initramfs-tools/modules.d"; '
        'echo MODULES=list > "$1/etc/initramfs-tools/conf.d/lab"; '
        f'printf "%s\\n" {modules} > "$1/usr/share/initramfs-tools/modules.d/lab"'
    )
    run(
        "mmdebstrap", "--mode=root", "--variant=minbase", f"--include={','.join(PACKAGES)}",
        '--aptopt=Acquire::Check-Valid-Until "false"', "--dpkgopt=path-exclude=/usr/share/man/*",
        "--dpkgopt=path-exclude=/usr/share/doc/*", "--dpkgopt=path-exclude=/usr/share/locale/*",
        f"--essential-hook={before}", f'--customize-hook=KEY={work}/key.pub sh {script} "$1"',
        SUITE, root, mirror(), log=work / "mmdebstrap.log",
    )  # fmt: skip


def mirror() -> str:
    """The mirror that this machine's own apt uses. Raises LabError."""
    etc = Path("/etc/apt")
    for path in sorted(etc.glob("sources.list.d/*.sources")):
        if found := re.search(r"^URIs:\s*(\S+/debian)/?\s*$", path.read_text(), re.M):
            return found[1]
    for path in (etc / "sources.list", *sorted(etc.glob("sources.list.d/*.list"))):
        pattern = r"^deb (?:\[[^]]*\] )?(\S+/debian)/? "
        if path.exists() and (found := re.search(pattern, path.read_text(), re.M)):
            return found[1]
    raise LabError("no Debian mirror in /etc/apt: the lab's image is made from the one used here")


def uncompressed_kernel(image: bytes) -> bytes:
    """The ELF inside a bzImage. QEMU enters it directly, so that no decompressor is emulated.

    Offsets: Documentation/arch/x86/boot.rst of Linux (setup_sects, payload_offset, payload_length).
    """
    setup = ((image[0x1F1] or 4) + 1) * 512
    start = setup + int(struct.unpack_from("<I", image, 0x248)[0])
    payload = image[start : start + int(struct.unpack_from("<I", image, 0x24C)[0])]
    if payload.startswith(b"\xfd7zXZ\0"):
        return lzma.LZMADecompressor().decompress(payload)
    if payload.startswith(b"\x1f\x8b"):
        return zlib.decompress(payload[:-4], 31)
    tools = {b"\x28\xb5\x2f\xfd": "zstd", b"\x02\x21\x4c\x18": "lz4"}
    tool = tools.get(payload[:4])
    if tool is None:
        raise LabError(f"the kernel is packed in an unknown way: it begins {payload[:6]!r}")
    # the last four bytes are the unpacked length, which is the kernel's own, not the packer's
    return subprocess.run([tool, "-dc"], input=payload[:-4], capture_output=True, check=True).stdout
