#!/usr/bin/env python3
"""Fetches a model from a Hugging Face hub at one revision: model_fetch.py --repo ORG/NAME …

Run by the engine environment's Python as the service's user. Only safetensors weights and text
files are taken: a pickle runs code when it is loaded. A broken download is resumed by the next
run. The token is read from a file, never an argument. Exit: 0 complete, 1 not (why: stderr).
"""

# mypy: disable-error-code="import-not-found"
from __future__ import annotations

import argparse
import json
import os
import sys

MARKER = ".kvhost-complete.json"
PATTERNS = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.model", "*.txt", "*.jinja")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repo", required=True, help="ORG/NAME")
    parser.add_argument("--revision", required=True, help="commit, 40 hex digits")
    parser.add_argument("--out", required=True, help="directory of the model")
    parser.add_argument("--token-file", help="file with the hub's token")
    args = parser.parse_args()
    token = None
    if args.token_file:
        with open(args.token_file, encoding="utf-8") as handle:
            token = handle.read().strip()
    from huggingface_hub import HfApi, snapshot_download

    try:
        names = HfApi(token=token).list_repo_files(args.repo, revision=args.revision)
        if not any(name.endswith(".safetensors") for name in names):
            print(f"{args.repo} has no safetensors weights: not used", file=sys.stderr)
            return 1
        snapshot_download(
            args.repo,
            revision=args.revision,
            local_dir=args.out,
            allow_patterns=list(PATTERNS),
            token=token,
        )
    except Exception as error:
        print(f"could not fetch {args.repo}@{args.revision}: {error}", file=sys.stderr)
        print("What was fetched is kept; the next run goes on from there.", file=sys.stderr)
        return 1
    temporary = os.path.join(args.out, MARKER + ".new")
    with open(temporary, "w", encoding="utf-8") as handle:
        json.dump({"repo": args.repo, "revision": args.revision}, handle)
    os.replace(temporary, os.path.join(args.out, MARKER))
    return 0


if __name__ == "__main__":
    sys.exit(main())
