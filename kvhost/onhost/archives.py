"""Unpacks a tar of somebody else's: everything stays inside its directory, or it is refused."""

from __future__ import annotations

import os
import posixpath
import shutil
import tarfile
from collections.abc import Iterator
from typing import IO

BLOCK = 1 << 20


class BadArchive(Exception):
    """Why, for people."""


def place_of(name: str, top: str) -> str:
    """Where a member goes. Raises BadArchive for one that would leave ``top``, also by a link."""
    clean = posixpath.normpath(name)
    if name.startswith("/") or clean.startswith("..") or "\0" in name:
        raise BadArchive(f"the archive has a member outside of itself: {name!r}")
    parts = clean.split("/")
    for count in range(1, len(parts)):
        if os.path.islink(os.path.join(top, *parts[:count])):
            raise BadArchive(f"the archive has a member behind a link: {name!r}")
    return os.path.join(top, clean)


def unpack(stream: IO[bytes], top: str) -> None:
    """Files, directories and links that stay inside; modes 755 and 644. Raises BadArchive, OSError,
    tarfile.TarError.

    By hand: tarfile's own filter for this is missing in Python 3.9.0 to 3.9.16, 3.10.0 to 3.10.11
    and 3.11.0 to 3.11.3.
    """
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        for member in archive:
            path = place_of(member.name, top)
            if member.isdir():
                os.makedirs(path, 0o755, exist_ok=True)
                continue
            os.makedirs(os.path.dirname(path), 0o755, exist_ok=True)
            if os.path.lexists(path):
                raise BadArchive(f"the archive has {member.name!r} twice")
            if member.issym():
                os.symlink(member.linkname, path)
            elif member.islnk():
                os.link(place_of(member.linkname, top), path, follow_symlinks=False)
            elif member.isreg():
                source = archive.extractfile(member)
                with open(path, "xb") as handle:
                    shutil.copyfileobj(source or stream, handle, BLOCK)
                os.chmod(path, 0o755 if member.mode & 0o111 else 0o644)
            else:
                raise BadArchive(f"the archive has a member that is no file: {member.name!r}")
    for link in links_below(top):
        target = os.path.realpath(link)
        if target != os.path.realpath(top) and not target.startswith(os.path.realpath(top) + "/"):
            raise BadArchive(
                f"the archive has a link that leads out of it: {link[len(top) + 1 :]!r}"
            )


def links_below(top: str) -> Iterator[str]:
    for folder, folders, names in os.walk(top):
        for name in (*folders, *names):
            path = os.path.join(folder, name)
            if os.path.islink(path):
                yield path
