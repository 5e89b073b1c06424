#!/usr/bin/env python3
"""What evidence_foreign.py needs beside evidence_probe.py: config, prompts, who listens, pages.

Must lie beside evidence_foreign.py. By hand: evidence_foreign_parts.py PORT prints the process that
listens on a port of this machine.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import mmap
import os
import random
import re
import socket
import sys
import time
import urllib.parse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvhost.onhost import evidence_probe as probe
else:  # on the host the files lie beside each other, in no package
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import evidence_probe as probe

Json = dict[str, Any]
Files = dict[str, tuple[int, int, int]]  # relative name -> (inode, bytes, mtime_ns)

TIMEOUTS = {
    "request_s": 600,
    "ready_s": 600,
    "restart_s": 600,
    "same_s": 10,
    "write_s": 30,
    "stable_s": 2,
    "settle_s": 10,
    "poll_s": 0.5,
}
REQUIRED = {
    "api_base": str,
    "metrics_url": str,
    "restart": list,
    "prompt_tokens": int,
    "chunk_size": int,
}
OPTIONAL: Json = {
    "cache_metrics_url": None,
    "storage_dir": None,
    "model": None,
    "api_key_file": None,
    "vocab": None,
    "max_tokens": 16,
    "disrupt": False,
    "timeouts": {},
}
# vLLM's API process says itself when it started; with several API processes it does not
START: Json = {"start_time": ("process_start_time_seconds", {})}


def load_config(text: str) -> Json:
    """The config with its defaults. Raises ValueError that names everything that is wrong."""
    given = json.loads(text)
    if not isinstance(given, dict):
        raise ValueError("the config must be a JSON object")
    wrong = [f"{key}: unknown" for key in given if key not in REQUIRED and key not in OPTIONAL]
    for key, kind in REQUIRED.items():
        if not isinstance(given.get(key), kind):
            wrong.append(f"{key}: a {kind.__name__} is needed, found {given.get(key)!r}")
    for key in ("api_base", "metrics_url", "cache_metrics_url"):
        url = given.get(key)
        if isinstance(url, str) and not re.match(r"https?://[^/\s]+", url):
            wrong.append(f"{key}: http://HOST:PORT/… is needed, found {url!r}")
    restart = given.get("restart")
    if isinstance(restart, list) and not (restart and all(isinstance(w, str) for w in restart)):
        wrong.append("restart: a command as a list of strings is needed")
    storage = given.get("storage_dir")
    if storage is not None and not os.path.isdir(storage):
        wrong.append(f"storage_dir: no such directory here: {storage}")
    vocab = given.get("vocab")
    if vocab is not None and (len(vocab) != 2 or not 0 <= vocab[0] < vocab[1]):
        wrong.append(f"vocab: [first, end) with 0 <= first < end is needed, found {vocab}")
    for key in ("prompt_tokens", "chunk_size"):
        if isinstance(given.get(key), int) and given[key] < 1:
            wrong.append(f"{key}: at least 1 is needed, found {given[key]}")
    unknown = [key for key in given.get("timeouts") or {} if key not in TIMEOUTS]
    wrong += [f"timeouts.{key}: unknown" for key in unknown]
    if wrong:
        raise ValueError("; ".join(wrong))
    config = {**OPTIONAL, **given}
    config["timeouts"] = {**TIMEOUTS, **(given.get("timeouts") or {})}
    config["api_base"] = config["api_base"].rstrip("/")
    return config


# -- prompts ----------------------------------------------------------------------------------
def words(number: int) -> str:
    """Random words of plain letters, which every tokenizer takes; never the same twice."""
    draw = random.SystemRandom()
    syllables = [a + b for a in "bdfgklmnprstvz" for b in "aeiou"]
    return " ".join("".join(draw.choices(syllables, k=3)) for _ in range(number))


def make_prompt(config: Json, tokenize: Callable[[str], list[int] | None]) -> list[int] | str:
    """A fresh prompt of prompt_tokens tokens: random ids of ``vocab``; else random words, as ids
    where the server tokenizes; else as text, of about half that length.
    """
    number = config["prompt_tokens"]
    if config["vocab"] is not None:
        draw = random.SystemRandom()
        first, end = config["vocab"]
        return [draw.randrange(first, end) for _ in range(number)]
    sample = tokenize(words(100))
    if not sample:
        return words(max(1, number // 6))
    ids: list[int] = []
    many = number * 110 // len(sample) + 1
    while len(ids) < number:
        ids = tokenize(words(many)) or []
        if not ids:
            raise ValueError("the server's /tokenize answered once, but not twice")
        many *= 2
    return ids[:number]


def digest(prompt: list[int] | str) -> str:
    text = prompt if isinstance(prompt, str) else ",".join(map(str, prompt))
    return hashlib.sha256(text.encode()).hexdigest()


# -- who answers ------------------------------------------------------------------------------
def is_local(url: str) -> bool:
    """Whether a URL's host is this machine: an address that a socket here can be bound to."""
    parts = urllib.parse.urlsplit(url)
    try:
        found = socket.getaddrinfo(parts.hostname, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, _, _, address in found:
        with contextlib.suppress(OSError), socket.socket(family, kind) as one:
            one.bind((address[0], 0))
            return True
    return False


def listener(port: int) -> Json | None:
    """The process here that holds the listening socket, the oldest of several; None: not seen.

    A process in another network namespace (a container) is not seen by its port inside.
    """
    inodes = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), open(f"/proc/net/{table}", encoding="ascii") as handle:
            rows = [line.split() for line in handle.readlines()[1:]]
            inodes |= {r[9] for r in rows if r[3] == "0A" and int(r[1].split(":")[1], 16) == port}
    wanted = {f"socket:[{inode}]" for inode in inodes}
    holders: set[int] = set()
    for name in glob.glob("/proc/[0-9]*/fd/*") if wanted else ():
        with contextlib.suppress(OSError):  # closed meanwhile, or not ours to see
            if os.readlink(name) in wanted:
                holders.add(int(name.split("/")[2]))
    seen = [found for found in map(probe.process, holders) if found]
    return min(seen, key=lambda one: int(one["start_ticks"]), default=None)


def who(url: str) -> Json | None:
    """The process that listens on the port of a URL, if that is on this machine."""
    parts = urllib.parse.urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return listener(port) if is_local(url) else None


# -- files ------------------------------------------------------------------------------------
def scan(root: str | None) -> tuple[Files, int]:
    return probe.scan(root) if root else ({}, 0)


def wait_files(root: str, before: Files, expected: bool, limits: Json) -> tuple[Files, Json]:
    """Waits until new and changed files stand still, and where some are ``expected`` for the first.

    Returns those that are new, and what is told of them.
    """
    started = quiet_since = time.monotonic()
    last: Any = None
    while True:
        files, temporary = probe.scan(root)
        new = {name: info for name, info in files.items() if before.get(name) != info}
        now = time.monotonic()
        if new != last or temporary:
            last, quiet_since = new, now
        quiet = now - quiet_since >= limits["stable_s"]
        if (quiet and (new or not expected)) or now - started > limits["write_s"]:
            break
        time.sleep(limits["poll_s"])
    fresh = {name: info for name, info in new.items() if name not in before}
    return fresh, {
        "new_files": len(fresh),
        "new_bytes": sum(size for _, size, _ in fresh.values()),
        "temporary_files": temporary,
        "at_rest": quiet,
        "waited_s": round(now - started, 2),
    }


def same(files: Files, now: Files) -> list[str]:
    """Names of files that are as they were."""
    return [name for name, info in files.items() if now.get(name) == info]


def residency(root: str, files: Files, now: Files) -> Json | None:
    """Pages of the files that are as they were, and how many of them are in the page cache."""
    pages = resident = 0
    try:
        for name in same(files, now):
            size = files[name][1]
            pages += (size + mmap.PAGESIZE - 1) // mmap.PAGESIZE
            resident += probe.resident_pages(os.path.join(root, name), size)
    except OSError:
        return None
    return {"pages": pages, "resident": resident}


def main() -> int:
    if len(sys.argv) != 2 or not sys.argv[1].isdigit():
        print((__doc__ or "").strip(), file=sys.stderr)
        return 0 if sys.argv[1:] == ["--help"] else 1
    print(json.dumps(listener(int(sys.argv[1]))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
