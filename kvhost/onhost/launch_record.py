"""The JSON files in run/ that say who runs and why it failed, for launch.py, which they are of."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvhost.onhost.launch_children import say
else:  # it lies beside this file
    from launch_children import say


def read_json(path: str) -> dict[str, Any]:
    """{} without such a file. Raises OSError, ValueError."""
    try:
        with open(path, encoding="utf-8") as handle:
            data = json.load(handle)
    except FileNotFoundError:
        return {}
    if not isinstance(data, dict):
        raise ValueError("it is not a JSON object")
    return data


def write_json(path: str, data: dict[str, Any]) -> None:
    temporary = path + ".new"
    with open(temporary, "w", encoding="utf-8") as handle:
        json.dump(data, handle)
        handle.flush()
        os.fsync(handle.fileno())
    os.replace(temporary, path)


def read_record(path: str) -> dict[str, Any]:
    try:
        return read_json(path)
    except (OSError, ValueError) as error:
        say(f"the record of the run before is unreadable ({error}): taken as an unclean stop")
        return {"clean_stop": False}
