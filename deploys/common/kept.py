"""Keeps on the controller what a run left on a host: the receipt and the verdict given for it."""

from __future__ import annotations

from typing import Any

from kvhost.records import receipts
from kvhost.reports.kept import reports_dir
from kvhost.reports.since import note_run

_left: dict[str, dict[str, Any]] = {}
_verdicts: dict[str, dict[str, str]] = {}
_written: dict[str, dict[str, int]] = {}


def left(host: str, receipt: dict[str, Any]) -> None:
    """The receipt that the host holds now."""
    _left[host] = receipt


def judged(host: str, persisted: str, time: str) -> None:
    """The verdict that stands for it."""
    _verdicts[host] = {"persisted": persisted, "time": time}


def written(host: str, counts: dict[str, int]) -> None:
    """What its drives count as written, by serial number."""
    _written[host] = counts


def keep(host: str) -> str | None:
    """Writes receipts/HOST.json; why that failed, None if it did not."""
    receipt = _left.get(host)
    if receipt is None:
        return "no receipt was made, so none is kept"
    folder = receipts.receipts_dir()
    try:
        receipts.keep(folder, host, receipt, _verdicts.get(host), _written.get(host))
        note_run(reports_dir(), host)
    except OSError as error:
        return f"the receipt could not be kept in {folder}: {error}"
    return None
