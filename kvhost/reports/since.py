"""What happened to a host after its last verdict: then that verdict stands no more.

It was removed (reports/HOST/removed says when, and when a run provisioned it again), or a run that
made no test left another receipt on it than the one that the verdict was given for.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from kvhost.basics import host_folder, text_of
from kvhost.records import receipts
from kvhost.reports.kept import TIME_FORMAT, Report
from kvhost.working_copy import CopyError

#: no .json: among the reports it is none
NAME = "removed"


@dataclass(frozen=True)
class Since:
    """Times as reports have them. ``removed``: when kvhost was taken away; ``changed``: when a run
    was there after that, or changed the host, and tested nothing. At least one is there."""

    removed: str | None
    changed: str | None

    @property
    def words(self) -> str:
        """For people: what happened, and that the verdict is of before."""
        if self.changed is None:
            what = f"removed at {self.removed} by kvhost remove"
        elif self.removed is None:
            what = f"changed at {self.changed}, and not tested since"
        else:
            what = (
                f"removed at {self.removed}, provisioned again at {self.changed}, and not tested "
                "since"
            )
        return f"{what}: no verdict stands, the last is of before"


def _now() -> str:
    return datetime.now(UTC).strftime(TIME_FORMAT)


def _path(folder: Path, host: str) -> Path:
    return folder / host_folder(host) / NAME


def note_removal(folder: Path, host: str) -> None:
    """Raises OSError."""
    _write(_path(folder, host), host, _now(), None)


def note_run(folder: Path, host: str) -> None:
    """A run left a receipt on a host: one that was removed is provisioned again. Raises OSError."""
    removed, again = last_removal(folder, host)
    if removed is not None and again is None:
        _write(_path(folder, host), host, removed, _now())


def last_removal(folder: Path, host: str) -> tuple[str | None, str | None]:
    """When the host was removed and when provisioned again; None what did not happen."""
    try:
        data = json.loads(text_of(_path(folder, host)))
        removed, again = data["removed"], data["again"]
        datetime.strptime(removed, TIME_FORMAT)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None, None
    return removed, again if isinstance(again, str) else None


def _write(path: Path, host: str, removed: str, again: str | None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    new = path.with_name(f"{NAME}.new")
    new.touch(mode=0o600)
    new.write_text(json.dumps({"host": host, "removed": removed, "again": again}) + "\n", "utf-8")
    new.replace(path)


def since(folder: Path, report: Report) -> Since | None:
    """What happened to the host since its last report; None where its verdict may stand."""
    removed, again = last_removal(folder, report.host)
    if removed is not None and removed >= report.time:
        return Since(removed, again)
    changed = _changed(report)
    return Since(None, changed) if changed is not None else None


def _changed(report: Report) -> str | None:
    """When a run left another receipt than the report is of; None where none is known to have."""
    try:
        kept = receipts.load(receipts.receipts_dir(), report.host)
    except (receipts.NoReceipt, CopyError):
        return None
    digest = hashlib.sha256(json.dumps(kept.receipt, sort_keys=True).encode()).hexdigest()
    other = report.receipt is not None and report.receipt != digest
    return kept.time if other and kept.time > report.time else None
