"""What both judges do with their tables: ask every rule, and name the causes that fit. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal, Protocol

from kvhost.verdict.types import Cause, Condition, Persisted, Thresholds, Weight

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
    def order(self) -> Literal["first", "precondition", "normal"]: ...
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


def persisted(rules: Iterable[Asked], found: Iterable[Condition]) -> Persisted:
    """What follows from the conditions of these rules; what is not known is never a PASS.

    A wrong answer comes first, then what must hold for a test to say anything, then the rest.
    """
    pairs = list(zip((rule.order for rule in rules), found, strict=True))
    conditions = [condition for _, condition in pairs]
    if any(order == "first" and c.met is False for order, c in pairs):
        return "FAIL"
    if any(order == "precondition" and c.met is not True for order, c in pairs):
        return "INCONCLUSIVE"
    if any(c.weight == "fail" and c.met is False for c in conditions):
        return "FAIL"
    if any(c.weight != "note" and c.met is not True for c in conditions):
        return "INCONCLUSIVE"
    return "PASS"


def fitting(table: Iterable[Named], facts: object, conditions: list[Condition]) -> list[Cause]:
    """Every row of the table that fits, in its order; empty when none does."""
    met = {condition.id: condition.met for condition in conditions}
    return [
        Cause(slug=row.slug, title=row.title, change=row.change, link=f"{PAGE}#{row.slug}")
        for row in table
        if row.applies(facts, met)
    ]
