"""The receipt of a host with the runner Ollama, in the form of every receipt."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from kvhost import __version__
from kvhost.engine.locks import EngineLock
from kvhost.records.receipt import SCHEMA
from kvhost.settings import Settings, settings_digest


def make_ollama_receipt(
    settings: Settings,
    lock: EngineLock,
    *,
    version: str | None,
    model: Mapping[str, Any],
    tools_digest: str,
    files: Mapping[str, str],
    scripts: Mapping[str, str],
    system: Mapping[str, Any],
    drive: Mapping[str, Any] | None = None,
) -> str:
    """JSON text. ``version``: that the server says; ``model``: {"name", "digest"} as it lists it;
    the rest is as in kvhost/records/receipt.py."""
    receipt: dict[str, Any] = {
        "schema": SCHEMA,
        "kvhost": __version__,
        "settings": settings_digest(settings),
        "runner": "ollama",
        "engine": {"lock": lock.name, "digest": lock.digest, "versions": {"ollama": version}},
        "tools": tools_digest,
        "model": {"source": settings.model_source, "revision": None, **model},
        "system": dict(system),
        "files": {path: _sha256(text) for path, text in sorted(files.items())},
        "scripts": {path: _sha256(text) for path, text in sorted(scripts.items())},
    }
    if drive is not None:
        receipt["drive"] = dict(drive)
    return json.dumps(receipt, indent=1, sort_keys=True) + "\n"


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
