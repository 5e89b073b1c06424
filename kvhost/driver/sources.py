"""Which packages make a driver, and which repository has them. Pure.

Ubuntu: the distribution's server packages (packages.ubuntu.com, source nvidia-graphics-drivers-
580-server); with Secure Boot the modules that Canonical has signed. Debian: NVIDIA's repository,
compute-only as its Driver Installation Guide has it, with the key pinned by its fingerprint, which
apt enforces. None of it was tried on a real repository (docs/testing.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvhost.driver.cards import Flavour
from kvhost.report import Os
from kvhost.settings import Settings

_CUDA = "https://developer.download.nvidia.com/compute/cuda/repos"


@dataclass(frozen=True)
class Source:
    """A flat apt repository; `key` is its public key in armour, or `key_url` where it is fetched
    from and `fingerprint` the only one that is taken."""

    uri: str
    key: str | None = None
    key_url: str | None = None
    fingerprint: str | None = None

    def as_order(self) -> dict[str, Any]:
        return {
            "uri": self.uri,
            "key": self.key,
            "key_url": self.key_url,
            "fingerprint": self.fingerprint,
        }


class MirrorError(ValueError):
    """The key of driver_repository cannot be used; for people."""


def mirror_of(settings: Settings) -> Source | None:
    """driver_repository with its key, read on the controller; None without. Raises MirrorError."""
    if settings.driver_repository is None or settings.driver_repository_key is None:
        return None
    where = Path(settings.driver_repository_key).expanduser()
    try:
        key = where.read_text(encoding="ascii")
    except (OSError, ValueError) as why:
        raise MirrorError(f"driver_repository_key: {where} cannot be read: {why}") from None
    if "PRIVATE KEY BLOCK" in key or "-----BEGIN PGP PUBLIC KEY BLOCK-----" not in key:
        raise MirrorError(
            f"driver_repository_key: {where} is no public key in ASCII armour "
            "(gpg --armor --export KEY)"
        )
    return Source(settings.driver_repository, key=key)


#: (os id, version, machine) -> NVIDIA's repository, and the file and fingerprint of its key
NVIDIA: dict[tuple[str, str, str], tuple[str, str, str]] = {
    ("debian", "12", "x86_64"): (
        "debian12/x86_64", "3bf863cc.pub", "EB693B3035CD5710E231E123A4B469963BF863CC",
    ),
    ("debian", "13", "x86_64"): (
        "debian13/x86_64", "8793F200.pub", "02182E60104FCDC26EAE1B8597A5D4CB8793F200",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Packages:
    """`main`: whose versions are the driver's; `signed`: the modules come signed, and are not
    compiled on the host; `source` None: what the host has in its lists already."""

    main: str
    names: tuple[str, ...]
    signed: bool
    source: Source | None
    words: str


def like_ubuntu(host: Os) -> bool:
    return host.id == "ubuntu" or "ubuntu" in host.id_like


def packages(
    host: Os,
    machine: str,
    kernel: str,
    branch: int,
    flavour: Flavour,
    *,
    secure_boot: bool,
    switches: bool,
    mirror: Source | None,
) -> Packages | None:
    """What to install on this host; None where no repository is known for it.

    ``secure_boot``: only what is signed already will load. ``switches``: the GPUs are joined by
    NVSwitch. ``mirror``: the repository of the settings.
    """
    is_open = flavour != "proprietary"
    if like_ubuntu(host):
        suffix = "-open" if is_open else ""
        kind = f"{branch}-server"
        modules: tuple[str, ...] = (f"nvidia-headless-{kind}{suffix}",)
        if secure_boot:
            modules = (
                f"nvidia-headless-no-dkms-{kind}{suffix}",
                f"linux-modules-nvidia-{kind}{suffix}-{kernel}",
            )
        names = (*modules, f"nvidia-utils-{kind}")
        fabric: tuple[str, ...] = (f"nvidia-fabricmanager-{branch}",) if switches else ()
        where = mirror.uri if mirror else "the distribution's repository"
        return Packages(f"nvidia-utils-{kind}", (*names, *fabric), secure_boot, mirror, where)
    known = NVIDIA.get((host.id, (host.version_id or "").split(".")[0], machine))
    if mirror is None and known is None:
        return None
    if mirror is None and known is not None:
        path, key, fingerprint = known
        url = f"{_CUDA}/{path}/"
        mirror = Source(url, key_url=url + key, fingerprint=fingerprint)
    assert mirror is not None
    parts = (
        "nvidia-driver-cuda",
        "nvidia-kernel-open-dkms" if is_open else "nvidia-kernel-dkms",
        "nvidia-persistenced",
        *(("nvidia-fabricmanager",) if switches else ()),
    )
    return Packages("nvidia-driver-cuda", parts, False, mirror, mirror.uri)
