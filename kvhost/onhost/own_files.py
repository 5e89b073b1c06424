#!/usr/bin/env python3
"""Makes files in directories of the service's user, run as that user: own_files.py --dir D …

What lies in such a directory can be replaced by a link at any moment, so that root must not write
there by path. Directories get 0700, files 0600. An empty directory in the place of a file goes, one
that holds something never. `--check` changes nothing and prints JSON: whether all is as wanted.
Exit: 0 done or checked, 1 something stands in the way (what, on stderr).
"""

from __future__ import annotations

import argparse
import json
import os
import stat
import sys


def wrong(path: str, directory: bool, text: str | None) -> str | None:
    """What is not as wanted, None when nothing."""
    try:
        st = os.lstat(path)
    except FileNotFoundError:
        return f"{path} is not there"
    except OSError as error:  # of a directory above it, which is another user's, or none
        return f"{path}: {error.strerror}"
    if stat.S_ISLNK(st.st_mode):
        return f"{path} is a link"
    if directory:
        good = stat.S_ISDIR(st.st_mode) and stat.S_IMODE(st.st_mode) == 0o700
    else:
        good = stat.S_ISREG(st.st_mode) and stat.S_IMODE(st.st_mode) == 0o600
    if not good or st.st_uid != os.geteuid():
        return f"{path} has another kind, mode or owner"
    if text is not None:
        wanted = text.encode()
        with open(path, "rb") as handle:
            found = handle.read(len(wanted) + 1)  # it may have been made long
        return None if found == wanted else f"{path} has another content"
    return None


def make_directory(path: str) -> None:
    if os.path.islink(path):
        os.unlink(path)
    os.makedirs(path, 0o700, exist_ok=True)
    owner = os.stat(path).st_uid
    if owner != os.geteuid():  # only root could give it back, and root does not write here by path
        back = f"chown -hR {os.geteuid()}:{os.getegid()} '{path}'"  # no setting takes a quote
        raise PermissionError(f"{path} belongs to uid {owner}, not to the service's user: {back}")
    os.chmod(path, 0o700)


def make_file(path: str, text: str) -> None:
    new = path + ".new"
    if os.path.isdir(path) and not os.path.islink(path):
        os.rmdir(path)
    if os.path.isdir(new) and not os.path.islink(new):
        os.rmdir(new)
    elif os.path.lexists(new):
        os.unlink(new)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with os.fdopen(os.open(new, flags, 0o600), "w", encoding="utf-8") as handle:
        handle.write(text)
        handle.flush()
        os.fsync(handle.fileno())
    os.replace(new, path)  # a link at the place is replaced, not followed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", action="append", default=[], help="a directory; repeatable")
    parser.add_argument("--file", action="append", default=[], nargs=2, metavar=("PATH", "TEXT"))
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    problems = [wrong(path, True, None) for path in args.dir]
    problems += [wrong(path, False, text) for path, text in args.file]
    found = [problem for problem in problems if problem]
    if args.check:
        print(json.dumps({"ok": not found, "wrong": found}))
        return 0
    try:
        for path in args.dir:
            if wrong(path, True, None):
                make_directory(path)
        for path, text in args.file:
            if wrong(path, False, text):
                make_file(path, text)
    except OSError as error:
        print(f"own_files: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
