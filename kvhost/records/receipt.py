"""The receipt: what a run left on a host, by digest. Equal hosts have equal receipts: no times."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvhost import __version__
from kvhost.engine.locks import EngineLock
from kvhost.report import HostReport
from kvhost.services.namespace import Namespace
from kvhost.settings import Settings, settings_digest

SCHEMA = 1


def make_receipt(
    settings: Settings,
    lock: EngineLock,
    *,
    tools_digest: str,
    python: str,
    model_digest: str,
    namespace: Namespace,
    files: Mapping[str, str],
    scripts: Mapping[str, str],
    abi: Sequence[Mapping[str, str]],
    system: Mapping[str, Any],
    drive: Mapping[str, Any] | None = None,
) -> str:
    """JSON text. ``files``: path -> content of what was rendered, ``scripts``: of kvhost's own
    programs on the host; only their digests are kept. ``abi``: what each line of
    the ABI check said. ``system``: from system_of(). ``drive``: what drive_apply.py keeps of the
    mounted drive (identity, UUID, options), None where none is claimed."""
    receipt: dict[str, Any] = {
        "schema": SCHEMA,
        "kvhost": __version__,
        "settings": settings_digest(settings),
        "engine": {
            "lock": lock.name,
            "digest": lock.digest,
            "python": python,
            "versions": dict(lock.versions),
            "third_party": lock.third_party,
            "wheels": {name: _sha256(content) for name, content in sorted(lock.wheels.items())},
            "abi": [dict(row) for row in abi],
        },
        "tools": tools_digest,
        "model": {
            "source": settings.model_source,
            "revision": settings.model_revision,
            "digest": model_digest,
        },
        "namespace": {
            "digest": namespace.digest,
            "fields": namespace.fields,
            "chunk_bytes": namespace.chunk_bytes,
        },
        "system": dict(system),
        "files": {path: _sha256(text.encode()) for path, text in sorted(files.items())},
        "scripts": {path: _sha256(text.encode()) for path, text in sorted(scripts.items())},
    }
    if drive is not None:
        receipt["drive"] = dict(drive)
    return json.dumps(receipt, indent=1, sort_keys=True) + "\n"


def system_of(settings: Settings, report: HostReport) -> dict[str, Any]:
    """What of the host itself the proof of a cache rests on: kernel, driver, the tier's mount.

    Parts that could not be read, and a claimed drive, which has a record of its own, are None.
    """
    arch, driver = report.arch.data, report.driver.data
    tier = report.disk(settings.resolved_tier_dir).data
    known = tier is not None and not settings.claims_a_drive
    return {
        "kernel": arch.kernel if arch else None,
        "driver": driver.loaded.version if driver and driver.loaded else None,
        "tier": {"mount_point": tier.mount_point, "fs": tier.fs} if tier and known else None,
    }


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
