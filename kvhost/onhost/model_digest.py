#!/usr/bin/env python3
"""Digest of a model directory: model_digest.py --model DIR --cache FILE [--user U]

sha256 over every file that decides what the model computes (weights, configuration, tokenizer).
A model of llama.cpp is one .gguf file, and the digest that of its content; of one that is split all
parts count, by llama.cpp's names (PREFIX-00001-of-00003.gguf). Reading 100 GB takes
minutes, so a file's digest is remembered by path, size, inode, mtime and ctime. Of a directory only
safetensors weights are accepted: a pickle runs code when it is loaded. A download
that was cut short is refused: a missing shard, a file shorter than its own header says.
Prints {"digest", "files", "bytes", "weights_bytes"}. Exit: 0; 1 not a usable model (why: stderr).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import pwd
import stat
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any, NoReturn

sys.dont_write_bytecode = True  # bin/ stays as it was installed
if TYPE_CHECKING or __package__:
    from kvhost.onhost import gguf
else:  # it lies beside this file on a host, where there is no package kvhost
    import gguf

SUFFIXES = (".safetensors", ".json", ".model", ".jinja", ".txt", ".tiktoken")
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
INDEX = "model.safetensors.index.json"
#: the format's own limit of a header (github.com/huggingface/safetensors, README); bytes
MOST_HEADER = 100_000_000


def fail(text: str) -> NoReturn:
    print("model: " + text, file=sys.stderr)
    sys.exit(1)


def identity(st: os.stat_result) -> list[int]:
    return [st.st_size, st.st_ino, st.st_mtime_ns, st.st_ctime_ns]


class Progress:
    """Says every 10 s how far a long read is."""

    def __init__(self) -> None:
        self.told = time.monotonic()

    def tell(self, path: str, done: int) -> None:
        if time.monotonic() - self.told > 10:
            self.told = time.monotonic()
            name = os.path.basename(path)
            print(f"  ... {name}: {done >> 20} MB read", file=sys.stderr, flush=True)


def file_digest(path: str, progress: Progress) -> str:
    """sha256 in hex. Fails if the file changes meanwhile. Raises OSError."""
    digest, done = hashlib.sha256(), 0
    with open(path, "rb") as handle:
        before = identity(os.fstat(handle.fileno()))
        while True:
            block = handle.read(1 << 22)
            if not block:
                break
            digest.update(block)
            done += len(block)
            progress.tell(path, done)
        if identity(os.fstat(handle.fileno())) != before:
            fail(f"{path} changed while it was read")
    return digest.hexdigest()


def load_cache(path: str) -> dict[str, Any]:
    """{path: [size, inode, mtime, ctime, digest]}; it only saves time."""
    try:
        with open(path, encoding="utf-8") as handle:
            cache = json.load(handle)
    except (OSError, ValueError):
        return {}
    return cache if isinstance(cache, dict) else {}


def remembered(entry: Any, st: os.stat_result) -> str | None:
    if not isinstance(entry, list) or entry[:4] != identity(st) or len(entry) != 5:
        return None
    return entry[4] if isinstance(entry[4], str) and len(entry[4]) == 64 else None


def save_cache(path: str, cache: dict[str, Any]) -> None:
    with open(path + ".new", "w", encoding="utf-8") as handle:
        json.dump(cache, handle)
    os.replace(path + ".new", path)


class User:
    """Tests access with the identity of the service's user."""

    def __init__(self, name: str) -> None:
        self.name = name
        try:
            account = pwd.getpwnam(name)
        except KeyError:
            fail(f"there is no user {name} on this host")
        self.prefix: list[str] = []
        if account.pw_uid != os.geteuid():
            if os.geteuid() != 0:
                fail(f"whether {name} can read it can only be seen as root or as {name}")
            ids = ["--reuid", str(account.pw_uid), "--regid", str(account.pw_gid)]
            self.prefix = ["setpriv", *ids, "--init-groups", "--inh-caps=-all"]

    def may(self, what: str, path: str) -> bool:
        return subprocess.run([*self.prefix, "test", what, path], check=False).returncode == 0

    def blocked_by(self, path: str) -> str | None:
        """What keeps the user from reading it: the file, or a directory above; None if nothing."""
        if self.may("-r", path):
            return None
        for start in (path, os.path.realpath(path)):  # a hub's snapshot links to its blobs
            parts = os.path.abspath(start).split("/")[1:-1]
            for count in range(len(parts) + 1):
                folder = "/" + "/".join(parts[:count])
                if not self.may("-x", folder):
                    return f"give it x on the directory {folder}"
        return f"give it r on {os.path.realpath(path)}"


def check_weights(path: str, size: int) -> None:
    """Whether a safetensors file is as long as its header says. Raises OSError."""
    with open(path, "rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        if not 2 <= length <= MOST_HEADER:
            fail(f"{path} is not a safetensors file")
        try:
            header = json.loads(handle.read(length))
            header.pop("__metadata__", None)
            ends = [int(tensor["data_offsets"][1]) for tensor in header.values()]
        except (ValueError, TypeError, LookupError, AttributeError):
            fail(f"{path} is not a whole safetensors file: its header cannot be read")
    wanted = 8 + length + max(ends, default=0)
    if size != wanted:
        fail(f"{path} has {size} bytes, its header says {wanted}: fetch it again")


def missing_shards(folder: str, names: list[str]) -> list[str]:
    """Shards that the index names and that are not there. Raises OSError."""
    try:
        with open(os.path.join(folder, INDEX), encoding="utf-8") as handle:
            shards = set(json.load(handle)["weight_map"].values())
    except FileNotFoundError:
        return []
    except (ValueError, TypeError, LookupError, AttributeError):
        fail(f"{folder}/{INDEX} cannot be read as an index of shards")
    return sorted(shards - set(names))


def weights_of(folder: str, names: list[str]) -> list[str]:
    if "config.json" not in names:
        fail(f"{folder} has no config.json: is it the directory of a model?")
    weights = [name for name in names if name.endswith(".safetensors")]
    if not weights:
        pickles = ", ".join([name for name in names if name.endswith(PICKLES)][:3])
        why = f"; {pickles}: pickles, which run code when loaded: convert them" if pickles else ""
        fail(f"{folder} has no .safetensors weights{why}")
    missing = missing_shards(folder, names)
    if missing:
        fail(f"{folder} lacks {len(missing)} shards, {', '.join(missing[:3])}: fetch them")
    return weights


def counted(names: list[str]) -> list[str]:
    """Those that decide what the model computes. One with a dot in front is a note of kvhost's or
    of a downloader's, nothing of the model."""
    return [name for name in names if name.endswith(SUFFIXES) and not name.startswith(".")]


def whole_digest(lines: list[str]) -> str:
    """Of the lines "NAME DIGEST"."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def remembered_model(path: str, cache_path: str) -> dict[str, Any]:
    """{"digest", "changed"}: the digest by what is remembered, without reading a weight; null where
    files are not as they were then, which "changed" names. Raises OSError."""
    single, cache = path.endswith(".gguf"), load_cache(cache_path)
    names = [""] if single else counted(sorted(os.listdir(path)))
    lines, changed, digest = [], [], None
    for name in names:
        file = path if single else os.path.join(path, name)
        try:
            st = os.stat(file)
        except FileNotFoundError:  # a link that leads nowhere
            changed.append(name)
            continue
        if not stat.S_ISREG(st.st_mode):
            continue
        digest = remembered(cache.get(file), st)
        lines.append(f"{name} {digest}")
        if digest is None:
            changed.append(name or os.path.basename(path))
    if changed:
        return {"digest": None, "changed": changed}
    return {"digest": digest if single else whole_digest(lines), "changed": []}


def model_digest(folder: str, cache_path: str, user: User | None) -> dict[str, Any]:
    """Raises OSError."""
    names = sorted(os.listdir(folder))
    weights = weights_of(folder, names)
    cache, progress = load_cache(cache_path), Progress()
    # of other models, what was learnt is kept; of this one, only what is still there
    fresh = {path: entry for path, entry in cache.items() if os.path.dirname(path) != folder}
    lines, total, weight_bytes = [], 0, 0
    for name in counted(names):
        path = os.path.join(folder, name)
        try:
            st = os.stat(path)
        except FileNotFoundError:
            fail(f"{path} is a link to {os.readlink(path)}, which is not there: fetch it again")
        if not stat.S_ISREG(st.st_mode):
            continue
        blocked = user.blocked_by(path) if user else None
        if user and blocked:
            fail(f"{user.name} cannot read {path}: {blocked}")
        if name in weights:
            check_weights(path, st.st_size)
            weight_bytes += st.st_size
        digest = remembered(cache.get(path), st) or file_digest(path, progress)
        fresh[path] = [*identity(st), digest]
        lines.append(f"{name} {digest}")
        total += st.st_size
    if fresh != cache:
        save_cache(cache_path, fresh)
    digest = whole_digest(lines)
    return {"digest": digest, "files": len(lines), "bytes": total, "weights_bytes": weight_bytes}


def file_model(path: str, cache_path: str, user: User | None) -> dict[str, Any]:
    """The same of a .gguf file, with all parts of a model that is split. Raises OSError."""
    try:
        told = gguf.read_model(path)
    except gguf.NotGguf as error:
        fail(f"{path}: {error}")
    cache, progress = load_cache(cache_path), Progress()
    fresh, digests = dict(cache), []
    for part in [os.path.join(os.path.dirname(path), one["name"]) for one in told["files"]]:
        blocked = user.blocked_by(part) if user else None
        if user and blocked:
            fail(f"{user.name} cannot read {part}: {blocked}")
        st = os.stat(part)
        digests.append(remembered(cache.get(part), st) or file_digest(part, progress))
        fresh[part] = [*identity(st), digests[-1]]
    if fresh != cache:
        save_cache(cache_path, fresh)
    whole = hashlib.sha256("\n".join(digests).encode()).hexdigest()
    figures = {"bytes": told["bytes"], "weights_bytes": told["weights_bytes"]}
    return {"digest": whole if digests[1:] else digests[0], "files": len(digests), **figures}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--cache", required=True, help="JSON file, made if missing")
    parser.add_argument("--user", help="the service's user, who must be able to read it")
    args = parser.parse_args()
    user = User(args.user) if args.user else None
    try:
        path = os.path.abspath(args.model)
        of = file_model if path.endswith(".gguf") else model_digest
        print(json.dumps(of(path, args.cache, user)))
    except OSError as error:
        fail(str(error))


if __name__ == "__main__":
    main()
