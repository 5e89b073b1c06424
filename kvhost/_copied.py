"""Which files of this repository a working copy is made of. setup.py asks it too, so that nothing
of kvhost is imported here.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

#: beside the *.py files at the top
FOLDERS = ("deploys", "group_data", "inventories", "locks", "templates")
#: at the top of the repository, and no part of a copy
NOT_COPIED = frozenset({"setup.py"})


def files(top: Path) -> Iterator[str]:
    """Paths below ``top`` of what belongs into a copy."""
    for path in sorted(top.glob("*.py")):
        if path.name not in NOT_COPIED:
            yield path.name
    for folder in FOLDERS:
        for path in sorted((top / folder).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".new":
                yield path.relative_to(top).as_posix()
