"""What the last run asked a host, kept by the controller: runs/asked/HOST.json.

The next run asks it as soon as the host is connected to, while it still loads what it needs to tell
what it must ask. It decides nothing: of the answers, those count whose question is asked again.
Paths and commands that only look; no secret.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from kvhost.basics import host_folder


@dataclass(frozen=True)
class LastAsked:
    """``report``: arguments of onhost/report.py; ``looks``: as onhost/looks.py takes them."""

    report: tuple[str, ...]
    looks: tuple[tuple[str, ...], ...]
    lock: str


def path_of(runs: Path, host: str) -> Path:
    return runs / "asked" / f"{host_folder(host)}.json"


def load(runs: Path, host: str) -> LastAsked | None:
    """None where there is none, or it is of no use: then nothing is asked ahead."""
    try:
        data = json.loads(path_of(runs, host).read_text(encoding="utf-8"))
        looks = tuple(tuple(map(str, look)) for look in data["looks"])
        return LastAsked(tuple(map(str, data["report"])), looks, str(data["lock"]))
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None


def keep(runs: Path, host: str, asked: LastAsked) -> None:
    """Writes it, if it is another than the one there. Raises OSError."""
    if load(runs, host) == asked:
        return
    path = path_of(runs, host)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(asdict(asked), file)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
