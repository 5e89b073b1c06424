"""Receipts kept on the controller: receipts/HOST.json, what the last run left on each host.

They hold digests and no secret. `drift` compares a host with its own, `rebuild` a rebuilt host.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvhost.basics import host_folder, text_of
from kvhost.reports.kept import TIME_FORMAT
from kvhost.working_copy import root

SCHEMA = "kvhost/receipt/1"
#: readings of the drives' counters that are kept, and how far they are apart at least
MOST_COUNTS, DAY_S = 30, 86400

#: what two hosts that are built alike may differ in, and why. Machine id, SSH host keys, times and
#: addresses are in no receipt.
MAY_DIFFER: Mapping[str, str] = {
    "drive.uuid": "a filesystem has a UUID of its own",
    "drive.drive": "which piece of hardware it is: serial, WWN",
    "drive.drives": "the same of an array",
}


class NoReceipt(Exception):
    """None is kept, or it cannot be read; says why."""


@dataclass(frozen=True)
class Kept:
    """``receipt`` as the host holds it; ``verdict``: {"persisted", "time"}, None if untested."""

    host: str
    time: str
    receipt: dict[str, Any]
    verdict: dict[str, str] | None


def receipts_dir() -> Path:
    """receipts/ of the working copy, or KVHOST_RECEIPTS."""
    given = os.environ.get("KVHOST_RECEIPTS")
    return Path(given) if given else root() / "receipts"


def path_of(folder: Path, host: str) -> Path:
    return folder / f"{host_folder(host)}.json"


def keep(
    folder: Path,
    host: str,
    receipt: Mapping[str, Any],
    verdict: Mapping[str, str] | None,
    written: Mapping[str, int] | None = None,
) -> Path:
    """Writes a host's receipt, 0600, in one step. ``written``: bytes, by serial number, that its
    drives count as written until now: kept beside the receipt. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path, now = path_of(folder, host), datetime.now(UTC)
    data: dict[str, Any] = {
        "schema": SCHEMA,
        "host": host,
        "time": now.strftime(TIME_FORMAT),
        "verdict": dict(verdict) if verdict is not None else None,
        "receipt": dict(receipt),
    }
    counts = counted(folder, host)
    moment = int(now.timestamp())
    if written and not (counts and 0 <= moment - counts[-1]["time"] < DAY_S):
        counts.append({"time": moment, "written": dict(written)})
    if counts:
        data["written"] = counts[-MOST_COUNTS:]
    write_private(path, json.dumps(data, indent=1, sort_keys=True) + "\n")
    return path


def write_private(path: Path, text: str) -> None:
    """0600, in one step; what was there, a link or a pipe too, is replaced. Raises OSError."""
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")  # 0600 by mkstemp
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def aside_of(folder: Path, host: str) -> Path:
    """HOST.before: what a host was, from a rebuild on until one ends equal to it."""
    return folder / f"{host_folder(host)}.before"


def set_aside(folder: Path, host: str) -> None:
    """A second name for the kept receipt, HOST.before, which runs leave alone. Raises OSError, also
    where one is there: it is the only proof of what the host was."""
    # keep() puts a new file in the place of the old
    aside_of(folder, host).hardlink_to(path_of(folder, host))


def counted(folder: Path, host: str) -> list[dict[str, Any]]:
    """What its drives counted as written at earlier runs, the oldest first: "time" (Unix) and
    "written" (serial number -> bytes). None of it where it cannot be read."""
    try:
        rows = json.loads(text_of(path_of(folder, host)))["written"]
        found = [{"time": row["time"], "written": dict(row["written"])} for row in rows]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return []
    whole = all(type(n) is int for row in found for n in (row["time"], *row["written"].values()))
    return found if whole else []


def load(folder: Path, host: str) -> Kept:
    """Raises NoReceipt."""
    return _load(path_of(folder, host), host)


def load_aside(folder: Path, host: str) -> Kept:
    """What set_aside() kept. Raises NoReceipt."""
    return _load(aside_of(folder, host), host)


def _load(path: Path, host: str) -> Kept:
    try:
        data = json.loads(text_of(path))
    except FileNotFoundError:
        raise NoReceipt(f"this controller keeps no receipt of {host} ({path})") from None
    except (OSError, ValueError, RecursionError) as error:
        raise NoReceipt(f"{path} cannot be read: {error}") from None
    fine = isinstance(data, dict) and data.get("schema") == SCHEMA and data.get("host") == host
    if not fine or not _whole(data.get("receipt")):
        raise NoReceipt(f"{path} is not a receipt of {host}")
    return Kept(host, str(data.get("time")), data["receipt"], data.get("verdict"))


def _whole(receipt: Any) -> bool:
    """Whether its parts are what they are in every receipt; those of later versions may lack."""
    if not isinstance(receipt, dict):
        return False
    parts = ("engine", "files", "model", "namespace", "scripts", "system")
    return all(isinstance(receipt.get(name, {}), dict) for name in parts)


def differences(old: Any, new: Any, at: str = "") -> list[tuple[str, Any, Any]]:
    """(key, old, new) of every leaf in which two receipts differ, MAY_DIFFER left out."""
    if at in MAY_DIFFER:
        return []
    if isinstance(old, dict) and isinstance(new, dict):
        rows = []
        for key in sorted({*old, *new}):
            below = f"{at}.{key}" if at else str(key)
            rows += differences(old.get(key), new.get(key), below)
        return rows
    return [] if old == new else [(at, old, new)]
