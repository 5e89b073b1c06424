"""Debian packages that a host needs."""

from __future__ import annotations

from typing import Literal

from kvhost.settings import Settings

Filesystem = Literal["xfs", "ext4", "btrfs"]

FILESYSTEM_PACKAGES: dict[Filesystem, str] = {
    "xfs": "xfsprogs",
    "ext4": "e2fsprogs",
    "btrfs": "btrfs-progs",
}


def drive_packages(settings: Settings) -> tuple[str, ...]:
    """Debian packages that the claimed drive needs; none where no drive is claimed."""
    if not settings.claims_a_drive:
        return ()
    return (
        FILESYSTEM_PACKAGES[settings.drive_filesystem],
        *(["mdadm"] if settings.drive_count > 1 else []),
        *(["cryptsetup-bin"] if settings.drive_encrypt else []),
    )


def runner_packages(settings: Settings) -> tuple[str, ...]:
    """Debian packages of the runner: a compiler, where it is built on the host."""
    if settings.runner == "llama_server":
        # the program of the user's own may be linked to libgomp too
        return ("libgomp1",) if settings.llama_binary is not None else ("g++",)
    return ("libnuma1",)


def needed_packages(python: str, *, gpu: bool = False) -> tuple[str, ...]:
    """Debian packages, without the runner's; a Python outside /usr/bin brings its venv and headers.

    With a GPU, Triton compiles at run time: a compiler and Python.h (vllm-project/vllm#27890).
    """
    name = python.rpartition("/")[2] if python.startswith("/usr/bin/") else None
    own = (f"{name}-venv", *([f"{name}-dev"] if gpu else [])) if name else ()
    return ("ca-certificates", "util-linux", *(["gcc", "libc6-dev"] * gpu), *own)
