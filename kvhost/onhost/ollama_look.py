#!/usr/bin/env python3
"""Looks at a running Ollama: version, one model, and the KV type that it was loaded with; JSON.

ollama_look.py --url URL --model NAME (--unit U | --log FILE) [--load] [--timeout S]

With --load the model is loaded first, which may push another one out of memory; without it
nothing is changed. Every part is {"status": ok|absent|unreadable, "why", "data"}: api, model,
loaded (what is in memory), log (the load of this model that is in memory, ollama_log.py).
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING, Any

sys.dont_write_bytecode = True  # bin/ stays as it was installed
if TYPE_CHECKING:
    from kvhost.onhost.ollama_log import loads_of
    from kvhost.onhost.ollama_unit import Trouble, shown_by_systemd
    from kvhost.onhost.report_parts import Absent, part
else:  # it lies beside this file on a host, where there is no package kvhost
    from ollama_log import loads_of
    from ollama_unit import Trouble, shown_by_systemd
    from report_parts import Absent, part

Data = dict[str, Any]
#: characters of a log that are held at once
LONGEST = 1 << 16
#: what the size of a token's KV depends on, without the architecture's name before it
SHAPE = (
    *("block_count", "embedding_length", "attention.head_count", "attention.head_count_kv"),
    *("attention.key_length", "attention.value_length", "attention.sliding_window"),
    *("attention.kv_lora_rank", "full_attention_interval", "ssm.state_size", "context_length"),
)


class Unusable(Exception):
    """What Ollama answered, where it was no answer."""


def ask(url: str, path: str, body: Data | None = None, timeout: float = 30) -> Data:
    """Raises Unusable."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        url + path, data=data, headers={"Content-Type": "application/json"}
    )
    try:
        with opener.open(request, timeout=timeout) as answer:
            found = json.load(answer)
    except urllib.error.HTTPError as error:
        raise Unusable(f"{path}: {error.code} {reason(error.read())}") from error
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise Unusable(f"{path}: {error}") from error
    if not isinstance(found, dict):
        raise Unusable(f"{path}: not a JSON object")
    return found


def reason(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"])[:400]
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")[:200]


def api(url: str) -> Data:
    return {"version": str(ask(url, "/api/version")["version"])}


def full_name(name: str) -> str:
    """As Ollama lists it: a tag is always there."""
    return name if ":" in name.rpartition("/")[2] else f"{name}:latest"


def listed(url: str, path: str, name: str) -> Data:
    """The row of a model in /api/tags or /api/ps. Raises Absent."""
    for one in ask(url, path).get("models") or []:
        if isinstance(one, dict) and full_name(name) in (one.get("name"), one.get("model")):
            return one
    raise Absent(f"{name} is not in {path}")


def model(url: str, name: str) -> Data:
    """Its digest, the file that it is loaded from, and the shape of its KV."""
    digest = str(listed(url, "/api/tags", name).get("digest", "")).removeprefix("sha256:")
    told = ask(url, "/api/show", {"model": name})
    info = told.get("model_info") or {}
    architecture = info.get("general.architecture")
    file = re.search(r"(?m)^FROM \S*sha256[-:]([0-9a-f]{64})\s*$", str(told.get("modelfile", "")))
    return {
        "digest": digest,
        "blob": file.group(1) if file else None,
        "architecture": architecture,
        "quantization": (told.get("details") or {}).get("quantization_level"),
        "shape": {key: info.get(f"{architecture}.{key}") for key in SHAPE},
    }


def loaded(url: str, name: str) -> Data:
    one = listed(url, "/api/ps", name)
    return {key: one.get(key) for key in ("context_length", "size", "size_vram", "expires_at")}


def short_lines(handle: IO[str]) -> Iterator[str]:
    """What a program wrote may have no end of a line in it."""
    while line := handle.readline(LONGEST):
        yield line


def lines_of(unit: str | None, log: str | None) -> Iterator[str]:
    """The log of the process that runs now. Raises Trouble, OSError, Absent."""
    if log is not None:
        with open(log, encoding="utf-8", errors="replace") as handle:
            yield from short_lines(handle)
        return
    invocation = shown_by_systemd(unit or "").get("InvocationID")
    if not invocation:
        raise Absent(f"{unit} does not run")
    argv = ("journalctl", f"_SYSTEMD_INVOCATION_ID={invocation}", "-o", "cat", "--no-pager", "-a")
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, errors="replace"
    ) as journal:
        if journal.stdout is not None:
            yield from short_lines(journal.stdout)
    if journal.returncode != 0:
        raise Trouble(f"journalctl ended with {journal.returncode}")


def of_log(unit: str | None, log: str | None, blob: str | None) -> Data:
    """How the server was set, and the last load of this model since it started."""
    found = loads_of(lines_of(unit, log))
    if found["config"] is None:
        raise Absent("the log does not go back to the start of the server")
    of_model = [one for one in found["loads"] if blob is not None and one["blob"] == blob]
    return {
        "config": found["config"],
        "version": found["version"],
        "load": of_model[-1] if of_model else None,
        "loads": len(found["loads"]),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", required=True, help="as `ollama list` names it")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--unit", help="whose journal is read")
    where.add_argument("--log", help="file that the server's output goes to")
    parser.add_argument("--load", action="store_true", help="load the model first")
    parser.add_argument("--timeout", type=float, default=600, help="seconds that a load may take")
    args = parser.parse_args()
    found: Data = {"schema": 1, "url": args.url, "name": args.model}
    found["api"] = part(functools.partial(api, args.url))
    found["model"] = part(functools.partial(model, args.url, args.model))
    if args.load and found["model"]["status"] == "ok":
        body = {"model": args.model, "stream": False}
        order = functools.partial(ask, args.url, "/api/generate", body, args.timeout)
        found["asked"] = {**part(order), "data": None}  # an empty prompt: it is loaded, no more
    found["loaded"] = part(functools.partial(loaded, args.url, args.model))
    blob = (found["model"]["data"] or {}).get("blob")
    found["log"] = part(functools.partial(of_log, args.unit, args.log, blob))
    print(json.dumps(found, separators=(",", ":")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
