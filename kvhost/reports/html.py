"""Reports as pages: one for each host, one for the fleet. Self-contained, no script, no network.

Everything that comes from a report is escaped by the templates (templates/report, autoescape on);
the charts are built as elements (kvhost/reports/svg.py).
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from kvhost import __version__
from kvhost.llama.evidence import LlamaConfig
from kvhost.ollama.facts import OllamaEvidence
from kvhost.reports import svg as report_svg
from kvhost.reports.kept import Report
from kvhost.reports.svg import Bar, Point
from kvhost.reports.views import (
    ROLES,
    SOURCES,
    EventView,
    HostView,
    Standing,
    event_view,
    event_views,
)
from kvhost.verdict.foreign_evidence import ForeignEvidence
from kvhost.verdict.types import Condition
from kvhost.verdict.view import figure_text
from kvhost.working_copy import source

TEMPLATES = source() / "templates" / "report"
#: As many runs as a page shows; the files keep all.
SHOWN_RUNS = 60
#: the worst first
_ORDER: tuple[Standing, ...] = ("FAIL", "NONE", "INCONCLUSIVE", "NO_BY_DESIGN", "PASS")
_MET = {True: ("yes", "yes"), False: ("no", "no"), None: ("?", "open")}


@dataclass(frozen=True)
class Row:
    """A condition as the page shows it."""

    question: str
    figure: str
    threshold: str
    met: str
    style: str


def _row(condition: Condition) -> Row:
    met, style = _MET[condition.met]
    if condition.weight == "note" and condition.met is not True:
        met, style = "-", "note"
    figure = figure_text(condition.figure)
    return Row(condition.question, figure, condition.threshold, met, style)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"


def _when(time: str) -> str:
    """A report's time as people read it; reports.TIME_FORMAT says how it is written."""
    day, _, clock = time.partition("T")
    return f"{day} {clock[:2]}:{clock[2:4]}"


def _ttft_chart(event: EventView) -> Markup | None:
    rows = [
        Bar(role, [(role, event.ttft[role] or 0.0)], _seconds(event.ttft[role]))
        for role in ROLES
        if event.ttft.get(role) is not None
    ]
    return Markup(report_svg.bars("Time to the first token, seconds", rows)) if rows else None


def _token_chart(event: EventView) -> Markup | None:
    rows = [
        Bar(role, list(parts.items()), f"{sum(parts.values()):,.0f}")
        for role, parts in event.tokens.items()
        if parts
    ]
    title = "Tokens of the prompt by source"
    return Markup(report_svg.bars(title, rows)) if rows else None


def _event(event: EventView) -> dict[str, Any]:
    seen = {source for parts in event.tokens.values() for source in parts}
    return {
        "title": event.title,
        "persisted": event.persisted,
        "summary": event.summary,
        "causes": event.causes,
        "measured": bool(event.tokens) or event.name == "none",
        "rows": [_row(condition) for condition in event.conditions],
        "ttft_chart": _ttft_chart(event),
        "token_chart": _token_chart(event),
        "sources": {source: words for source, words in SOURCES.items() if source in seen},
    }


def _history_chart(reports: Sequence[Report]) -> Markup | None:
    points = [
        Point(
            f"{_when(report.time)} {report.persisted}",
            {"cold": report.verdict.ttft_cold_s, "restored": report.verdict.ttft_restored_s},
            report.persisted.lower(),
        )
        for report in reports
    ]
    if len(points) < 2:
        return None
    title = "Time to the first token over all runs, cold and restored"
    return Markup(report_svg.history(title, points, ("cold", "restored")))


def _run(report: Report) -> dict[str, str]:
    verdict = report.verdict
    return {
        "time": _when(report.time),
        "persisted": verdict.persisted,
        "worth_it": verdict.worth_it,
        "cold": _seconds(verdict.ttft_cold_s),
        "restored": _seconds(verdict.ttft_restored_s),
    }


def _tested(report: Report) -> list[tuple[str, str]]:
    """What was tested, in words: no paths of files, no prompts."""
    evidence = report.result.evidence
    if isinstance(evidence, OllamaEvidence):
        rows = [("model", evidence.facts.name), ("KV type that was asked for", evidence.wanted)]
        return rows + sorted(report.versions.items())
    config, filesystem = evidence.config, evidence.filesystem
    kind = filesystem.fstype if filesystem else None
    of = "" if isinstance(config, LlamaConfig) else f", chunks of {config.chunk_size}"
    rows = [
        ("model", config.model or "not known"),
        ("prompt", f"{config.prompt_tokens} random tokens{of}"),
        ("filesystem of the tier", kind or "not known"),
    ]
    if isinstance(evidence, ForeignEvidence):
        where = f"{evidence.where.host}, as {evidence.where.user}"
        rows.append(("the restart command ran on", where))
    return rows + sorted(report.versions.items())


def environment() -> Environment:
    return Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def host_page(view: HostView) -> str:
    """The page of one host."""
    latest, later = view.stands, view.left_out
    runs = view.reports[-SHOWN_RUNS:]
    return (
        environment()
        .get_template("host.html.j2")
        .render(
            kvhost_version=__version__,
            host=view.host,
            persisted=view.standing,
            report=_run(latest) if latest else None,
            events=[_event(event) for event in event_views(latest)] if latest else [],
            facts=_tested(latest) if latest else [],
            history_chart=_history_chart(runs),
            runs=[_run(report) for report in reversed(runs)],
            left_out=len(view.reports) - len(runs),
            unreadable=[path.name for path in view.unreadable],
            latest_unreadable=view.latest_unreadable,
            not_made=_when(later.time) if later else None,
            since=view.since.words if view.since else None,
        )
    )


def _card(view: HostView) -> dict[str, Any]:
    latest, later = view.stands, view.left_out
    blank = dict.fromkeys(("time", "worth_it", "cold", "restored"), "-")
    return {
        **(_run(latest) if latest else blank),
        "persisted": view.standing,
        "host": view.host,
        "page": page_name(view),
        "summary": latest.verdict.summary if latest else "No report of this host can be read.",
        "events": [_event(event) for event in event_views(latest)] if latest else [],
        "deciding": _event(event_view(latest.result)) if latest else None,
        "unreadable": len(view.unreadable),
        "not_made": _when(later.time) if later else None,
        "since": view.since.words if view.since else None,
    }


def fleet_page(views: Sequence[HostView]) -> str:
    """The page of all hosts, the worst verdict first."""
    ordered = sorted(views, key=lambda view: (_ORDER.index(view.standing), view.host))
    counted = Counter(view.standing for view in views)
    return (
        environment()
        .get_template("fleet.html.j2")
        .render(
            kvhost_version=__version__,
            hosts=[_card(view) for view in ordered],
            totals=[(name, counted[name]) for name in _ORDER if counted[name]],
        )
    )


def page_name(view: HostView) -> str:
    """File name of a host's page; basics.host_folder makes it a plain one."""
    return f"host-{view.folder}.html"


def write_pages(folder: Path, views: Sequence[HostView]) -> list[Path]:
    """Writes index.html and a page a host into ``folder``, which is made; the paths.

    Its parents are not. Each file is replaced as a whole. Pages of hosts that are gone are left.
    Raises OSError.
    """
    folder.mkdir(exist_ok=True)  # not its parents: a slip of the pen makes no tree
    pages = {page_name(view): host_page(view) for view in views}
    pages["index.html"] = fleet_page(views)
    for name, text in pages.items():
        write_text(folder / name, text)
    return [folder / name for name in sorted(pages)]


def write_text(path: Path, text: str) -> None:
    """Atomically, with the mode that the umask leaves; raises OSError."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors="xmlcharrefreplace") as file:
            file.write(text)
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
