"""Small charts as inline SVG: bars, stacked bars, a line of history.

Elements are built, never pasted as text, so that no label can be markup. Colours are classes, which
the page defines for light and dark. All lengths are units of a box 330 wide, which is about the
width of a phone: text stays readable there, and grows with the page elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree import ElementTree

WIDTH = 330
LABEL, FIGURE = 62, 56  # room for the names at the left, the figures at the right
ROW, BAR = 27, 16
Element = ElementTree.Element


@dataclass(frozen=True)
class Bar:
    """A row: its parts (class, amount) in order, and what is written behind them."""

    label: str
    parts: Sequence[tuple[str, float]]
    figure: str


@dataclass(frozen=True)
class Point:
    """One run of the history: seconds by class of line; ``mark``: a key of MARKS."""

    title: str
    values: dict[str, float | None]
    mark: str


def _svg(height: float, title: str) -> Element:
    box = f"0 0 {WIDTH} {height:g}"
    root = ElementTree.Element("svg", {"viewBox": box, "role": "img", "aria-label": title})
    _text(root, "title", title)
    return root


def _add(parent: Element, tag: str, **attributes: str | float) -> Element:
    given = {
        key.rstrip("_").replace("_", "-"): f"{value:.4g}"
        if isinstance(value, float)
        else str(value)
        for key, value in attributes.items()
    }
    return ElementTree.SubElement(parent, tag, given)


def _text(parent: Element, tag: str, words: str, **attributes: str | float) -> Element:
    element = _add(parent, tag, **attributes)
    element.text = words
    return element


def _write(root: Element) -> str:
    return ElementTree.tostring(root, encoding="unicode")


def bars(title: str, rows: Sequence[Bar]) -> str:
    """Horizontal bars, each of its parts one behind the other, on one scale from 0."""
    root = _svg(len(rows) * ROW + 2, title)
    room = WIDTH - LABEL - FIGURE
    longest = max((sum(amount for _, amount in row.parts) for row in rows), default=0) or 1.0
    for index, row in enumerate(rows):
        top = index * ROW + 1
        middle = top + ROW / 2
        _text(root, "text", row.label, x=LABEL - 6, y=middle, class_="label end")
        _add(root, "rect", x=LABEL, y=top + (ROW - BAR) / 2, width=room, height=BAR, class_="rail")
        left = float(LABEL)
        for style, amount in row.parts:
            width = room * amount / longest
            if amount > 0:
                shown = max(width, 1.5)  # a sliver is still seen
                y = top + (ROW - BAR) / 2
                _add(root, "rect", x=left, y=y, width=shown, height=BAR, class_=style)
            left += width
        _text(root, "text", row.figure, x=WIDTH, y=middle, class_="figure end")
    return _write(root)


def _nice(limit: float) -> float:
    """The next number above that is 1, 1.5, 2, 3, 5 or 7.5 times a power of ten."""
    if limit <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(limit))
    return next(step * power for step in (1, 1.5, 2, 3, 5, 7.5, 10) if step * power >= limit)


MARKS = {  # shapes too, not colours alone
    "pass": "M -4,0 A 4,4 0 1 1 4,0 A 4,4 0 1 1 -4,0 Z",
    "fail": "M -4,-4 L 4,-4 L 4,4 L -4,4 Z",
    "inconclusive": "M 0,-5 L 5,4 L -5,4 Z",
    "no_by_design": "M -5,0 L 0,-5 L 5,0 L 0,5 Z",
}


def history(title: str, points: Sequence[Point], lines: Sequence[str]) -> str:
    """Seconds of every run, oldest at the left, a line a class; below, the verdict as a mark."""
    height, top, bottom, left = 150, 12, 112, 40
    root = _svg(height, title)
    seen = [v for point in points for v in point.values.values() if v is not None]
    limit = _nice(max(seen, default=1.0))
    step = (WIDTH - left - 12) / max(1, len(points) - 1)

    def across(index: int) -> float:
        return left + index * step if len(points) > 1 else (left + WIDTH - 12) / 2

    def down(value: float) -> float:
        return bottom - (bottom - top) * value / limit

    for share in (0.0, 0.5, 1.0):
        y = down(limit * share)
        _add(root, "line", x1=left, x2=WIDTH - 6, y1=y, y2=y, class_="grid")
        _text(root, "text", f"{limit * share:.3g} s", x=left - 5, y=y, class_="axis end")
    for style in lines:
        run: list[str] = []
        for index, point in enumerate([*points, Point("", {}, "")]):
            value = point.values.get(style)
            if value is not None:
                run.append(f"{across(index):.1f},{down(value):.1f}")
            elif run:  # a gap where nothing was measured
                if len(run) > 1:
                    _add(root, "polyline", points=" ".join(run), class_=f"line {style}")
                run = []
        for index, point in enumerate(points):
            value = point.values.get(style)
            if value is not None:
                _add(root, "circle", cx=across(index), cy=down(value), r=2.5, class_=style)
    for index, point in enumerate(points):
        place = f"translate({across(index):.1f},132)"
        mark = _add(root, "path", d=MARKS[point.mark], transform=place, class_=f"mark {point.mark}")
        _text(mark, "title", point.title)
    return _write(root)


@dataclass(frozen=True)
class Curve:
    """Points (x, seconds), both above 0; ``style``: a class of line; ``name`` for its title."""

    style: str
    name: str
    points: Sequence[tuple[float, float]]


def curves(title: str, lines: Sequence[Curve], ticks: Sequence[tuple[float, str]]) -> str:
    """Seconds over x, both axes logarithmic: what grows in proportion is a straight line."""
    height, top, bottom, left, right = 190, 12, 160, 44, WIDTH - 14
    root = _svg(height, title)
    seen = [point for line in lines for point in line.points]
    if not seen:
        return _write(root)
    first, last = (math.log10(pick(x for x, _ in seen)) for pick in (min, max))
    least = math.floor(math.log10(min(y for _, y in seen)))
    most = max(least + 1, math.ceil(math.log10(max(y for _, y in seen))))

    def across(x: float) -> float:
        return left + (right - left) * (math.log10(x) - first) / ((last - first) or 1)

    def down(y: float) -> float:
        return bottom - (bottom - top) * (math.log10(y) - least) / (most - least)

    for power in range(least, most + 1):
        y = down(10.0**power)
        _add(root, "line", x1=left, x2=right, y1=y, y2=y, class_="grid")
        words = f"{10.0**power:g} s" if power >= 0 else f"{10.0 ** (power + 3):g} ms"
        _text(root, "text", words, x=left - 5, y=y, class_="axis end")
    for x, words in ticks:
        _text(root, "text", words, x=across(x), y=bottom + 14, class_="axis middle")
    for line in lines:
        run = " ".join(f"{across(x):.1f},{down(y):.1f}" for x, y in line.points)
        drawn = _add(root, "polyline", points=run, class_=f"line {line.style}")
        _text(drawn, "title", line.name)
        for x, y in line.points:
            _add(root, "circle", cx=across(x), cy=down(y), r=2.5, class_=line.style)
    return _write(root)
