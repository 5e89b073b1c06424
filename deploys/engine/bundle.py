"""A bundle's way to a host, and its proof there, before anything is installed from it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from pyinfra.api import operation

from deploys.common.context import Run
from deploys.common.looks import ask_json
from deploys.common.operations import Commands, converges, shown
from deploys.common.send import Sent, send
from kvhost.bundle import files_to_send, find_bundle
from kvhost.onhost.bundle_check import MANIFEST


@dataclass(frozen=True)
class Place:
    """Where a bundle lies: on the host, and on the controller if it has to be sent from there."""

    on_host: str
    source: Path | None = None


def bundle_place(run: Run) -> Place | None:
    """None where no bundle is set. Raises OSError: it was there when the plan was made."""
    setting = run.settings.engine_bundle
    if setting is None:
        return None
    if setting.startswith("host:"):
        return Place(setting.removeprefix("host:"))
    source = find_bundle(Path(setting).expanduser(), run.lock).resolve()
    if run.host.startswith("@local"):
        return Place(str(source))  # this machine's own: read where it lies
    try:
        digest = hashlib.sha256((source / MANIFEST).read_bytes()).hexdigest()
    except FileNotFoundError:
        digest = "gone"  # no matter where everything is installed
    return Place(f"{run.paths.bundle}/{digest[:16]}", source)


@operation()
@converges
def bundle_on_host(
    place: Place,
    around: str,
    installed: tuple[tuple[str, ...], ...],
    prove: tuple[str, ...],
) -> Commands:
    """Sends what the host lacks of a bundle and has all of it verified there, unless everything
    is installed.

    + place: where it lies
    + around: directory of root's on the host for the copy
    + installed: commands that print true, or {"complete": true}
    + prove: command that fails when the bundle is not whole
    """
    answers = [ask_json(argv) for argv in installed]
    data = [answer["data"] for answer in answers if answer["status"] == "ok"]
    done = [one for one in data if one is True or (isinstance(one, dict) and one["complete"])]
    if len(done) == len(installed):
        return
    if place.source is not None:
        source = place.source
        yield send("the bundle", lambda: _files(source), place.on_host, around)
    yield shown(prove)


def _files(source: Path) -> list[Sent]:
    return [
        Sent(path, name, row["bytes"], row["sha256"]) for path, name, row in files_to_send(source)
    ]
