"""Where the bundle of a host lies, which is installed from without a network."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploys.common.context import Run
from deploys.common.send import Sent
from kvhost.engine.bundle import files_to_send, find_bundle
from kvhost.onhost.bundle_check import MANIFEST, PACKAGES, read_manifest


@dataclass(frozen=True)
class Place:
    """Where a bundle lies: on the host, and on the controller if it has to be sent from there."""

    on_host: str
    source: Path | None = None
    #: what the manifest says, where the controller can read it
    manifest: dict[str, Any] | None = None


def bundle_place(run: Run) -> Place | None:
    """None where no bundle is set. One that cannot be read has no manifest: the plan has refused
    it, unless everything is installed already."""
    setting = run.settings.engine_bundle
    if setting is None:
        return None
    if setting.startswith("host:"):
        return Place(setting.removeprefix("host:"))
    source = find_bundle(Path(setting).expanduser(), run.lock).resolve()
    try:
        manifest = read_manifest(str(source))
        digest = hashlib.sha256((source / MANIFEST).read_bytes()).hexdigest()
    except (OSError, ValueError):
        manifest, digest = None, "gone"
    if run.host.startswith("@local"):
        return Place(str(source), None, manifest)  # this machine's own: read where it lies
    return Place(f"{run.paths.bundle}/{digest[:16]}", source, manifest)


def files_of(source: Path, *, packages: bool = False) -> list[Sent]:
    """The files of a bundle, or its Debian packages alone. Raises OSError, ValueError."""
    return [
        Sent(path, name, row["bytes"], row["sha256"])
        for path, name, row in files_to_send(source)
        if name.startswith(f"{PACKAGES}/") or not packages
    ]
