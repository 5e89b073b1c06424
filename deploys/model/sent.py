"""A model that lies on the controller: sent, proven by its digest, and only then in its place."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from pyinfra.api import StringCommand, operation

from deploys.common.looks import ask_json
from deploys.common.made import digest_here, folder_of
from deploys.common.operations import Commands, converges, refuse, shown
from deploys.common.send import Sent, send
from kvhost.onhost.bundle_check import file_digest
from kvhost.onhost.model_digest import SUFFIXES
from kvhost.schema.values import SENT

MARKER = ".kvhost-complete.json"


def files_of(source: str) -> list[Sent]:
    """The files that decide what the model computes: those of its digest. Raises OSError."""
    return [
        Sent(path, path.name, path.stat().st_size, file_digest(str(path)))
        for path in sorted(folder_of(source).iterdir())
        if path.is_file() and path.suffix in SUFFIXES and not path.name.startswith(".")
    ]


@operation()
@converges
def sent_model(source: str, here: str, script: str, state: str) -> Commands:
    """A model of the controller's at its place on the host, whole.

    + source: the setting model_source
    + here: its directory on the host
    + script: model_digest.py on the host
    + state: directory of root's on the host for what is remembered of digests
    """
    wanted, why = digest_here(source)
    if not wanted:
        yield refuse(f"model_source: {why}")
        return
    answer = ask_json(("cat", f"{here}/{MARKER}"))
    found: Any = answer["data"] if answer["status"] == "ok" else None
    if isinstance(found, dict) and found.get("digest") == wanted:
        return
    draft, old = f"{here}.partial", f"{here}.old"
    yield send("the model", lambda: files_of(source), draft, str(Path(here).parent))
    # what lies there must be that model: its digest is taken again, from the host's disk
    marker = json.dumps({"source": SENT, "digest": wanted})
    proof = shlex.join(("python3", script, "--model", draft, "--cache", f"{state}/sent.json"))
    told = "it is not the model that was sent, or more lies there: remove"
    yield shown(
        f'rm -f {draft}/{MARKER}; said=$({proof}) && case "$said" in *{wanted}*) ;; '
        f'*) echo "{told} {draft}" >&2; false;; esac'
    )
    yield StringCommand(
        f"echo {shlex.quote(marker)} > {draft}/{MARKER} && sync -f {draft} && rm -rf {old} && "
        f"if [ -e {here} ]; then mv -T {here} {old}; fi && mv -T {draft} {here} && rm -rf {old}"
    )
