"""The order that is handed to onhost/drive_apply.py: which drive, what the plan saw, what to do.

Written to one file on the host (root's, 0600). Everything in it is looked at again there, with the
drive held, before a byte is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvhost.drives.claim import Claimed
from kvhost.settings import Settings

SCHEMA = 1
#: what makes it this drive at this moment; see onhost/drive_probe.py
DRIVE_KEYS = ("path", "maj_min", "diskseq", "by_id", "wwn", "serial", "model", "size_bytes",
              "backing", "transport")  # fmt: skip


def drive_order(settings: Settings, claimed: Sequence[Claimed]) -> dict[str, Any]:
    """The order for the claimed drives, as plain JSON values; sizes in bytes.

    `drive`, `findings`, `action`, `token` are those of the first drive; with drive_count above 1
    `members` has all of them. A `token` is there when the settings allow the drive to be erased;
    whether it fits is for the step that writes to say, which may find more than the plan did.
    """
    members = [_member(one) for one in claimed]
    order = {
        "schema": SCHEMA,
        **members[0],
        "filesystem": settings.drive_filesystem,
        "mount": settings.resolved_drive_mount,
        "owner": settings.service_user,
        "blank_check": settings.drive_blank_check,
        "encrypt": settings.drive_encrypt,
        "ephemeral": settings.drive_ephemeral,
    }
    return {**order, "members": members} if len(members) > 1 else order


def _member(one: Claimed) -> dict[str, Any]:
    device = one.device.model_dump(mode="json")
    return {
        "drive": {key: device[key] for key in DRIVE_KEYS},
        "findings": [finding.model_dump() for finding in one.drive.findings],
        "action": one.action,
        "token": one.token,
    }
