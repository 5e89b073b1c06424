"""What both judges do with their tables: ask every rule, and name the causes that fit. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from kvhost.verdict_types import Cause, Condition, Thresholds, Weight

PAGE = "docs/troubleshooting.md"


class Asked(Protocol):
    """A rule; its look takes the facts of its judge."""

    @property
    def id(self) -> str: ...
    @property
    def question(self) -> str: ...
    @property
    def weight(self) -> Weight: ...
    @property
    def look(self) -> Callable[[Any, Thresholds], Any]: ...


class Named(Protocol):
    """A row of a table of causes; applies takes the facts and what was met."""

    @property
    def slug(self) -> str: ...
    @property
    def title(self) -> str: ...
    @property
    def change(self) -> str: ...
    @property
    def applies(self) -> Callable[[Any, dict[str, bool | None]], bool]: ...


def ask(rules: Iterable[Asked], facts: object, limits: Thresholds) -> list[Condition]:
    """The condition of every rule, in their order."""
    found = []
    for rule in rules:
        figure, threshold, met = rule.look(facts, limits)
        found.append(
            Condition(
                id=rule.id,
                question=rule.question,
                figure=figure,
                threshold=threshold,
                met=met,
                weight=rule.weight,
            )
        )
    return found


def fitting(table: Iterable[Named], facts: object, conditions: list[Condition]) -> list[Cause]:
    """Every row of the table that fits, in its order; empty when none does."""
    met = {condition.id: condition.met for condition in conditions}
    return [
        Cause(slug=row.slug, title=row.title, change=row.change, link=f"{PAGE}#{row.slug}")
        for row in table
        if row.applies(facts, met)
    ]
