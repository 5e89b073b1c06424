"""What a host's files below state/ must be for a plan to read them. Pure, and never raises.

They lie on a host, and may be anything: what is not as kvhost writes it counts as unreadable.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class _Shape:
    """``needed``: keys with text in them. ``texts``, ``objects``: keys that may lack; a text may
    be null."""

    file: str
    needed: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    objects: tuple[str, ...] = ()


_MANIFEST = ("env",), ("time",)
#: part of the report -> what it must be
SHAPES: Mapping[str, _Shape] = {
    "receipt": _Shape(
        "receipt.json",
        texts=("runner",),
        objects=("engine", "files", "model", "namespace", "scripts", "system"),
    ),
    "verified": _Shape("verified.json", texts=("persisted", "time")),
    "drive": _Shape("drive.json", texts=("mount",), objects=("drive",)),
    "good": _Shape("good/manifest.json", *_MANIFEST),
    "previous": _Shape("previous/manifest.json", *_MANIFEST),
    "failed": _Shape(
        "failed.json", texts=("lock", "settings", "time", "why", "env", "back_to", "state")
    ),
}


def trouble(name: str, data: Any) -> str | None:
    """Why a part is not what kvhost writes there; None if it is."""
    shape = SHAPES[name]
    what = f"state/{shape.file} is not as kvhost writes it: "
    if not isinstance(data, dict):
        return f"{what}no object"
    for key in shape.needed:
        if not isinstance(data.get(key), str) or not data[key]:
            return f"{what}no {key}"
    for key in shape.texts:
        if not isinstance(data.get(key), str | None):
            return f"{what}{key} is no text"
    for key in shape.objects:
        if not isinstance(data.get(key, {}), dict):
            return f"{what}{key} is no object"
    return None
