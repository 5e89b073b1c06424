#!/usr/bin/env python3
"""Digest of a model directory: model_digest.py --model DIR --cache FILE [--user U]

sha256 over every file that decides what the model computes (weights, configuration, tokenizer).
Reading 100 GB takes minutes, so a file's digest is remembered by path, size, inode, mtime and
ctime. Only safetensors weights are accepted: a pickle runs code when it is loaded.
Prints {"digest", "files", "bytes", "weights_bytes"}. Exit: 0; 1 not a usable model (why: stderr).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import pwd
import subprocess
import sys
import time

SUFFIXES = (".safetensors", ".json", ".model", ".jinja", ".txt", ".tiktoken")
PICKLES = (".bin", ".pt", ".pth", ".ckpt")


def fail(text):
    print("model: " + text, file=sys.stderr)
    sys.exit(1)


def file_digest(path, told):
    digest, done = hashlib.sha256(), 0
    with open(path, "rb") as handle:
        while True:
            block = handle.read(1 << 22)
            if not block:
                return digest.hexdigest()
            digest.update(block)
            done += len(block)
            if time.time() - told[0] > 10:
                told[0] = time.time()
                print(
                    "  ... %s: %d MB read" % (os.path.basename(path), done >> 20),
                    file=sys.stderr,
                    flush=True,
                )


def load_cache(path):
    try:
        with open(path, encoding="utf-8") as handle:
            cache = json.load(handle)
        return cache if isinstance(cache, dict) else {}
    except (OSError, ValueError):
        return {}  # it only saves time


def readable_by(user, path):
    account = pwd.getpwnam(user)
    if account.pw_uid == os.geteuid():
        return os.access(path, os.R_OK)
    ids = ["--reuid", str(account.pw_uid), "--regid", str(account.pw_gid), "--init-groups"]
    return subprocess.run(["setpriv", *ids, "test", "-r", path], check=False).returncode == 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--cache", required=True, help="JSON file, made if missing")
    parser.add_argument("--user", help="the service's user, who must be able to read it")
    args = parser.parse_args()
    if not os.path.isfile(os.path.join(args.model, "config.json")):
        fail(f"{args.model} has no config.json: is it the directory of a model?")
    names = sorted(os.listdir(args.model))
    weights = [name for name in names if name.endswith(".safetensors")]
    if not weights:
        pickles = [name for name in names if name.endswith(PICKLES)]
        fail(
            "{} has no .safetensors weights{}".format(
                args.model,
                "; {} are pickles, which run code when loaded: convert them".format(
                    ", ".join(pickles[:3])
                )
                if pickles
                else "",
            )
        )
    cache, told, lines, total, weight_bytes = load_cache(args.cache), [time.time()], [], 0, 0
    fresh = {}
    for name in [name for name in names if name.endswith(SUFFIXES)]:
        path = os.path.join(args.model, name)
        st = os.stat(path)
        if args.user and not readable_by(args.user, path):
            fail(
                f"{args.user} cannot read {path}: give it read access, and every directory above it x"
            )
        key = repr((path, st.st_size, st.st_ino, st.st_mtime_ns, st.st_ctime_ns))
        fresh[key] = cache.get(key) or file_digest(path, told)
        lines.append(f"{name} {fresh[key]}")
        total += st.st_size
        weight_bytes += st.st_size if name.endswith(".safetensors") else 0
    if fresh != cache:
        with open(args.cache + ".new", "w", encoding="utf-8") as handle:
            json.dump(fresh, handle)
        os.replace(args.cache + ".new", args.cache)
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    print(
        json.dumps(
            {"digest": digest, "files": len(lines), "bytes": total, "weights_bytes": weight_bytes}
        )
    )


if __name__ == "__main__":
    main()
