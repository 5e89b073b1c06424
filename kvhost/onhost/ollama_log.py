#!/usr/bin/env python3
"""Reads the log of `ollama serve`: how it was set, and with which KV type it loaded each model.

ollama_log.py FILE          (or - for stdin); prints JSON, see loads_of()

Three kinds of runner have told this in Ollama's history, and each says it in another place: the
command line of its own runner (until 0.10), a load request that the server writes down (0.11 to
0.2x), the command line of llama-server (from 0.30); llama.cpp says besides what it allocated. A
line is taken for what it says and nothing else: what no line says is null.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from collections.abc import Iterable
from typing import Any

Data = dict[str, Any]
#: key=value of Go's slog; a key or a value with a space in it is in quotes
_PAIR = re.compile(r'(?:"([^"\\]+)"|([\w.]+))=("(?:[^"\\]|\\.)*"|[^\s"]*)')
_CONFIG = re.compile(r"server config.*\benv=\"?map\[(.*)\]")
_VERSION = re.compile(r"Listening on \S+ \(version ([^)\s\"]+)\)")
_BLOB = re.compile(r"sha256[-:]([0-9a-f]{64})")
_FIELD = re.compile(r"\b(Operation|FlashAttention|KvCacheType|KvSize|Parallel):(\S*?)(?=[\s}])")
#: what llama.cpp allocated, in one line for each cache that it made
_ALLOCATED = re.compile(
    r"(?:KV self size|llama_kv_cache\w*: size)\s*=\s*[\d.]+ MiB"
    r"(?: \(\s*(\d+) cells,\s*(\d+) layers,[^)]*\))?"
    r",\s*K \((\w+)\):\s*([\d.]+) MiB,\s*V \((\w+)\):\s*([\d.]+) MiB"
)
_FLASH = re.compile(r"llama_(?:context|new_context_with_model): flash_attn\s*= (\w+)")
_BYTES = re.compile(r"([\d.]+) (B|KiB|MiB|GiB|TiB)")
_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
#: text of a warning -> a short name of the reason
WARNINGS = {
    "flash attention enabled but not supported by gpu": "no_flash_on_gpu",
    "flash attention enabled but not supported by model": "no_flash_with_model",
    "kv cache type not supported by model": "type_not_with_model",
    "quantized kv cache requested but flash attention disabled": "flash_off",
    "OLLAMA_FLASH_ATTENTION must be enabled to use a quantized OLLAMA_KV_CACHE_TYPE": "flash_off",
    "unsupported OLLAMA_KV_CACHE_TYPE": "unknown_type",
}
#: the same from llama.cpp, which ends there
_FATAL = {
    "V cache quantization requires flash_attn": "needs_flash",
    "quantized V cache was requested, but this requires Flash Attention": "needs_flash",
}
#: variables of the server's own list that are kept; none of them is a secret
KEPT = (
    *("OLLAMA_CONTEXT_LENGTH", "OLLAMA_FLASH_ATTENTION", "OLLAMA_HOST", "OLLAMA_KEEP_ALIVE"),
    *("OLLAMA_KV_CACHE_TYPE", "OLLAMA_MODELS", "OLLAMA_NUM_PARALLEL"),
)
#: flags of both runners' command lines
_FLAGS = {
    **dict.fromkeys(("--ctx-size", "-c"), "cells"),
    **dict.fromkeys(("--parallel", "-np"), "parallel"),
    "--kv-cache-type": "both",
    **dict.fromkeys(("--cache-type-k", "-ctk"), "k"),
    **dict.fromkeys(("--cache-type-v", "-ctv"), "v"),
}


def pairs(line: str) -> dict[str, str]:
    """The keys and values of one line of slog; {} where there are none."""
    return {key or word: unquoted(value) for key, word, value in _PAIR.findall(line)}


def unquoted(value: str) -> str:
    """A Go string without its quotes."""
    if not value.startswith('"'):
        return value
    try:
        return str(json.loads(value))
    except ValueError:  # escapes that JSON has not, \x1b for one: left as they stand
        return value[1:-1]


def bytes_of(text: str) -> list[int] | None:
    """[least, most] bytes that a rounded size can be; None for what is no size."""
    match = _BYTES.fullmatch(text.strip())
    if match is None:
        return None
    number, unit = match.group(1), _UNITS[match.group(2)]
    half = 0.5 * 10 ** -len(number.partition(".")[2]) if unit > 1 else 0
    return [int((float(number) - half) * unit), int((float(number) + half) * unit) + 1]


def config_of(text: str) -> dict[str, str]:
    """KEPT variables of the list that the server prints when it starts ("map[A:1 B: C:2]")."""
    found = {}
    for name in KEPT:
        match = re.search(rf"(?:^| ){name}:(.*?)(?= [A-Z][A-Za-z_]*:|$)", text)
        if match:
            found[name] = match.group(1)
    return found


def load(via: str, model: str | None, why: list[Data]) -> Data:
    """An empty record of one load of one model."""
    return {
        "via": via,  # what started the runner
        "blob": model,  # 64 hex digits of the model's file
        "told": None,  # {"k", "v"}: what the runner was told; "" is its default
        "flash": None,
        "cells": None,
        "parallel": None,
        "allocated": [],  # {"cells", "layers", "k", "v", "k_mib", "v_mib"} of llama.cpp
        "buffers": None,  # [least, most] bytes of Ollama's own engine
        "why": why,  # {"slug", "text"}
        "failed": None,
    }


class Reader:
    """Keeps the last start of the server, and the loads since then."""

    def __init__(self) -> None:
        self.begin(None)

    def begin(self, config: dict[str, str] | None) -> None:
        """A start of the server: what came before it is of no use."""
        self.config = config
        self.version: str | None = None
        self.loads: list[Data] = []
        self._why: list[Data] = []

    def line(self, line: str) -> None:
        if match := _CONFIG.search(line):
            self.begin(config_of(match.group(1).replace('\\"', '"')))
        elif match := _VERSION.search(line):
            self.version = match.group(1)
        elif match := _ALLOCATED.search(line):
            self._allocated(match)
        elif (match := _FLASH.search(line)) and self.loads:
            self.loads[-1]["flash"] = match.group(1)
        elif slug := next((slug for text, slug in _FATAL.items() if text in line), None):
            self._failed(slug, line)
        elif "msg=" in line:
            self._said(pairs(line))

    def _said(self, said: dict[str, str]) -> None:
        message = said.get("msg", "")
        if message in WARNINGS:
            # type="" is a warning about nothing that was asked (ollama#9730)
            if said.get("type") != "":
                slug = WARNINGS[message]
                self._why.append({"slug": slug, "text": message, "type": said.get("type")})
        elif message in ("starting runner", "starting llama server", "starting llama-server"):
            self._started(message, said.get("cmd", ""))
        elif message == "load" and "request" in said:
            self._request(dict(_FIELD.findall(said["request"])))
        elif message == "kv cache" and self.loads and "size" in said:
            self._buffer(said["size"])

    def _started(self, message: str, command: str) -> None:
        blob = _BLOB.search(command)
        via = "llama-server" if message == "starting llama-server" else "runner"
        new = load(via, blob.group(1) if blob else None, self._why)
        self._why = []
        try:
            words = shlex.split(command)
        except ValueError:  # a path with a quote in it
            words = command.split()
        given: dict[str, str] = {}
        for word, value in zip(words, [*words[1:], ""]):  # noqa: B905 (Python 3.9)
            if word in _FLAGS:
                given[_FLAGS[word]] = value
            elif word in ("--flash-attn", "-fa"):
                new["flash"] = value if value in ("on", "off", "auto") else "on"
        told = {"k": given.get("k", given.get("both", ""))}
        told["v"] = given.get("v", given.get("both", ""))
        # the runner of 0.11 and later is told by a request; llama-server may be told by its
        # environment, so that no flag is no word
        silent = "--ctx-size" not in words if via == "runner" else not any(told.values())
        new["told"] = None if silent else told
        new["cells"] = whole(given.get("cells"))
        new["parallel"] = whole(given.get("parallel"))
        self.loads.append(new)

    def _request(self, fields: dict[str, str]) -> None:
        if fields.get("Operation") == "close" or not self.loads:
            return
        # fit and alloc are tries, commit is what is done
        last = self.loads[-1]
        last["buffers"] = None
        last["flash"] = {"true": "on", "false": "off"}.get(
            fields.get("FlashAttention", ""), fields.get("FlashAttention", "").lower() or None
        )
        last["cells"] = whole(fields.get("KvSize"))
        last["parallel"] = whole(fields.get("Parallel"))
        if fields.get("Operation") == "commit" and "KvCacheType" in fields:
            last["told"] = {"k": fields["KvCacheType"], "v": fields["KvCacheType"]}

    def _allocated(self, match: re.Match[str]) -> None:
        if not self.loads:
            self.loads.append(load("unseen", None, self._why))
            self._why = []
        cells, layers, k, k_mib, v, v_mib = match.groups()
        row = {"cells": whole(cells), "layers": whole(layers), "k": k, "v": v}
        self.loads[-1]["allocated"].append({**row, "k_mib": float(k_mib), "v_mib": float(v_mib)})

    def _buffer(self, size: str) -> None:
        found, before = bytes_of(size), self.loads[-1]["buffers"]
        if found is not None:
            least, most = before or (0, 0)
            self.loads[-1]["buffers"] = [least + found[0], most + found[1]]

    def _failed(self, slug: str, line: str) -> None:
        if self.loads:
            self.loads[-1]["failed"] = {"slug": slug, "text": line.strip()[-200:]}


def whole(text: str | None) -> int | None:
    """A number of digits alone, else None."""
    return int(text) if text is not None and text.isdecimal() else None


def loads_of(lines: Iterable[str]) -> Data:
    """{"config": {variable: value} or null, "version": text or null, "loads": [as in load()]}: of
    the last start of the server that the lines tell of."""
    reader = Reader()
    for line in lines:
        reader.line(line)
    return {"config": reader.config, "version": reader.version, "loads": reader.loads}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", help="a file, or - for stdin")
    args = parser.parse_args()
    if args.file == "-":
        print(json.dumps(loads_of(sys.stdin)))
        return 0
    with open(args.file, encoding="utf-8", errors="replace") as handle:
        print(json.dumps(loads_of(handle)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
