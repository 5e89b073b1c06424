"""Notes beside a host's reports that its verdict stands no more."""

from __future__ import annotations

from typing import Any

from deploys.common.reasons import failed
from kvhost.records import receipts
from kvhost.reports.kept import reports_dir
from kvhost.reports.since import What, note_removal, unnoted


def note(host: Any, what: What) -> bool:
    """False, and the host fails, where it could not be noted."""
    try:
        note_removal(reports_dir(), host.name, what)
    except OSError as error:
        return failed(host, f"{what}, but it could not be noted beside its reports: {error}")
    return True


def kept_receipt(host: str) -> dict[str, Any]:
    """What the last run left there, as this controller keeps it; {} where it keeps none."""
    try:
        return receipts.load(receipts.receipts_dir(), host).receipt
    except receipts.NoReceipt:
        return {}


def removal_unnoted(host: str, base_dir: str) -> bool:
    """Of a host on which nothing of kvhost is any more. Not where what the last run left lies in
    another base_dir: it may serve there."""
    scripts = kept_receipt(host).get("scripts", {})
    elsewhere = scripts and not any(path.startswith(f"{base_dir}/") for path in scripts)
    return not elsewhere and unnoted(reports_dir(), host)


def release_unnoted(host: str) -> bool:
    """Of a host that has no drive in use, where the last run left one."""
    return bool(kept_receipt(host).get("drive")) and unnoted(reports_dir(), host, "released")
