#!/usr/bin/env python3
"""Says whether a bundle (made by `kvhost bundle`) is whole and is the one that is wanted.

bundle_check.py --bundle DIR [--lock F --tools F]   JSON; exit 0 whole, 1 not (every fault, stderr)

Each file must have the size and the sha256 of manifest.json, and nothing else may lie there. Each
wheel must be one that the lock names by hash, and each locked package must have its wheel: so a
manifest that was changed together with a file is no help. Without --lock and --tools the bundle's
own copies of both are taken. Read only.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import stat
import sys
from typing import Any

MANIFEST = "manifest.json"
SCHEMA = 1
#: folder -> the lock whose wheels are in it
FOLDERS = {"wheels": "lock.txt", "tools": "tools.txt"}
#: folder of Debian packages, where the bundle has some (kvhost/engine/bundle_packages.py)
PACKAGES = "packages"
_PATH = re.compile(r"(?:wheels/|tools/|packages/)?[A-Za-z0-9][A-Za-z0-9._+!-]*")
_DIGEST = re.compile(r"[0-9a-f]{64}")
Data = dict[str, Any]


def file_digest(path: str) -> str:
    """sha256 in hex. Raises OSError."""
    digest = hashlib.sha256()
    with open(path, "rb") as handle:
        for block in iter(lambda: handle.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def pins(text: str) -> dict[str, frozenset[str]]:
    """Requirement ("torch==2.13.0+cpu") -> sha256 of what it may be. Raises ValueError."""
    found: dict[str, frozenset[str]] = {}
    for line in text.replace("\\\n", " ").splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        head, *rest = line.split()
        hashes = frozenset(part[len("--hash=sha256:") :] for part in rest)
        if not re.fullmatch(r"[^=@\s]+={2,3}[^=\s]+", head) or not hashes:
            raise ValueError(f"not a pinned requirement with hashes: {line.strip()[:80]!r}")
        if not all(_DIGEST.fullmatch(one) for one in hashes):
            raise ValueError(f"{head}: a hash that is not sha256")
        found[head] = hashes
    return found


def read_manifest(bundle: str) -> Data:
    """manifest.json, its form checked. Raises OSError, ValueError."""
    path = os.path.join(bundle, MANIFEST)
    if not stat.S_ISREG(os.stat(path).st_mode):  # a pipe would be waited for
        raise ValueError(f"{MANIFEST}: not a regular file")
    with open(path, encoding="utf-8") as handle:
        try:
            manifest = json.load(handle)
        except RecursionError:
            raise ValueError(f"{MANIFEST} is nested too deeply") from None
    if not isinstance(manifest, dict) or manifest.get("schema") != SCHEMA:
        raise ValueError(f"{MANIFEST} is not one of schema {SCHEMA}")
    words = ("lock", "python", "machine")
    files = manifest.get("files")
    if not isinstance(files, dict) or not all(_plain(manifest.get(word)) for word in words):
        raise ValueError(f"{MANIFEST} lacks one of {', '.join(words)}, files")
    for path, row in files.items():
        if not _PATH.fullmatch(path):
            raise ValueError(f"{MANIFEST} names {path!r}, which is no place in a bundle")
        good = isinstance(row, dict) and isinstance(row.get("bytes"), int)
        if not good or not _DIGEST.fullmatch(str(row.get("sha256"))):
            raise ValueError(f"{MANIFEST} has no size and sha256 of {path}")
    release = manifest.get("packages")
    if release is not None and f"{PACKAGES}/Packages" not in files:
        raise ValueError(f"{MANIFEST} says packages of {release!r}, and names none")
    if not set(FOLDERS.values()) <= set(files):
        raise ValueError(f"{MANIFEST} does not name {' and '.join(FOLDERS.values())}")
    return manifest


def _plain(word: Any) -> bool:
    return isinstance(word, str) and re.fullmatch(r"[A-Za-z0-9._+ -]{1,100}", word) is not None


def listing(bundle: str) -> dict[str, os.stat_result]:
    """Everything below a bundle that is no directory, but the manifest. Raises OSError."""

    def unreadable(error: OSError) -> None:
        raise error

    found = {}
    for root, folders, names in os.walk(bundle, onerror=unreadable):
        links = [name for name in folders if os.path.islink(os.path.join(root, name))]
        for name in (*names, *links):
            path = os.path.join(root, name)
            found[os.path.relpath(path, bundle)] = os.lstat(path)
    found.pop(MANIFEST, None)
    return found


def form_faults(bundle: str, manifest: Data) -> list[str]:
    """What is missing, additional, or not of the size that the manifest says; no byte is read."""
    wanted: Data = manifest["files"]
    there, faults = listing(bundle), []
    for path in sorted({*there, *wanted}):
        if path not in there:
            faults.append(f"{path}: missing")
        elif path not in wanted:
            shown = "".join(c if c.isprintable() else "\ufffd" for c in path)  # anybody's name
            faults.append(f"{shown}: additional, the manifest does not name it")
        elif not stat.S_ISREG(there[path].st_mode):
            faults.append(f"{path}: not a regular file")
        elif there[path].st_size != wanted[path]["bytes"]:
            size = wanted[path]["bytes"]
            faults.append(f"{path}: has {there[path].st_size} bytes, the manifest says {size}")
    return faults


def lock_faults(manifest: Data, folder: str, lock_text: str) -> list[str]:
    """Wheels that the lock does not name, and what it names that has no wheel."""
    try:
        wanted = pins(lock_text)
    except ValueError as error:
        return [f"{FOLDERS[folder]}: {error}"]
    prefix = folder + "/"
    have = {
        row["sha256"]: path for path, row in manifest["files"].items() if path.startswith(prefix)
    }
    locked = {one for hashes in wanted.values() for one in hashes}
    faults = [f"{path}: not a file of the lock" for one, path in have.items() if one not in locked]
    faults += [
        f"{folder}/: no file of {head}" for head, hashes in wanted.items() if not hashes & set(have)
    ]
    return sorted(faults)


def find_faults(
    bundle: str, lock_text: str | None = None, tools_text: str | None = None
) -> tuple[list[str], Data]:
    """Everything that is wrong with a bundle, and its manifest. Raises OSError, ValueError: it is
    none at all."""
    manifest = read_manifest(bundle)
    faults = form_faults(bundle, manifest)
    bad = {fault.partition(":")[0] for fault in faults}
    for path, row in sorted(manifest["files"].items()):
        if path not in bad and file_digest(os.path.join(bundle, path)) != row["sha256"]:
            faults.append(f"{path}: changed, its sha256 is not the manifest's")
            bad.add(path)
    given = {"lock.txt": lock_text, "tools.txt": tools_text}
    for folder, name in FOLDERS.items():
        text = given[name]
        if text is None:
            if name in bad:
                continue
            with open(os.path.join(bundle, name), encoding="utf-8") as handle:
                text = handle.read()
        elif hashlib.sha256(text.encode()).hexdigest() != manifest["files"][name]["sha256"]:
            faults.append(f"{name}: the bundle was made from another one than this host needs")
            continue
        faults += lock_faults(manifest, folder, text)
    return faults, manifest


def text_of(path: str | None) -> str | None:
    """None for none. Raises OSError, ValueError."""
    if path is None:
        return None
    with open(path, encoding="utf-8") as handle:
        return handle.read()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--bundle", required=True, help="directory of the bundle")
    parser.add_argument("--lock", help="the lock that is to be installed")
    parser.add_argument("--tools", help="the lock of the tools")
    args = parser.parse_args()
    try:
        faults, manifest = find_faults(args.bundle, text_of(args.lock), text_of(args.tools))
    except (OSError, ValueError) as error:
        faults, manifest = [str(error)], {"files": {}}
    if faults:
        print(f"the bundle {args.bundle} is refused:", *faults, sep="\n  ", file=sys.stderr)
        print("Nothing of it was installed. Make it anew: kvhost bundle", file=sys.stderr)
        return 1
    rows = manifest["files"].values()
    size = sum(row["bytes"] for row in rows)
    print(f"the bundle is whole: {len(rows)} files, {size >> 20} MB", file=sys.stderr)
    print(json.dumps({"ok": True, "files": len(rows), "bytes": size}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
