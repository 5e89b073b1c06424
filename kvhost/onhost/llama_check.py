#!/usr/bin/env python3
"""Proves an environment of llama-server, as the service's user: it has its libraries, it answers.

ENV/bin/python llama_check.py [--program PATH]     of the environment that this Python is of

Prints one line of JSON, {"ok", "checks": [{"name", "state", "detail"}]}; state is ok or failed. A
binary whose libraries do not resolve ends at its first call, which a service only shows as a loop
of restarts. Exit: 0 ok, 1 not.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING or __package__:
    from kvhost.onhost import bounded
else:  # it lies beside this file on a host, where there is no package kvhost
    import bounded

NAME = "llama-server"
LIMIT_S = 60
#: flags that kvhost/services/llama.py gives; one that is missing would end the server at its start
FLAGS = (
    *("--model", "--alias", "--host", "--port", "--ctx-size", "--parallel", "--no-kv-unified"),
    *("--cache-ram", "--cache-type-k", "--cache-type-v", "--flash-attn", "--slot-save-path"),
    *("--slots", "--metrics", "--no-ui", "--offline"),
)
Found = tuple[bool, str]


def said(argv: list[str]) -> tuple[int, str]:
    """Exit code and all it printed; 127 and why when it cannot be started, or does not end."""
    try:
        done = bounded.run(argv, LIMIT_S, stderr=subprocess.STDOUT)
    except OSError as error:
        return 127, str(error)
    return done.code, done.out


def last_line(text: str) -> str:
    return (text.strip().splitlines() or ["nothing"])[-1][:200]


def program(path: str) -> Found:
    if not os.path.isfile(path):
        return False, f"{path} is not there"
    return os.access(path, os.X_OK), f"{os.path.realpath(path)}"


def libraries(path: str) -> Found:
    """All that it is linked to, by ldd(1), as it would be for the service."""
    code, text = said(["ldd", os.path.realpath(path)])
    missing = sorted(set(re.findall(r"^\s*(\S+) => not found", text, re.MULTILINE)))
    if missing:
        return False, f"not found: {', '.join(missing)}"
    if "not a dynamic executable" in text or "statically linked" in text:
        return True, "none: it is linked statically"
    if code != 0:
        return False, f"ldd: {last_line(text)}"
    return True, f"{text.count('=>')} found"


def version_of(text: str) -> str:
    """ "b11434-abc", as /props has it, of what --version says; "" when it says none."""
    found = re.search(r"^version: .*\(build (\d+), commit (\S+)\)", text, re.MULTILINE)
    found = found or re.search(r"^version: (\d+) \((\S+)\)", text, re.MULTILINE)
    return f"b{found[1]}-{found[2]}" if found else ""


def version(path: str) -> Found:
    code, text = said([path, "--version"])
    found = version_of(text)
    if code != 0 or not found:
        return False, f"exit {code}: {last_line(text)}"
    return True, found


def flags(path: str) -> Found:
    code, text = said([path, "--help"])
    if code != 0:
        return False, f"--help: exit {code}: {last_line(text)}"
    known = set(re.findall(r"--[a-z0-9-]+", text))
    lacks = [flag for flag in FLAGS if flag not in known]
    return not lacks, f"it lacks {', '.join(lacks)}" if lacks else f"{len(FLAGS)} known"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--program", default=os.path.join(sys.prefix, "bin", NAME))
    parser.add_argument("--accelerator", choices=["cpu"], default="cpu")
    args = parser.parse_args()
    steps: dict[str, Callable[[str], Found]] = {
        "program": program,
        "libraries": libraries,
        "version": version,
        "flags": flags,
    }
    checks: list[dict[str, str]] = []
    for name, step in steps.items():
        fine, detail = step(args.program)
        checks.append({"name": name, "state": "ok" if fine else "failed", "detail": detail})
        if not fine:
            break  # what follows would fail for the same reason
    ok = all(check["state"] == "ok" for check in checks)
    print(json.dumps({"ok": ok, "checks": checks}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
