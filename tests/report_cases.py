"""Reports for the tests of tables, pages and files made from them; evidence as in verdict_cases."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

from kvhost.reports import kept as reports
from kvhost.verdict.evidence import Evidence
from kvhost.verdict.judge import judge
from tests.verdict_cases import CASES, evidence_of

NOON = datetime(2026, 3, 1, 12, 0, 5, tzinfo=UTC)
#: Tries to be markup, an attribute's end, a script, a template, an escape code, and to be no XML.
HOSTILE = "<script>alert(1)</script>\"' onload=x {{ 7*7 }} \x1b[31m\x00&amp;"
PASSING = "real: fs_native, healthy"
FAILING = "real: half of the files removed"
UNKNOWING = "real: on tmpfs"
REFUSED = "real: in use"


def report_of(
    case: str, host: str = "web-1", at: datetime = NOON, receipt: str | None = None
) -> reports.Report:
    """The report that a run of one of verdict_cases.CASES would have given."""
    found = next(one for one in CASES if one.name == case)
    evidence = Evidence.model_validate(evidence_of(found))
    return reports.make_report(host, [(judge(evidence), evidence)], at, receipt)


def keep(
    folder: Path, case: str, host: str = "web-1", day: int = 0, receipt: str | None = None
) -> reports.Report:
    """The same, written to ``folder``, so many days after the first."""
    report = report_of(case, host, NOON + timedelta(days=day), receipt)
    reports.write_report(folder, report)
    return report
