"""A bundle's way to a host, and its proof there, before anything is installed from it."""

from __future__ import annotations

from pyinfra.api import operation

from deploys.common.bundle import Place, files_of
from deploys.common.looks import ask_json
from deploys.common.operations import Commands, converges, shown
from deploys.common.send import send


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
        yield send("the bundle", lambda: files_of(source), place.on_host, around)
    yield shown(prove)
