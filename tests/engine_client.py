#!/usr/bin/env python3
"""Asks vLLM for one greedy answer to a prompt of random tokens; JSON on stdout.

engine_client.py PORT SEED TOKENS [--max N] [--timeout S]; the key is in $KVHOST_API_KEY. The same
seed is the same prompt. {"status", "cached", "text", "seconds", "why"}; status 0: no answer.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
import urllib.error
import urllib.request


def ask(port: int, seed: int, tokens: int, most: int, timeout: float) -> dict[str, object]:
    draw = random.Random(seed)
    prompt = [draw.randrange(256) for _ in range(tokens)]  # bytes, to the built-in model
    body = {"model": "kvhost-builtin", "prompt": prompt, "max_tokens": most, "temperature": 0,
            "ignore_eos": True}  # fmt: skip
    key = os.environ.get("KVHOST_API_KEY", "")
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json", "Authorization": f"Bearer {key}"},
    )
    began = time.monotonic()
    found: dict[str, object] = {"status": 0, "cached": None, "text": None, "why": None}
    try:
        with urllib.request.urlopen(request, timeout=timeout) as reply:
            answer = json.load(reply)
            details = answer["usage"].get("prompt_tokens_details") or {}
            found.update(status=reply.status, cached=details.get("cached_tokens", 0),
                         text=answer["choices"][0]["text"])  # fmt: skip
    except urllib.error.HTTPError as error:
        found.update(status=error.code, why=error.read().decode(errors="replace")[:300])
    except (OSError, ValueError) as error:
        found.update(why=f"{type(error).__name__}: {error}")
    return {**found, "seconds": round(time.monotonic() - began, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("port", type=int)
    parser.add_argument("seed", type=int)
    parser.add_argument("tokens", type=int)
    parser.add_argument("--max", type=int, default=8)
    parser.add_argument("--timeout", type=float, default=120)
    args = parser.parse_args()
    print(json.dumps(ask(args.port, args.seed, args.tokens, args.max, args.timeout)))


if __name__ == "__main__":
    main()
