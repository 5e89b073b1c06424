#!/usr/bin/env python3
"""Whether the installed supervisord takes a configuration: supervisor_check.py FILE

Run by the tools' Python, before the file replaces the one in use. supervisord's own reader judges
the values; a key that it never asks for is an error here, because it only passes over it.
Exit: 0 it does; 1 it does not (all that is wrong, on stderr).
"""

# supervisor is not there where types are checked
# mypy: disable-error-code="import-not-found,import-untyped"
from __future__ import annotations

import argparse
import configparser
import contextlib
import difflib
import inspect
import io
import re
import sys


def unknown_keys(path: str) -> list[str]:
    """Keys that no `get` of supervisor's options module names. Raises configparser.Error."""
    from supervisor import options

    source = inspect.getsource(options)
    known = set(re.findall(r"\bget\(\s*(?:section,\s*)?['\"](\w+)['\"]", source))
    known |= {f"{channel}_{rest}" for channel in ("stdout", "stderr") for rest in CHANNEL}
    known |= {"file", "chmod", "chown", "serverurl", "supervisor.rpcinterface_factory"}
    parser = configparser.RawConfigParser(inline_comment_prefixes=(" ;",), strict=True)
    with open(path, encoding="utf-8") as handle:
        parser.read_file(handle)
    found = []
    for section in parser.sections():
        for key in parser[section]:
            if key in known:
                continue
            near = difflib.get_close_matches(key, sorted(known), 1, 0.6)
            meant = f"; the nearest that there is: {near[0]}" if near else ""
            found.append(f"[{section}] {key} is not known to the installed version{meant}")
    return found


#: built from stdout_ and stderr_ in supervisor's code
CHANNEL = (
    *("logfile", "logfile_maxbytes", "logfile_backups", "capture_maxbytes", "events_enabled"),
    *("syslog",),
)


def refused(path: str) -> list[str]:
    """What supervisord says of the values."""
    from supervisor.options import ServerOptions

    said = io.StringIO()
    server = ServerOptions()
    server.stderr = said
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            server.realize(["-c", path])
    except SystemExit:
        return [line for line in said.getvalue().splitlines() if line.startswith("Error")] or [
            said.getvalue().strip()
        ]
    except ValueError as error:
        return [f"Error: {error}"]
    return []


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file")
    args = parser.parse_args()
    try:
        wrong = unknown_keys(args.file) or refused(args.file)
    except (OSError, configparser.Error) as error:
        wrong = [str(error)]
    for line in wrong:
        print(f"supervisord.conf: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
