#!/usr/bin/env python3
"""Which variables of Ollama's a unit file, a drop-in or an environment file sets, and where.

ollama_sets.py FILE             the rows of one unit file or drop-in, as JSON

Of all other variables nothing is told: they may be secrets. See systemd.exec(5), systemd.syntax(7).
"""

from __future__ import annotations

import argparse
import glob
import json
import re
import shlex
import sys
from typing import TYPE_CHECKING, Any

sys.dont_write_bytecode = True  # bin/ stays as it was installed
if TYPE_CHECKING or __package__:
    from kvhost.onhost.ollama_log import KEPT as WATCHED
else:  # it lies beside this file on a host, where there is no package kvhost
    from ollama_log import KEPT as WATCHED

Data = dict[str, Any]


def joined(text: str) -> list[tuple[int, str]]:
    """(number, line) of a unit file: continued lines are one, comments are left out."""
    rows: list[tuple[int, str]] = []
    begun = False
    for number, line in enumerate(text.splitlines(), start=1):
        if line.lstrip().startswith(("#", ";")):
            continue  # also in the middle of a continued line (systemd.syntax(7))
        if begun:
            first, before = rows.pop()
            rows.append((first, before + " " + line.strip()))
        else:
            rows.append((number, line.strip()))
        begun = rows[-1][1].endswith("\\")
        if begun:
            rows[-1] = (rows[-1][0], rows[-1][1][:-1].rstrip())
    return rows


def assignments(text: str) -> list[str]:
    """The words of Environment=. A quote that is not closed: systemd ignores the line."""
    try:
        return [word.replace("%%", "%") for word in shlex.split(text, comments=False)]
    except ValueError:
        return []


def sets_of(path: str, text: str) -> tuple[list[Data], list[str]]:
    """What a unit file or drop-in does to the WATCHED variables, and its environment files.

    Rows {"file", "line", "variable", "value"}; a value of None takes the variable away (unset, or
    all of them by an empty Environment=).
    """
    rows: list[Data] = []
    files: list[str] = []
    section = ""
    for number, line in joined(text):
        if line.startswith("["):
            section = line
            continue
        key, _, value = line.partition("=")
        key, value = key.strip(), value.strip()
        if section != "[Service]":
            continue
        if key == "Environment" and not value:
            rows += [row(path, number, name, None) for name in WATCHED]
        elif key == "Environment":
            for word in assignments(value):
                name, _, given = word.partition("=")
                if name in WATCHED:
                    rows.append(row(path, number, name, given))
        elif key == "UnsetEnvironment":
            for word in assignments(value):
                name, equals, only = word.partition("=")
                if name in WATCHED:
                    one = row(path, number, name, None, last=True)
                    rows.append({**one, "only": only} if equals else one)
        elif key == "EnvironmentFile":
            files = [*files, value[value.startswith("-") :]] if value else []
    return rows, files


def settled(rows: list[Data]) -> list[Data]:
    """What is unset comes last of all; UnsetEnvironment=X=VALUE does so for that value alone."""
    now: dict[str, str | None] = {}
    kept: list[Data] = []
    for one in sorted(rows, key=lambda one: bool(one["last"])):
        only = one.pop("only", None)
        if only is None or now.get(one["variable"]) == only:
            now[one["variable"]] = one["value"]
            kept.append(one)
    return kept


def files_of(pattern: str) -> list[str]:
    """The files that an EnvironmentFile= means, in order, by wildcards too (systemd.exec(5)).

    A path that is not absolute, one in quotes too, systemd ignores. Raises ValueError for one with
    a specifier (%h), which is not worked out here.
    """
    if re.search(r"%(?!%)", pattern.replace("%%", "")):
        raise ValueError("it has a specifier (%), which kvhost does not work out")
    path = pattern.replace("%%", "%")
    if not path.startswith("/"):
        return []
    return sorted(glob.glob(path)) if glob.has_magic(path) else [path]


def row(path: str, line: int, variable: str, value: str | None, last: bool = False) -> Data:
    return {"file": path, "line": line, "variable": variable, "value": value, "last": last}


def sets_of_file(path: str) -> list[Data]:
    """The same of an environment file. Raises OSError."""
    rows = []
    with open(path, encoding="utf-8", errors="replace") as handle:
        for number, line in enumerate(handle, start=1):
            match = re.match(r"\s*([A-Z_a-z0-9]+)\s*=\s*(.*?)\s*$", line)
            if match and match.group(1) in WATCHED:
                rows.append(row(path, number, match.group(1), match.group(2).strip("'\"")))
    return rows


def of_process(pid: int) -> dict[str, str] | None:
    """The WATCHED variables that a process was started with; None where it cannot be read."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as handle:
            words = handle.read().decode(errors="replace").split("\0")
    except OSError:
        return None
    given = dict(word.split("=", 1) for word in words if "=" in word)
    return {name: given[name] for name in WATCHED if name in given}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", help="a unit file or a drop-in")
    args = parser.parse_args()
    with open(args.file, encoding="utf-8") as handle:
        rows, files = sets_of(args.file, handle.read())
    print(json.dumps({"sets": rows, "files": files}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
