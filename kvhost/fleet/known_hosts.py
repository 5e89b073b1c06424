"""The working copy's own known_hosts file: keys of rented hosts come and go, and it is recorded.

Lines are OpenSSH's. One that no longer holds stays as a comment, with the time.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import hmac
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

#: the file, below the working copy
KNOWN_HOSTS = "known_hosts"
_PLACE = re.compile(r"(?:\[([^\]]+)\]|([^:\[\]]+)):([0-9]{1,5})")


def entry_name(address: str, port: int) -> str:
    """As OpenSSH names a host: the port only where it is not 22."""
    return address if port == 22 else f"[{address}]:{port}"


def fingerprint(key_base64: str) -> str:
    """SHA256:… as ssh-keygen -l shows it."""
    digest = hashlib.sha256(base64.b64decode(key_base64)).digest()
    return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


def entries(path: Path, given: str) -> list[str]:
    """Names in the file that ADDRESS[:PORT] means; without a port, where 22 has none, all ports."""
    fields = [words[0] for words in _lines(path)]
    parts = _PLACE.fullmatch(given)
    if parts and parts[3]:
        given = entry_name(parts[1] or parts[2], int(parts[3]))
    if any(_means(field, given) for field in fields):
        return [given]
    names = {name for field in fields for name in field.split(",")}
    return sorted(name for name in names if name.startswith(f"[{given.strip('[]')}]:"))


def forget(path: Path, name: str) -> list[str]:
    """Takes the keys of an entry out. The fingerprints of what was there. Raises OSError."""
    with _locked(path):
        return _replace(path, name, None, "taken out")


def record(path: Path, address: str, port: int, kind: str, key_base64: str) -> str | None:
    """Keeps this key in the place of others. What changed, for people; None if nothing did."""
    name = entry_name(address, port)
    with _locked(path):
        there = [words for words in _lines(path) if _means(words[0], name)]
        if [kind, key_base64] in [words[1:3] for words in there]:
            return None
        gone = _replace(path, name, f"{name} {kind} {key_base64}", "replaced")
    now = f"{name} shows the key {fingerprint(key_base64)}"
    if not gone:
        return f"{now}, the first that is seen (host_key: any)"
    return f"{now}, not {', '.join(gone)} as before; accepted and recorded (host_key: any)"


def _lines(path: Path) -> list[list[str]]:
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    words = [line.split() for line in text.splitlines()]
    return [one for one in words if len(one) >= 3 and not one[0].startswith(("#", "@"))]


def _means(field: str, name: str) -> bool:
    """Whether a line is of this host: one of several with commas, or hashed, as ssh writes them."""
    if not field.startswith("|1|"):
        return name in field.split(",")
    try:
        salt, digest = map(base64.b64decode, field.split("|")[2:])
    except ValueError:
        return False
    return hmac.compare_digest(hmac.digest(salt, name.encode(), "sha1"), digest)


def _replace(path: Path, name: str, line: str | None, why: str) -> list[str]:
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    kept, gone = [], []
    at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    for old in text.splitlines():
        words = old.split()
        if len(words) >= 3 and _means(words[0], name):
            gone.append(fingerprint(words[2]))
            kept.append(f"# {at} {why}: {name} {words[1]} {gone[-1]}")
            others = [one for one in words[0].split(",") if one != name]
            if others and not words[0].startswith("|"):
                kept.append(" ".join([",".join(others), *words[1:]]))
        else:
            kept.append(old)
    kept += [line] if line else []
    new = path.with_name(f"{path.name}.{os.getpid()}")
    new.write_text("".join(f"{row}\n" for row in kept), encoding="utf-8")
    new.replace(path)
    return gone


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Two runs may learn of two hosts at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f".{path.name}.lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
