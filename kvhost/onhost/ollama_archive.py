#!/usr/bin/env python3
"""Puts Ollama's own archive into a directory of its own, by its digest, and proves it.

ollama_archive.py check   --archive A --sha256 H --env DIR          what stands against it; JSON
ollama_archive.py install --archive A --sha256 H --env DIR --user U  unpacked, proven, marked

A: a file on the host, or a URL with http(s). It is a tar packed by gzip or zstd that holds
bin/ollama and lib/ollama/. Nothing is unpacked before the digest of every byte is the one that was
asked for, and nothing is written outside of DIR; what is unpacked is root's. engine.py switches.
Exit: 0 done, 1 failed (the reason is on stderr; the current environment is as it was).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tarfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING

sys.dont_write_bytecode = True  # bin/ stays as it was installed
if TYPE_CHECKING:
    from kvhost.onhost import archives, bounded, engine
    from kvhost.onhost.engine import Failed, say
    from kvhost.onhost.engine_whole import is_complete, tree_manifest, write_marker
else:  # it lies beside this file on a host, where there is no package kvhost
    import archives
    import bounded
    import engine
    from engine import Failed, say
    from engine_whole import is_complete, tree_manifest, write_marker

PROGRAM = "bin/ollama"
BLOCK = 1 << 20
#: bytes that are read past the end of a tar
PADDING = 64 << 20
LIMIT_S = 60
MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
VERSION = re.compile(r"(?:client version is|ollama version is) (\S+)")


def digest_of(path: str) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as handle:
        while block := handle.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def packing(path: str) -> str:
    """gzip or zstd, by the first bytes. Raises Failed."""
    with open(path, "rb") as handle:
        head = handle.read(4)
    found = next((name for magic, name in MAGIC.items() if head.startswith(magic)), None)
    if found is None:
        raise Failed(f"{path} is packed by neither gzip nor zstd: no archive of Ollama's for Linux")
    if found == "zstd" and shutil.which("zstd") is None:
        raise Failed(
            f"{path} is packed by zstd, which is not on this host: install the package zstd, or "
            "name the .tgz of a release that has one"
        )
    return found


def against(archive: str, sha256: str, env: str) -> str | None:
    """What stands against an archive that lies on the host; None: nothing, or it is unpacked."""
    if is_complete(env)["complete"] or "://" in archive:
        return None
    try:
        if not stat.S_ISREG(os.stat(archive).st_mode):
            return f"{archive} is no regular file"
        packing(archive)
        found = digest_of(archive)
    except FileNotFoundError:
        return f"{archive} is not there"
    except (OSError, Failed) as error:
        return str(error)
    if found != sha256:
        return f"{archive} has the digest {found}, not {sha256}"
    return None


def fetch(url: str, path: str) -> None:
    """Raises Failed."""
    say(f"fetching {url}")
    try:
        with urllib.request.urlopen(url, timeout=60) as answer, open(path, "wb") as handle:
            shutil.copyfileobj(answer, handle, BLOCK)
    except (urllib.error.URLError, OSError) as error:
        raise Failed(f"{url} could not be fetched: {error}") from error


@contextmanager
def unpacked_stream(path: str) -> Iterator[IO[bytes]]:
    """The bytes of the tar. Raises Failed if what unpacks them fails."""
    tool = packing(path)
    with subprocess.Popen([tool, "-dc", "--", path], stdout=subprocess.PIPE) as process:
        if process.stdout is None:
            raise Failed(f"{tool} gave no output")
        yield process.stdout
        left = PADDING  # behind the tar's end; else it would end by a broken pipe
        while left > 0 and (block := process.stdout.read(BLOCK)):
            left -= len(block)
        if left <= 0:
            process.kill()
            raise Failed(f"{path} holds more than {PADDING >> 20} MiB behind the end of its tar")
    if process.returncode != 0:
        raise Failed(f"{tool} -dc {path} ended with {process.returncode}")


def said(argv: list[str], user: str, env: dict[str, str]) -> bounded.Said:
    """What a program says as the service's user. Raises Failed."""
    try:
        return bounded.run(engine.with_parent(argv, user), LIMIT_S, env=env, cwd="/")
    except OSError as error:
        what = " ".join([os.path.basename(argv[0]), *argv[1:]])
        raise Failed(f"{what}: {error}") from error


def prove(env: str, user: str) -> list[dict[str, str]]:
    """That the program runs here, as the service's user. Raises Failed."""
    program = os.path.join(env, PROGRAM)
    if not os.path.isfile(program) or not os.access(program, os.X_OK):
        raise Failed(f"there is no {PROGRAM} in it: this is no archive of Ollama's for Linux")
    libraries = said(["ldd", program], user, {"PATH": "/usr/bin:/bin", "LC_ALL": "C"})
    missing = re.findall(r"(?m)^\s*(\S+) => not found", libraries.out)
    if missing:
        raise Failed(f"{PROGRAM} lacks libraries on this host: {', '.join(missing)}")
    # a port that nobody listens on: it tells its own version, and not that of a server
    settings = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", "OLLAMA_HOST": "127.0.0.1:1"}
    done = said([program, "--version"], user, settings)
    version = VERSION.search(done.out + done.err)
    if done.code != 0 or version is None:
        words = engine.tail(done.err or done.out, 3)[-600:] or "nothing"
        raise Failed(f"{PROGRAM} --version ended with {done.code} and said: {words}")
    return [
        {"name": "libraries resolve", "state": "ok", "detail": "ldd"},
        {"name": "runs as the user", "state": "ok", "detail": f"version {version.group(1)}"},
    ]


def install(args: argparse.Namespace) -> None:
    env = os.path.abspath(args.env)
    if is_complete(env)["complete"]:
        say("complete already: " + env)
        return
    above = os.path.dirname(env)
    os.makedirs(above, 0o755, exist_ok=True)
    archive, fetched = args.archive, f"{env}.archive"
    partial = f"{env}.partial"
    try:
        if "://" in archive:
            fetch(archive, fetched)
            archive = fetched
        found = digest_of(archive)
        if found != args.sha256:
            raise Failed(f"{args.archive} has the digest {found}, not {args.sha256}")
        engine.remove(partial)
        os.mkdir(partial, 0o755)
        with unpacked_stream(archive) as stream:
            archives.unpack(stream, partial)
        checks = prove(partial, args.user)
        engine.remove(env)
        os.rename(partial, env)
        about = {
            "lock": args.lock_digest or args.sha256,
            "cuda": None,
            "driver": None,
            "abi": checks,
        }
        write_marker(env, {**about, **tree_manifest(env)})
    except (archives.BadArchive, tarfile.TarError) as error:
        raise Failed(f"{args.archive}: {error}") from error
    finally:
        engine.remove(partial)
        engine.remove(fetched)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("check", "install"):
        command = commands.add_parser(name)
        command.add_argument("--archive", required=True, help="file on the host, or URL")
        command.add_argument("--sha256", required=True, help="of the archive, 64 hex digits")
        command.add_argument("--env", required=True, help="directory that it is unpacked to")
        if name == "install":
            command.add_argument("--user", required=True, help="the service's user")
            command.add_argument("--lock-digest", help="written into the marker")
    args = parser.parse_args()
    try:
        if args.command == "check":
            print(json.dumps({"against": against(args.archive, args.sha256, args.env)}))
        else:
            install(args)
    except (Failed, OSError) as error:
        say(f"ollama_archive: {error}\nThe current environment is as it was.")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
