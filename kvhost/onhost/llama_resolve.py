#!/usr/bin/env python3
"""What llama-server and its model say of themselves, before they serve: one JSON object.

llama_resolve.py --program PATH --model FILE.gguf --context TOKENS

{"build", "machine", "architecture", "vocab_size", "context", "name"}. A model whose header does not
fit its length, and one with a shorter context than asked for, is refused: llama-server itself
would start with less.
Exit: 0; 1 refused (why: stderr).
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from typing import TYPE_CHECKING, Any

sys.dont_write_bytecode = True  # bin/ stays as it was installed
if TYPE_CHECKING or __package__:
    from kvhost.onhost import gguf
    from kvhost.onhost.llama_check import said, version_of
else:  # it lies beside this file on a host, where there is no package kvhost
    import gguf
    from llama_check import said, version_of


class Refused(Exception):
    """Why, for people."""


def vocabulary(keys: dict[str, Any]) -> int:
    """Number of tokens. Raises Refused."""
    tokens = keys.get("tokenizer.ggml.tokens")
    if isinstance(tokens, dict) and tokens.get("length"):
        return int(tokens["length"])
    raise Refused("the model has no tokens: it cannot be served")


def resolve(program: str, path: str, context: int) -> dict[str, Any]:
    """Raises Refused, gguf.NotGguf, OSError."""
    code, text = said([program, "--version"])
    build = version_of(text)
    if code != 0 or not build:
        raise Refused(f"{program} --version: exit {code}: {text.strip()[-200:]}")
    keys = gguf.read_model(path)["keys"]
    kind = str(keys.get("general.architecture", ""))
    longest = keys.get(f"{kind}.context_length")
    if isinstance(longest, int) and context > longest:
        raise Refused(f"max_model_len is {context}, and the model's context {longest} tokens")
    return {
        "build": build,
        "machine": platform.machine(),
        "architecture": kind,
        "vocab_size": vocabulary(keys),
        "context": longest,
        "name": keys.get("general.name"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--program", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--context", required=True, type=int, help="tokens of a slot")
    args = parser.parse_args()
    try:
        print(json.dumps(resolve(args.program, args.model, args.context)))
    except (Refused, gguf.NotGguf, OSError) as error:
        print(f"{args.model}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
