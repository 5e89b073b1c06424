#!/usr/bin/env python3
"""Fetches a model from a Hugging Face hub at one commit: model_fetch.py --repo ORG/NAME …

Run by the engine environment's Python as the service's user. Only safetensors weights and text
files are taken: a pickle runs code when it is loaded. A download that was cut off, or killed, goes
on where it was: parts lie in OUT/.parts. Every file has the digest that the hub gives for that
commit, or it is not used. The token is read from a file, never an argument, and goes to no other
host than the hub. Exit: 0 complete, 1 not (why: stderr).
"""

# mypy: disable-error-code="import-not-found"
from __future__ import annotations

import argparse
import fnmatch
import hashlib
import json
import os
import re
import shutil
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

MARKER = ".kvhost-complete.json"
PARTS = ".parts"
PATTERNS = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.model", "*.txt", "*.jinja")
AT_ONCE = 4  # files
TELL_S = 10.0
_NAME = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9._+-]*/)*[A-Za-z0-9_][A-Za-z0-9._+-]*")


class Failed(Exception):
    """Why, for people."""


class File(NamedTuple):
    """A file of the commit. `sha256`: of large files (LFS); of others the hub has git's sha1."""

    name: str
    size: int
    sha256: str | None
    blob: str


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def wanted_files(info: Any) -> list[File]:
    """What is taken of a commit. Raises Failed."""
    files = []
    for one in info.siblings or []:
        name = one.rfilename
        if not any(fnmatch.fnmatch(name, pattern) for pattern in PATTERNS):
            continue
        if not _NAME.fullmatch(name):
            raise Failed(f"the file name {name!r} is not one that kvhost writes")
        if one.size is None or not (one.lfs or one.blob_id):
            raise Failed(f"the hub gives no size and digest of {name}")
        files.append(File(name, one.size, one.lfs.sha256 if one.lfs else None, one.blob_id or ""))
    if not any(file.name.endswith(".safetensors") for file in files):
        raise Failed("it has no safetensors weights: not used")
    return sorted(files)


def digests(path: str) -> tuple[str, str]:
    """sha256, and the sha1 that git names a blob by (git-hash-object(1)). Raises OSError."""
    sha256 = hashlib.sha256()
    git = hashlib.sha1(f"blob {os.path.getsize(path)}\0".encode(), usedforsecurity=False)
    with open(path, "rb") as handle:
        for block in iter(lambda: handle.read(1 << 20), b""):
            sha256.update(block)
            git.update(block)
    return sha256.hexdigest(), git.hexdigest()


def is_right(path: str, file: File) -> bool:
    if os.path.getsize(path) != file.size:
        return False
    sha256, git = digests(path)
    return sha256 == file.sha256 if file.sha256 else git == file.blob


class Fetch:
    """One model into one directory."""

    def __init__(self, args: argparse.Namespace, token: str | None, hub: Any) -> None:
        self.args, self.token, self.hub = args, token, hub
        self.out: str = args.out
        self.parts = os.path.join(self.out, PARTS)

    def path(self, file: File) -> str:
        return os.path.join(self.out, file.name)

    def part(self, file: File) -> str:
        return os.path.join(self.parts, file.sha256 or file.blob)

    def have(self, file: File) -> int:
        """Bytes of it that are here."""
        for path in (self.path(file), self.part(file)):
            if os.path.isfile(path):
                return os.path.getsize(path)
        return 0

    def one(self, file: File) -> None:
        """Raises Failed, or what the hub's library raises."""
        if os.path.isfile(self.path(file)):
            if is_right(self.path(file), file):
                return
            say(f"{file.name}: not as the hub has it, fetched again")
            os.unlink(self.path(file))
        part = self.part(file)
        for _ in range(2):
            began = os.path.getsize(part) if os.path.isfile(part) else 0
            if began > file.size:
                os.unlink(part)
                began = 0
            self.bytes_of(file, part, began)
            if is_right(part, file):
                os.makedirs(os.path.dirname(self.path(file)), exist_ok=True)
                os.replace(part, self.path(file))
                return
            os.unlink(part)
            if not began:
                break
            say(f"{file.name}: the part of an earlier run was damaged, fetched from the beginning")
        raise Failed(f"{file.name} has not the digest that the hub gives for it: not used")

    def bytes_of(self, file: File, part: str, began: int) -> None:
        url = self.hub.hf_hub_url(self.args.repo, file.name, revision=self.args.revision)
        found = self.hub.get_hf_file_metadata(url, token=self.token)
        headers = {"Accept-Encoding": "identity"}
        if self.token and host_of(found.location) == host_of(url):  # a store of others gets none
            headers["Authorization"] = f"Bearer {self.token}"
        if began:
            say(f"{file.name}: goes on at {gb(began)} of {gb(file.size)}")
        with open(part, "ab") as handle:
            self.hub.file_download.http_get(
                found.location, handle, resume_size=began, headers=headers,
                expected_size=file.size, displayed_filename=file.name,
            )  # fmt: skip
            handle.flush()
            os.fsync(handle.fileno())

    def run(self) -> None:
        info = self.hub.HfApi(token=self.token).model_info(
            self.args.repo, revision=self.args.revision, files_metadata=True
        )
        if info.sha != self.args.revision:
            raise Failed(f"the hub answered for another commit: {info.sha}")
        files = wanted_files(info)
        os.makedirs(self.parts, mode=0o700, exist_ok=True)
        total, here = sum(file.size for file in files), sum(map(self.have, files))
        free = shutil.disk_usage(self.out).free
        if total - here > free:
            raise Failed(f"{gb(total - here)} are to be fetched, {gb(free)} are free at {self.out}")
        say(f"{len(files)} files, {gb(total)}, of which {gb(here)} are here")
        stop = threading.Event()
        watcher = threading.Thread(target=self.watch, args=(files, total, stop), daemon=True)
        watcher.start()
        try:
            with ThreadPoolExecutor(AT_ONCE) as pool:
                waiting = [pool.submit(self.one, file) for file in files]
            for future in waiting:
                future.result()  # raises what went wrong
        finally:
            stop.set()
            watcher.join()
        shutil.rmtree(self.parts)
        self.complete(files)

    def watch(self, files: list[File], total: int, stop: threading.Event) -> None:
        began, first = time.monotonic(), sum(map(self.have, files))
        while not stop.wait(TELL_S):
            try:
                now = sum(map(self.have, files))
            except OSError:
                continue  # renamed while we looked
            rate = max(now - first, 0) / (time.monotonic() - began)
            left = f", {(total - now) / rate / 60:.0f} min left" if rate else ""
            say(f"  ... {gb(now)} of {gb(total)}, {gb(rate)}/s{left}")

    def complete(self, files: list[File]) -> None:
        """The marker comes last, and when all is on the disk."""
        rows = {
            f.name: {"bytes": f.size, "sha256": f.sha256 or digests(self.path(f))[0]} for f in files
        }
        os.sync()
        marker = {"repo": self.args.repo, "revision": self.args.revision, "files": rows}
        temporary = os.path.join(self.out, MARKER + ".new")
        with open(temporary, "w", encoding="utf-8") as handle:
            json.dump(marker, handle)  # on one line: the stage reads the last
        os.replace(temporary, os.path.join(self.out, MARKER))
        say(f"{self.args.repo} is complete: {len(files)} files, each with the hub's digest")


def host_of(url: str) -> str:
    return urllib.parse.urlsplit(url).netloc


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repo", required=True, help="ORG/NAME")
    parser.add_argument("--revision", required=True, help="commit, 40 hex digits")
    parser.add_argument("--out", required=True, help="directory of the model")
    parser.add_argument("--token-file", help="file with the hub's token")
    args = parser.parse_args()
    token = None
    if args.token_file:
        with open(args.token_file, encoding="utf-8") as handle:
            token = handle.read().strip()
    os.environ["HF_HUB_DISABLE_XET"] = "1"  # plain HTTP: what is here of a file can be gone on from
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    import huggingface_hub
    import huggingface_hub.file_download

    masked: Callable[[object], str] = lambda text: str(text).replace(token or "\0", "***")  # noqa: E731
    try:
        Fetch(args, token, huggingface_hub).run()
    except Exception as error:
        say(f"could not fetch {args.repo}@{args.revision}: {masked(error)}")
        say("What was fetched is kept; the next run goes on from there.")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
