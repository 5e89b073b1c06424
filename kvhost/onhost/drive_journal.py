#!/usr/bin/env python3
"""What drive_apply.py was doing when it was cut off: state/drive-apply.json, shown by this script.

Every UUID is drawn before the first byte is written and kept here, with the identity of the drive
and the stage. So a half-made drive can be told from anything else: its table is, sector by sector,
zero or what we would write, and a filesystem in it carries our UUID. The journal makes nothing else
eatable: a drive of another identity, another table or another filesystem is foreign.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import uuid
from collections.abc import Mapping
from typing import Any

SCHEMA = 1
FILE = "drive-apply.json"
#: what kvhost made and mounted in the end
RECORD = "drive.json"
#: in this order: the erasing that a token allowed, the table, the filesystem; then it is finished
STAGES = ("erase", "table", "mkfs", "made")
#: what makes a drive the same drive, whatever name and numbers it has today
IDENTITY = ("serial", "wwn", "model", "size_bytes", "backing")


def identity_of(device: Mapping[str, Any]) -> dict[str, Any]:
    """The lasting part of what drive_probe.py prints of a device."""
    return {key: device[key] for key in IDENTITY if device.get(key) is not None}


def same_drive(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two descriptions are of one drive. A size alone identifies nothing."""
    first, second = identity_of(one), identity_of(other)
    return first == second and any(key in first for key in ("serial", "wwn", "backing"))


def new_drive(device: Mapping[str, Any], token: str | None) -> dict[str, Any]:
    """What the journal keeps of one drive. `token`: the one that allows it to be erased."""
    return {
        "drive": identity_of(device),
        "stage": "erase" if token else "table",
        "disk_guid": str(uuid.uuid4()),
        "partition_uuid": str(uuid.uuid4()),
        "token": token,
        "signatures": None,
        "zero_before": token is None,
    }


def new(drives: list[dict[str, Any]], filesystem: str) -> dict[str, Any]:
    """A journal of drives that are to become one filesystem."""
    uuids = {name: str(uuid.uuid4()) for name in ("fs_uuid", "luks_uuid", "md_uuid")}
    return {"schema": SCHEMA, "drives": drives, "filesystem": filesystem, **uuids}


def drive_in(journal: Mapping[str, Any] | None, device: Mapping[str, Any]) -> dict[str, Any] | None:
    """What the journal keeps of this very drive; None if it is of others."""
    for entry in (journal or {}).get("drives", []):
        if same_drive(entry.get("drive") or {}, device) and entry.get("stage") in STAGES:
            found: dict[str, Any] = entry
            return found
    return None


def read(state: str) -> dict[str, Any] | None:
    """The journal, None without one. Raises OSError, ValueError: it is no licence then."""
    try:
        with open(os.path.join(state, FILE), encoding="utf-8") as handle:
            data = json.load(handle)
    except FileNotFoundError:
        return None
    if wrong := fault(data):
        raise ValueError(f"{os.path.join(state, FILE)} is no journal of kvhost's: {wrong}")
    return dict(data)


def fault(data: Any) -> str | None:
    """Why something that was read is no journal; None when it is one. Pure; the plan uses it too.

    Half of a journal is none: it would let a run begin whose other half is a guess.
    """
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        return f"schema {SCHEMA} is missing"
    words = ("filesystem", "fs_uuid", "luks_uuid", "md_uuid")
    wrong = [key for key in words if not isinstance(data.get(key), str)]
    drives = data.get("drives")
    if not isinstance(drives, list) or not drives:
        return ", ".join([*wrong, "drives"])
    for n, entry in enumerate(drives):
        if not isinstance(entry, dict) or not isinstance(entry.get("drive"), dict):
            wrong.append(f"drives[{n}]")
            continue
        good = {
            "stage": entry.get("stage") in STAGES,
            **{key: _is_uuid(entry.get(key)) for key in ("disk_guid", "partition_uuid")},
            "token": isinstance(entry.get("token"), (str, type(None))) and "token" in entry,
            "signatures": isinstance(entry.get("signatures"), list)
            or (entry.get("signatures") is None and entry.get("stage") != "erase"),
            "zero_before": isinstance(entry.get("zero_before"), bool),
        }
        wrong += [f"drives[{n}].{key}" for key, fine in good.items() if not fine]
    return ", ".join(wrong) or None


def _is_uuid(value: Any) -> bool:
    try:
        return bool(str(uuid.UUID(value)) == value)
    except (TypeError, ValueError, AttributeError):
        return False


def read_record(state: str) -> dict[str, Any] | None:
    """state/drive.json: {"mount", "uuid", "drive": {…}, …}, None without one.

    Raises OSError, ValueError: what is mounted for kvhost is not known then, not "nothing".
    """
    path = os.path.join(state, RECORD)
    try:
        with open(path, encoding="utf-8") as handle:
            data = json.load(handle)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): {_RECORD_AGAIN}") from error
    kinds = {"mount": str, "uuid": str, "drive": dict}
    if not isinstance(data, dict) or any(not isinstance(data.get(k), t) for k, t in kinds.items()):
        raise ValueError(f"{path} is damaged: {_RECORD_AGAIN}")
    return data


_RECORD_AGAIN = "kvhost storage writes it anew while the drive is there; else remove the file"


def unfinished(journal: Mapping[str, Any] | None, device: Mapping[str, Any]) -> str | None:
    """The stage in which a run on this very drive was cut off, None if none was.

    Pure; the plan uses it too.
    """
    entry = drive_in(journal, device)
    return str(entry["stage"]) if entry else None


def write(state: str, journal: Mapping[str, Any]) -> None:
    """On the disk when it returns, root's, 0600."""
    write_json(os.path.join(state, FILE), journal)


def write_json(path: str, data: Mapping[str, Any], mode: int = 0o600) -> None:
    temporary = path + ".new"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, mode)
    with os.fdopen(fd, "w", encoding="utf-8") as handle:
        json.dump(data, handle, indent=1, sort_keys=True)
        handle.write("\n")
        handle.flush()
        os.fchmod(handle.fileno(), mode)
        os.fsync(handle.fileno())
    os.replace(temporary, path)
    sync_directory(os.path.dirname(path))


def sync_directory(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def forget(state: str) -> None:
    path = os.path.join(state, FILE)
    if os.path.exists(path):
        os.unlink(path)
        sync_directory(state)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("state", help="directory of the journal, state/ of base_dir")
    print(json.dumps(read(parser.parse_args().state)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
