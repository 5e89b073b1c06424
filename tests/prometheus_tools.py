"""Debian's promtool and node_exporter: the programs alone, so that no service is started."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

from tests.lab.nspawn_image import lab_dir, only_one

PACKAGES = {"promtool": "prometheus", "prometheus-node-exporter": "prometheus-node-exporter"}


def program(name: str) -> str:
    """Path of promtool or prometheus-node-exporter, got from Debian where it is missing."""
    found = shutil.which(name)
    if found:
        return found
    top = lab_dir()
    place = top / PACKAGES[name]
    with only_one(top, PACKAGES[name]):
        if not place.exists():
            fetch(PACKAGES[name], place)
    return str(place / "usr/bin" / name)


def fetch(package: str, place: Path) -> None:
    """Unpacks a package; its scripts, which would start a service, do not run."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent) as folder:
        Path(folder).chmod(0o755)  # apt's own user writes there
        download = ("apt-get", "-q", "-o", "DPkg::Lock::Timeout=120", "download", package)
        done = subprocess.run(download, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode != 0:  # no list of packages yet
            update = ("apt-get", "-q", "-o", "DPkg::Lock::Timeout=120", "update")
            subprocess.run(update, capture_output=True, check=True)
            subprocess.run(download, cwd=folder, capture_output=True, check=True)
        (deb,) = Path(folder).glob("*.deb")
        new = Path(folder, "unpacked")
        subprocess.run(["dpkg-deb", "-x", str(deb), str(new)], check=True)
        new.replace(place)
