"""Which files of this repository a working copy is made of. setup.py asks it too, so that nothing
of kvhost is imported here.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

#: at the top; a list, for an inventory of a clone's user may lie there too
TOP = (
    "config.py",
    "deploy.py",
    "driver.py",
    "grow.py",
    "release.py",
    "remove.py",
    "shared.py",
    "storage.py",
    "verify.py",
)
FOLDERS = ("deploys", "locks", "templates")
#: What a user edits: the settings and addresses of one fleet are never those of another, so these
#: come from `pristine/` where there is one (a clone), never from where they are edited.
EDITED = ("group_data", "inventories", "inventory.py")
PRISTINE = "pristine"


def files(top: Path) -> Iterator[tuple[str, Path]]:
    """What belongs into a copy: its path there, and the file below ``top`` that it is made from."""
    for name in TOP:
        yield name, top / name
    for folder in FOLDERS:
        yield from _below(top, top / folder)
    clean = top / PRISTINE
    begin = clean if clean.is_dir() else top
    for name in EDITED:
        if (begin / name).is_dir():
            yield from _below(begin, begin / name)
        else:
            yield name, begin / name


def _below(top: Path, folder: Path) -> Iterator[tuple[str, Path]]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".new":
            yield path.relative_to(top).as_posix(), path
