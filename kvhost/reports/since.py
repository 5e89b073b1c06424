"""What happened to a host after its last verdict: then that verdict stands no more.

It was removed, or its drive given back (reports/HOST/removed says which and when, and when a run
provisioned it again), or a run that made no test left another receipt on it than the one that the
verdict was given for.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from kvhost.basics import host_folder, text_of
from kvhost.records import receipts
from kvhost.reports.kept import TIME_FORMAT, Report, standing_report
from kvhost.working_copy import CopyError

#: no .json: among the reports it is none
NAME = "removed"
#: bytes; a note has some 150
_MOST = 1 << 16
What = Literal["removed", "released"]


@dataclass(frozen=True)
class Since:
    """Times as reports have them. ``removed``: when kvhost was taken away; ``released``: when its
    drive was given back; ``changed``: when a run was there after that, or changed the host, and
    tested nothing. At least one is there."""

    removed: str | None
    changed: str | None
    released: str | None = None

    @property
    def words(self) -> str:
        """For people: what happened, and that the verdict is of before."""
        what = ""
        if self.removed is not None:
            what = f"removed at {self.removed}" + ("" if self.changed else " by kvhost remove")
        elif self.released is not None:
            what = f"stopped at {self.released}, when kvhost release gave its drive back"
        if self.changed is not None:
            what += (
                f", provisioned again at {self.changed}" if what else f"changed at {self.changed}"
            )
            what += ", and not tested since"
        return f"{what}: no verdict stands, the last is of before"


@dataclass(frozen=True)
class Note:
    """``at``: when it happened; ``again``: when a run was there after it. ``report``: time of the
    report that stood then, "" where there was none; None where that is not known."""

    what: What
    at: str
    again: str | None
    report: str | None

    def is_after(self, report: Report) -> bool:
        """By the report that stood: the clock of a controller may go back."""
        if self.report is None:
            return self.at >= report.time
        return report.time <= self.report


def _now() -> str:
    return datetime.now(UTC).strftime(TIME_FORMAT)


def _path(folder: Path, host: str) -> Path:
    return folder / host_folder(host) / NAME


def note_removal(folder: Path, host: str, what: What = "removed") -> None:
    """Raises OSError."""
    _write(_path(folder, host), host, Note(what, _now(), None, _stood(folder, host)))


def _stood(folder: Path, host: str) -> str | None:
    try:
        report, _ = standing_report(folder, host)
    except (OSError, ValueError):
        return None
    return "" if report is None else report.time


def unnoted(folder: Path, host: str, what: What = "removed") -> bool:
    """Whether a verdict stands, or of a removed host something else is told than that, though this
    is what happened last: it was not noted then."""
    try:
        report, _ = standing_report(folder, host)
    except (OSError, ValueError):
        return False  # nothing stands in any case
    if report is None:
        return False
    found = since(folder, report)
    removed = found is not None and found.removed is not None and found.changed is None
    return found is None or (what == "removed" and not removed)


def note_run(folder: Path, host: str) -> None:
    """A run left a receipt on a host: one that was removed is provisioned again. Raises OSError."""
    note = last_note(folder, host)
    if note is not None and note.again is None:
        _write(_path(folder, host), host, replace(note, again=_now()))


def last_removal(folder: Path, host: str) -> tuple[str | None, str | None]:
    """When the host was removed and when provisioned again; None what did not happen."""
    note = last_note(folder, host)
    return (note.at, note.again) if note is not None and note.what == "removed" else (None, None)


def last_note(folder: Path, host: str) -> Note | None:
    """What was noted of the host; None where nothing was, or what is there is no note of it."""
    try:
        data: Any = json.loads(text_of(_path(folder, host), _MOST))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(data, dict) or data.get("host") != host:
        return None
    what, at = data.get("what", "removed"), _time(data.get("removed"))
    if what not in ("removed", "released") or at is None:
        return None
    report = data.get("report")
    known = "" if report == "" else _time(report)
    return Note(what, at, _time(data.get("again")), known)


def _time(value: Any) -> str | None:
    """As reports have it; None for anything else, which is never shown."""
    try:
        moment = datetime.strptime(value, TIME_FORMAT)
    except (TypeError, ValueError):
        return None
    return str(value) if moment.strftime(TIME_FORMAT) == value else None


def _write(path: Path, host: str, note: Note) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    told = {"what": note.what, "removed": note.at, "again": note.again, "report": note.report}
    data = {"host": host, **told}
    receipts.write_private(path, json.dumps(data) + "\n")


def since(folder: Path, report: Report) -> Since | None:
    """What happened to the host since its last report; None where its verdict may stand."""
    note = last_note(folder, report.host)
    if note is not None and note.is_after(report):
        at = {note.what: note.at}
        return Since(at.get("removed"), note.again, at.get("released"))
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
    time = _time(kept.time)  # one without it cannot be told to be of after the test
    return time if other and time is not None and time > report.time else None
