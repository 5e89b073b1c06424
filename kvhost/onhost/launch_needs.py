"""What a service must have before it starts, for launch.py: its drive, its files, its secrets."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvhost.onhost.launch_children import GaveUp
    from kvhost.onhost.launch_record import read_json
else:  # they lie beside this file
    from launch_children import GaveUp
    from launch_record import read_json


def check_drive(spec: dict[str, Any]) -> None:
    """Raises GaveUp when the drive that the service works on is not the one that is mounted.

    Without it the service would fill the root disk, or find an empty cache.
    """
    drive = spec.get("drive")
    if not drive:
        return
    mount = drive["mount"]
    try:
        wanted = read_json(drive["record"]).get("uuid")
        found = read_json(os.path.join(mount, ".kvhost-drive.json")).get("uuid")
    except (OSError, ValueError) as error:
        raise GaveUp(75, f"the drive at {mount} cannot be recognised: {error}") from error
    if not os.path.ismount(mount):
        raise GaveUp(75, f"the drive is not mounted at {mount}: it is away, or fstab was changed")
    if not wanted or wanted != found:
        raise GaveUp(75, f"at {mount} another drive is mounted: {found}, wanted is {wanted}")


def required(spec: dict[str, Any]) -> None:
    """Raises GaveUp when a file is missing that tells the right place from an empty one."""
    for path in spec.get("require", []):
        try:
            os.stat(path)
        except OSError as error:
            why = f"{path}: {error.strerror}. Is what belongs there mounted?"
            raise GaveUp(75, f"{why} If it is: the next deploy makes it anew") from error


def environment(spec: dict[str, Any]) -> dict[str, str]:
    """The spec's environment and the secrets, nothing of the supervisor's. Raises GaveUp."""
    env = dict(spec["env"])
    credentials = os.environ.get("CREDENTIALS_DIRECTORY")
    for variable, path in spec.get("secret_env", {}).items():
        source = os.path.join(credentials, os.path.basename(path)) if credentials else path
        try:
            with open(source, encoding="utf-8") as handle:
                value = handle.read().rstrip("\n")
        except (OSError, ValueError) as error:
            raise GaveUp(78, f"the secret in {path} cannot be read: {error}") from error
        if not value or "\n" in value or "\0" in value:
            raise GaveUp(78, f"the secret in {path} is not one line of text")
        env[variable] = value
    return env
