#!/usr/bin/env python3
"""The program of a runner that is no Python package, for engine.py, which it lies beside.

engine_program.py check --source PATH#sha256=HEX    what stands against a file of this host; JSON

It comes into an environment in one of three ways: a package of the lock whose source is built, with
the wheels of the same lock; a file of the user's own on this host, linked; a file behind a URL, as
it is or from a .tar.gz. bin/NAME of the environment links to it.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
import re
import shutil
import stat
import sys
import tarfile
import urllib.error
import urllib.request
import zlib
from typing import IO, TYPE_CHECKING, cast

sys.dont_write_bytecode = True  # bin/ stays as it was installed
if TYPE_CHECKING:
    from kvhost.onhost import archives
else:  # it lies beside this file on a host, where there is no package kvhost
    try:
        import archives
    except ModuleNotFoundError:
        from kvhost.onhost import archives

#: where what was fetched lies in the environment
FOLDER = "program"
ARCHIVES = (".tar.gz", ".tgz")
#: a compiler of C++ may take as much; bytes
JOB_BYTES = 2 << 30
LIMIT_S = 60


class NoProgram(Exception):
    """Why, for people."""


def split(lock: str, package: str) -> tuple[str, str]:
    """(requirements of wheels, the one requirement that is built) of a lock's text.

    Raises NoProgram."""
    found = re.search(rf"(?m)^{re.escape(package)}==.*\n(?:    --hash=.*\n?)+", lock)
    if found is None:
        raise NoProgram(f"the lock does not name {package}")
    return lock.replace(found[0], ""), found[0]


def build_variables(given: dict[str, str]) -> dict[str, str]:
    """With as many jobs as there are CPUs and memory for."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    jobs = max(1, min(len(os.sched_getaffinity(0)), memory // JOB_BYTES))
    return {**given, "LLAMA_CPP_BUILD_JOBS": str(jobs)}


def sha256(path: str) -> str:
    """Raises OSError."""
    digest = hashlib.sha256()
    with open(path, "rb") as handle:
        for block in iter(lambda: handle.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def check(path: str, wanted: str, what: str) -> None:
    """Raises NoProgram for what is no file, or another than was named, OSError."""
    try:
        kind = os.stat(path).st_mode
    except FileNotFoundError as error:
        raise NoProgram(f"{what} is not there") from error
    if not stat.S_ISREG(kind):  # a FIFO would be waited for
        raise NoProgram(f"{what} is no regular file")
    found = sha256(path)
    if found != wanted:
        raise NoProgram(f"{what} has sha256 {found}, wanted is {wanted}")


def check_own(target: str, digest: str) -> None:
    """A file of the user's on this host: the program, or an archive. Raises NoProgram, OSError."""
    check(target, digest, target)
    if not target.endswith(ARCHIVES) and not os.stat(target).st_mode & 0o111:
        raise NoProgram(f"{target} is not executable: chmod a+rx it")


def bring(env: str, name: str, source: str) -> None:
    """The program of ``source`` ("PATH_OR_URL#sha256=HEX") into the environment.

    Raises NoProgram, OSError."""
    target, _, digest = source.rpartition("#sha256=")
    folder = os.path.join(env, FOLDER)
    os.makedirs(folder, 0o755)
    if target.startswith("/") and not target.endswith(ARCHIVES):
        check_own(target, digest)
        # linked, not copied: what it loads may lie beside it
        os.symlink(target, os.path.join(env, "bin", name))
        return
    archive = target
    if not target.startswith("/"):
        archive = os.path.join(env, "download")
        fetch(target, archive)
    check(archive, digest, target)
    if target.endswith(ARCHIVES):
        unpack(archive, folder)
    else:
        shutil.copy(archive, os.path.join(folder, name))
        os.chmod(os.path.join(folder, name), 0o755)
    if archive != target:
        os.unlink(archive)
    link(env, name, folder)


def fetch(url: str, path: str) -> None:
    """Raises NoProgram, which names the place and never a query."""
    try:
        with urllib.request.urlopen(url, timeout=LIMIT_S) as reply, open(path, "wb") as handle:
            shutil.copyfileobj(reply, handle, 1 << 20)
    except (OSError, ValueError, urllib.error.URLError) as error:
        raise NoProgram(f"{url.partition('?')[0]} cannot be fetched: {error}") from error


def unpack(archive: str, folder: str) -> None:
    """Raises NoProgram."""
    try:
        with gzip.open(archive) as stream:
            archives.unpack(cast("IO[bytes]", stream), folder)
    except archives.BadArchive as error:
        raise NoProgram(f"{archive}: {error}") from error
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise NoProgram(f"{archive} is no whole .tar.gz: {error}") from error


def link(env: str, name: str, folder: str) -> None:
    """bin/``name`` to the one program of that name below ``folder``. Raises NoProgram, OSError."""
    found = [
        os.path.join(root, name)
        for root, _, names in os.walk(folder)
        if name in names and os.path.isfile(os.path.join(root, name))
    ]
    if len(found) != 1:
        raise NoProgram(f"{len(found)} programs are called {name} in {folder}, one is needed")
    os.chmod(found[0], 0o755)
    place = os.path.join(env, "bin", name)
    os.symlink(os.path.relpath(found[0], os.path.dirname(place)), place)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    check_it = parser.add_subparsers(dest="command", required=True).add_parser("check")
    check_it.add_argument("--source", required=True, help="PATH#sha256=HEX")
    target, _, digest = parser.parse_args().source.rpartition("#sha256=")
    why = None
    try:
        check_own(target, digest)
    except (NoProgram, OSError) as error:
        why = str(error)
    print(json.dumps({"against": why}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
