"""The plan as people see it: one block a host, readable on 80 columns."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvhost.basics import counted
from kvhost.plan.types import Action, Plan, Refusal, State

#: of more hosts whose plans are the same it is only said how many they are
NAMED = 12
STYLES: dict[State, str] = {"change": "yellow", "keep": "green", "unknown": "magenta"}


def render_plans(plans: Mapping[str, Plan]) -> RenderableType:
    """One block for all hosts with the same plan and, for several, a line that counts them."""
    parts: list[RenderableType] = []
    alike: dict[Plan, list[str]] = {}
    for host, plan in plans.items():
        alike.setdefault(plan, []).append(host)
    for plan, hosts in alike.items():
        parts += [_plan(_named(hosts), plan), Text()]
    if len(plans) > 1:
        refused = [host for host, plan in plans.items() if plan.refusals]
        text = f"{len(plans)} hosts, {len(refused)} refused"
        text += f" ({', '.join(refused)}): nothing is changed on any" if refused else ""
        parts.append(_text(text, "bold red" if refused else "bold"))
    return Group(*parts)


def _named(hosts: list[str]) -> str:
    more = len(hosts) - NAMED
    return ", ".join(hosts[:NAMED]) + (f" and {counted(more, 'host')} more" if more > 0 else "")


def _plan(host: str, plan: Plan) -> RenderableType:
    changes = sum(action.state == "change" for action in plan.actions)
    unknown = sum(action.state == "unknown" for action in plan.actions)
    if plan.refusals:
        verdict, style = f"refused, {counted(len(plan.refusals), 'reason')}", "bold red"
    elif changes or unknown:
        verdict, style = f"{changes} to change" + (f", {unknown} unknown" * bool(unknown)), "bold"
    else:
        verdict, style = "no change", "bold green"
    parts: list[RenderableType] = [_text(f"{host}: {verdict}", style)]
    if plan.actions:  # a run that installs nothing shows refusals alone
        parts.append(_actions(plan.actions))
    for refusal in plan.refusals:
        parts.append(Padding(_refusal(refusal), (0, 0, 0, 1)))
    for note in plan.notes:
        parts.append(Padding(_row("note", note, "cyan"), (0, 0, 0, 1)))
    return Group(*parts)


def _actions(actions: tuple[Action, ...]) -> Table:
    table = Table(box=None, pad_edge=True, padding=(0, 1, 0, 0), header_style="dim")
    for name in ("stage", "state"):
        table.add_column(name, no_wrap=True)
    table.add_column("what, and what it costs", overflow="fold")
    stage = ""
    for action in actions:
        what = _text(action.what)
        if action.cost:
            what.append(f"\n{plain(action.cost)}", "italic")
        first = action.stage if action.stage != stage else ""
        table.add_row(_text(first), _text(action.state, STYLES[action.state]), what)
        stage = action.stage
    return table


def _refusal(refusal: Refusal) -> Group:
    title = f"refused: {refusal.what} ({refusal.stage}, {refusal.code})"
    rows = [("needed", refusal.needed), ("found", refusal.found), ("do", refusal.fix)]
    return Group(_text(title, "red"), *(_row(name, text, "dim") for name, text in rows))


def _row(name: str, text: str, style: str) -> Table:
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(width=7)
    grid.add_column(overflow="fold")
    grid.add_row(_text(name, style), _text(text))
    return grid


def _text(text: str, style: str = "") -> Text:
    return Text(plain(text), style)


def plain(text: str) -> str:
    """Names of processes and files come from the host: no control character reaches a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)
