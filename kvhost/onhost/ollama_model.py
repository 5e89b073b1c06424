#!/usr/bin/env python3
"""The model of an Ollama: pulled by Ollama itself, or made of a GGUF that lies on the host.

ollama_model.py name   --gguf PATH --state DIR                 what a GGUF is called in Ollama; JSON
ollama_model.py check  --url URL (--model NAME | --gguf PATH --state DIR) [--digest D]
ollama_model.py ensure the same, and --program PATH: the program `ollama`, for a GGUF

A GGUF is called by its file name with the first 12 digits of its sha256 as the tag, so that other
bytes are another model. Ollama copies it into its own store. Pulling needs the network: Ollama
fetches from its own registry. check prints {"name", "there", "digest", "why"}.
Exit: 0 done, 1 failed (why, on stderr).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sys
import tempfile
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

sys.dont_write_bytecode = True  # bin/ stays as it was installed
if TYPE_CHECKING:
    from kvhost.onhost import bounded, gguf
    from kvhost.onhost.ollama_look import Unusable, listed, reason
    from kvhost.onhost.report_parts import Absent
else:  # it lies beside this file on a host, where there is no package kvhost
    import bounded
    import gguf
    from ollama_look import Unusable, listed, reason
    from report_parts import Absent

PULL_S = 6 * 3600
Data = dict[str, Any]


class Failed(Exception):
    """Why, for people."""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def gguf_digest(path: str, state: str, read: bool = True) -> str:
    """sha256 of a file, remembered by its identity: a model of 40 GB is read once. Without
    ``read`` only what is remembered counts. Raises OSError, Failed."""
    found = os.stat(path)
    identity = [found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns]
    notes = os.path.join(state, "ollama-gguf.json")
    known: Data = {}
    try:
        with open(notes, encoding="utf-8") as handle:
            known = json.load(handle)
    except (OSError, ValueError):
        known = {}
    if isinstance(known, dict) and known.get("path") == path and known.get("is") == identity:
        return str(known["sha256"])
    if not read:
        raise Failed(f"{path} is not as it was when its digest was taken")
    digest = hashlib.sha256()
    with open(path, "rb") as handle:
        while block := handle.read(1 << 20):
            digest.update(block)
    if os.path.isdir(state):
        with open(notes + ".new", "w", encoding="utf-8") as handle:
            json.dump({"path": path, "is": identity, "sha256": digest.hexdigest()}, handle)
        os.replace(notes + ".new", notes)
    return digest.hexdigest()


def gguf_name(path: str, digest: str) -> str:
    stem = os.path.basename(path).lower()
    stem = stem[: -len(".gguf")] if stem.endswith(".gguf") else stem
    plain = re.sub(r"[^a-z0-9._-]+", "-", stem).strip("._-")[:60] or "model"
    return f"{plain}:{digest[:12]}"


def is_split(path: str) -> bool:
    """Of what is damaged Ollama itself says so. Raises OSError."""
    try:
        return gguf.read(path)["keys"].get(gguf.PARTS, 1) not in (0, 1)
    except gguf.NotGguf:
        return False


def name_of(args: argparse.Namespace) -> str:
    """Raises OSError, Failed."""
    if args.gguf is None:
        return str(args.model)
    with open(args.gguf, "rb") as handle:
        if handle.read(4) != b"GGUF":
            raise Failed(f"{args.gguf} is no GGUF")
    if is_split(args.gguf):
        raise Failed(f"{args.gguf} is a part of a split model, and Ollama makes a model of one file"
                     ": put its parts together (llama-gguf-split --merge)")  # fmt: skip
    return gguf_name(args.gguf, gguf_digest(args.gguf, args.state, not args.remembered))


def look(args: argparse.Namespace) -> Data:
    """Whether it is there, with the digest that is wanted. Raises Unusable, OSError, Failed."""
    name = name_of(args)
    try:
        digest = str(listed(args.url, "/api/tags", name).get("digest", ""))
    except Absent:
        return {"name": name, "there": False, "digest": None, "why": "Ollama does not have it"}
    digest = digest.removeprefix("sha256:")
    if args.digest and not digest.startswith(args.digest):
        why = f"{name} has the digest {digest[:12]}, not {args.digest[:12]}"
        return {"name": name, "there": False, "digest": digest, "why": why}
    return {"name": name, "there": True, "digest": digest, "why": None}


def pull(url: str, name: str) -> None:
    """Raises Failed."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    body = json.dumps({"model": name, "stream": True}).encode()
    told = ""
    try:
        with opener.open(f"{url}/api/pull", body, timeout=PULL_S) as answer:
            for line in answer:
                row = json.loads(line)
                if "error" in row:
                    raise Failed(refused(name, str(row["error"])))
                status = str(row.get("status", ""))
                if status.split(" ")[0] != told:
                    told = status.split(" ")[0]
                    say(f"  ollama: {status}")
    except urllib.error.HTTPError as error:
        raise Failed(refused(name, reason(error.read()))) from error
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise Failed(refused(name, str(error))) from error


def refused(name: str, why: str) -> str:
    return (
        f"{name} could not be pulled: {why}\nOllama fetches models from its own registry, which "
        "needs the network. Without one: model_source = the path of a GGUF on the host, or the "
        "models directory of an Ollama that has it, copied here."
    )


def create(args: argparse.Namespace, name: str) -> None:
    """Raises Failed, OSError."""
    address = args.url.partition("://")[2]
    env = {"PATH": "/usr/bin:/bin", "HOME": "/root", "OLLAMA_HOST": address}
    with tempfile.NamedTemporaryFile("w", suffix=".Modelfile") as file:
        file.write(f"FROM {args.gguf}\n")
        file.flush()
        argv = [args.program, "create", name, "-f", file.name]
        # it shows its progress, for as long as it copies
        done = bounded.run(argv, PULL_S, tail=True, env=env)
    if done.code != 0:
        raise Failed(f"{name} could not be made of {args.gguf}: {done.err.strip()[-600:]}")


def ensure(args: argparse.Namespace) -> None:
    found = look(args)
    if found["there"]:
        return
    if args.gguf is not None:
        create(args, found["name"])
    else:
        pull(args.url, found["name"])
    found = look(args)
    if not found["there"]:
        raise Failed(
            f"{found['why']}: its name means other weights now. What Ollama pulled stays; set "
            "ollama_model_digest to what you want"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for verb in ("name", "check", "ensure"):
        command = commands.add_parser(verb)
        what = command.add_mutually_exclusive_group(required=True)
        what.add_argument("--model", help="a name of Ollama's library, with its tag")
        what.add_argument("--gguf", help="a file on the host")
        command.add_argument("--state", default="/nonexistent", help="where a digest is kept")
        command.add_argument(
            "--remembered", action="store_true", help="read no GGUF, write nothing"
        )
        if verb != "name":
            command.add_argument("--url", required=True)
            command.add_argument("--digest", help="12 or 64 digits, as `ollama list` shows them")
        if verb == "ensure":
            command.add_argument("--program", default="ollama", help="the program `ollama`")
    args = parser.parse_args()
    try:
        if args.command == "name":
            print(json.dumps({"name": name_of(args)}))
        elif args.command == "check":
            print(json.dumps(look(args)))
        else:
            ensure(args)
    except (Failed, Unusable, OSError) as error:
        say(f"ollama_model: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
