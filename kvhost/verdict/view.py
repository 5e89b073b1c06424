"""A verdict for people: a table of at most 80 columns, and one line of history."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvhost.basics import printable
from kvhost.reports.kept import Report
from kvhost.reports.since import Since
from kvhost.verdict.types import Condition, Verdict

_COLOUR = {"PASS": "bold green", "FAIL": "bold red", "INCONCLUSIVE": "bold yellow",
           "NO_BY_DESIGN": "bold cyan"}  # fmt: skip
_MARK = {True: ("yes", "green"), False: ("NO", "bold red"), None: ("?", "yellow")}


def figure_text(figure: float | int | str | None) -> str:
    """A figure as it is shown; "missing" where there is none."""
    if figure is None:
        return "missing"
    return f"{figure:.0f}" if isinstance(figure, float) else str(figure)


def _row(condition: Condition) -> tuple[Text, ...]:
    word, style = _MARK[condition.met]
    if condition.weight == "note" and condition.met is not True:
        word, style = "-", "dim"
    cells = (condition.question, figure_text(condition.figure), condition.threshold)
    return (*(Text(printable(cell)) for cell in cells), Text(word, style))


def seconds(verdict: Verdict) -> str:
    """The times to the first token in one phrase."""
    parts = (
        ("cold", verdict.ttft_cold_s),
        ("warm", verdict.ttft_warm_s),
        ("after restart", verdict.ttft_restored_s),
    )
    return ", ".join(f"{name} {'?' if s is None else f'{s:.2f} s'}" for name, s in parts)


def headline(host: str, verdict: Verdict) -> Text:
    """persisted, worth_it and the times of one host; the host's name is shown as it is."""
    text = Text(f"{printable(host)}: event {verdict.event}: persisted ")
    text.append(verdict.persisted, _COLOUR[verdict.persisted])
    if verdict.event == "none":
        return text
    text.append(f", worth it {verdict.worth_it}\n  first token: {seconds(verdict)}")
    return text


def condition_table(conditions: Iterable[Condition]) -> Table:
    """Every condition with figure and threshold."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("condition", width=25)
    table.add_column("found", width=17, overflow="fold")
    table.add_column("needed", width=24)
    table.add_column("met", width=3)
    for condition in conditions:
        table.add_row(*_row(condition))
    return table


def verdict_table(host: str, verdict: Verdict) -> RenderableType:
    """Headline, every condition with figure and threshold, summary, likely causes."""
    table = condition_table(verdict.conditions)
    parts: list[RenderableType] = [headline(host, verdict), table, Text(printable(verdict.summary))]
    for cause in verdict.causes:
        parts.append(Text(printable(f"* {cause.title}\n  {cause.change}\n  {cause.link}")))
    return Group(*parts)


def left_out_line(report: Report) -> Text:
    """That the newest test was not made, when, and why: the verdict above it stands."""
    words = (
        f"{printable(report.host)}: a later test, of {report.time}, was left out: the server was "
        "in use. When it may be disturbed: kvhost verify --disrupt"
    )
    return Text(words, "yellow")


def since_line(host: str, since: Since) -> Text:
    """That the last verdict does not stand any more, and why."""
    return Text(f"{printable(host)}: {since.words}", "yellow")


def history_line(report: Report) -> Text:
    """One report in one line, for lists: the event that decides, how many others there were, and
    the times to the first token, cold and after the restart. At most 80 columns, for most hosts."""
    verdict, others = report.verdict, len(report.results) - 1
    text = Text(f"{report.time}  {printable(report.host)}  ")
    text.append(f"{verdict.persisted:<12}", _COLOUR[verdict.persisted])
    text.append(f"  {verdict.event}" + (f" and {others} more" if others else ""))
    if verdict.event != "none":
        text.append(f"  worth it {verdict.worth_it}")
    times = (verdict.ttft_cold_s, verdict.ttft_restored_s)
    if any(s is not None for s in times):
        text.append("  " + " -> ".join("?" if s is None else f"{s:.2f} s" for s in times))
    return text
