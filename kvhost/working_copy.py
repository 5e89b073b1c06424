"""Where the deploys, locks and templates lie that this command works with, and how a copy is made.

A user's own repository holds a working copy (`kvhost init DIR`): all of it may be changed there,
and is under the user's version control. The installed wheel holds what copies are made from.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path

from kvhost import __version__
from kvhost._copied import files

MARK = ".kvhost/copy.json"
PACKAGE = Path(__file__).resolve().parent
_FLEET = """\
# Hosts, groups and settings: docs/fleets.md. `kvhost inventory add "ssh root@… -p …"` adds a host.
# Every command in this directory takes these hosts, and none while there is none here: the machine
# that you are on is --inventory inventory.py, or a host "@local": {address: "@local"}.
settings: {}        # of all hosts, for example cache_limit_gib: 200
groups: {}          # NAME: {settings: {…}}
hosts: {}
"""
_IGNORE = """\
.venv/
__pycache__/
pyinfra-debug.log
/.kvhost/candidate*
/.*.lock
/reports/
/receipts/
/runs/
/bundles/
/logs/
/secrets/
/keys/
*.pem
"""
#: written once, and the user's from then on
OWN = {"fleet.yaml": _FLEET, ".gitignore": _IGNORE}


class CopyError(RuntimeError):
    """Why there is no working copy, or none can be made; for people."""


@dataclass
class Made:
    """What `make` did: paths below the directory."""

    written: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    #: changed by the user and by the new version: left, the new one beside it as NAME.new
    beside: list[str] = field(default_factory=list)


def source() -> Path:
    """The folder that copies are made from: of the wheel, or the repository itself."""
    packed = PACKAGE / "_copy"
    if packed.is_dir():
        return packed
    if (PACKAGE.parent / "deploy.py").is_file():
        return PACKAGE.parent
    raise CopyError("this installation of kvhost is not whole: install its wheel again")


def root(start: Path | None = None) -> Path:
    """The working copy that ``start`` (the current directory) lies in, else the repository.

    Raises CopyError where there is neither.
    """
    here = (start or Path.cwd()).resolve()
    for folder in (here, *here.parents):
        if (folder / MARK).is_file():
            return folder
    if (PACKAGE.parent / "deploy.py").is_file():
        return PACKAGE.parent
    raise CopyError(
        f"no working copy in {here} or above it: kvhost init DIR makes one, then cd DIR"
    )


def check_version(folder: Path) -> None:
    """Raises CopyError if a copy was made by another version than runs now."""
    mark = folder / MARK
    if not mark.exists():
        return
    made_by, _ = _read_mark(mark)
    if made_by != __version__:
        raise CopyError(
            f"the working copy {folder} is of kvhost {made_by}, and this is {__version__}: "
            f"kvhost init {folder} brings it up to date (what you changed is left as it is)"
        )


def make(folder: Path) -> Made:
    """Makes a working copy, or brings one up to date. Raises CopyError before it writes anything.

    In a directory that is none yet no file is replaced. In one that is, a file that the user
    changed is left.
    """
    top = source()
    new = {name: path.read_bytes() for name, path in files(top)}
    mark = folder / MARK
    before = _read_mark(mark)[1] if mark.exists() else {}
    if not mark.exists():
        _check_free(folder, new)
    made = Made()
    for name, content in new.items():
        _one(folder, name, content, before.get(name), made)
    for name in sorted(set(before) - set(new)):
        path = folder / name
        if path.is_file() and _digest(path.read_bytes()) == before[name]:
            path.unlink()
            made.removed.append(name)
    for name, text in OWN.items():
        if not (folder / name).exists():
            (folder / name).write_text(text, encoding="utf-8")
            made.written.append(name)
    mark.parent.mkdir(exist_ok=True)
    digests = {name: _digest(content) for name, content in new.items()}
    told = {"version": __version__, "files": digests}
    mark.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    return made


def _check_free(folder: Path, new: dict[str, bytes]) -> None:
    if folder.exists() and not folder.is_dir():
        raise CopyError(f"{folder} is not a directory")
    taken = [
        name
        for name, content in new.items()
        if (folder / name).exists() and (folder / name).read_bytes() != content
    ]
    if taken:
        more = f" and {len(taken) - 5} more" if len(taken) > 5 else ""
        raise CopyError(
            f"{folder} holds files that would be replaced: {', '.join(taken[:5])}{more}. "
            "Take an empty directory, or move them away"
        )


def _one(folder: Path, name: str, content: bytes, before: str | None, made: Made) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    there = path.read_bytes() if path.is_file() else None
    if there == content:
        return
    if there is not None and before is not None and _digest(there) != before:
        if _digest(content) != before:  # else only the user changed it
            path.with_name(f"{path.name}.new").write_bytes(content)
            made.beside.append(name)
        return
    path.write_bytes(content)
    made.written.append(name)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _read_mark(path: Path) -> tuple[str, dict[str, str]]:
    """Version, and file -> sha256. Raises CopyError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return str(found["version"]), dict(found["files"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CopyError(f"{path} is not what kvhost init wrote: {error}") from None
