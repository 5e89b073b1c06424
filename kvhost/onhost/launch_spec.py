"""A service's description and the digest of all that it is started with; launch.py says the keys.

For launch.py and what else lies beside this: services.py asks by the digest who is to be restarted.
"""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any


def read_spec(path: str) -> dict[str, Any]:
    """Raises OSError, or ValueError that names everything that is wrong with it."""
    with open(path, encoding="utf-8") as handle:
        spec = json.load(handle)
    if not isinstance(spec, dict):
        raise ValueError("it is not a JSON object")
    wanted = {"service": str, "argv": list, "env": dict, "record": str}
    wrong = [
        f"{key} ({'missing' if key not in spec else 'not a ' + kind.__name__})"
        for key, kind in wanted.items()
        if not isinstance(spec.get(key), kind) or not spec[key]
    ]
    if wrong:
        raise ValueError("unusable keys: " + ", ".join(wrong))
    return spec


def config_digest(spec_path: str, spec: dict[str, Any]) -> str:
    """Digest of all that the service was started with. A secret's file counts by inode, size and
    time, never by content: a digest of a weak key would give it away. Raises OSError."""
    digest = hashlib.sha256()
    with open(spec_path, "rb") as handle:
        digest.update(handle.read())
    for path in spec.get("watch", []):
        content: str | None = None
        if os.path.islink(path):
            content = "link " + os.readlink(path)
        elif os.path.isfile(path):
            with open(path, "rb") as handle:
                content = "file " + hashlib.sha256(handle.read()).hexdigest()
        digest.update(repr((path, content)).encode())
    for path in sorted(spec.get("secret_env", {}).values()):
        st = os.stat(path)
        digest.update(repr((path, st.st_ino, st.st_size, st.st_mtime_ns)).encode())
    return digest.hexdigest()
