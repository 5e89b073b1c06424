"""`kvhost size` as people read it: tables, and a page with a plot."""

from __future__ import annotations

import math

from markupsafe import Markup
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvhost import __version__
from kvhost.basics import printable
from kvhost.plan.types import size
from kvhost.reports.html import environment
from kvhost.reports.svg import Curve, curves
from kvhost.sizing.answer import Answer
from kvhost.sizing.kv_bytes import Times

_KINDS = {
    "full": "attention, every token",
    "window": "attention, a window",
    "latent": "MLA, a latent for all heads",
    "cross": "cross-attention, the encoder's tokens",
    "state": "a state of fixed size",
}


def seconds(value: float) -> str:
    """Seconds with three figures: 4.2 ms, 1.25 s, 3 min 20 s."""
    if value < 1:
        return f"{value * 1000:.3g} ms"
    if value < 120:
        return f"{value:.3g} s"
    return f"{value // 60:.0f} min {value % 60:.0f} s"


def first_words(answer: Answer) -> str | None:
    """What must be said before anything else: weights that do not fit."""
    if not answer.short or answer.weights is None:
        return None
    ranks = answer.kv.ranks
    each = f" on each of {ranks} GPUs" if ranks > 1 else ""
    return (
        f"The weights do not fit: {size(answer.weights / ranks)}{each}, {size(answer.short)} more "
        "than is left in the GPU's memory. A KV cache, on whatever drive, does not help: it keeps "
        "KV, never weights. Take a smaller or quantised model, or more GPUs (--tp)."
    )


def render_answer(answer: Answer) -> RenderableType:
    kv = answer.kv
    parts: list[RenderableType] = []
    first = first_words(answer)
    if first:
        parts += [Text(first, "bold red"), Text()]
    head = f"{printable(answer.question.model.name)}: {size(kv.per_token)} of KV per token"
    head += f" ({kv.dtype}" + (f", on each of {kv.ranks} GPUs)" if kv.ranks > 1 else ")")
    parts.append(Text(head, "bold"))
    parts += [_layers(answer), Text()]
    session = f"A session of {answer.session} tokens: {size(kv.sequence(answer.session))}"
    session += " on each GPU" if kv.ranks > 1 else ""
    parts.append(Text(f"{session}; stored {size(kv.stored(answer.session))}."))
    if answer.fits:
        parts += [_fits(answer), Text()]
    if answer.times:
        parts += [_times(answer), Text(_even(answer))]
    elif answer.question.prefill:
        parts.append(Text(_needed(answer)))
    parts += [Text(f"- {note}", "dim") for note in answer.notes]
    return Group(*parts)


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for place, name in enumerate(columns):
        table.add_column(name, justify="right" if place else "left")
    return table


def _layers(answer: Answer) -> Table:
    table = _table("layers", "how many", "per token", "window", "fixed")
    for part in answer.kv.parts:
        window = f"{part.window} tokens" if part.window else "-"
        token = size(part.per_token) if part.per_token else "-"
        fixed = size(part.fixed) if part.fixed else "-"
        table.add_row(_KINDS[part.kind], str(part.layers), token, window, fixed)
    return table


def _fits(answer: Answer) -> Table:
    table = _table("fits into", "left for KV", "tokens", f"sessions of {answer.session}")
    for one in answer.fits:
        tokens = "any number" if one.tokens is None else f"{one.tokens:,}"
        table.add_row(one.place, size(one.room), tokens, f"{one.sessions:,}")
    return table


def _times(answer: Answer) -> Table:
    table = _table("tokens", "stored", "restore", "recompute", "restoring is")
    for one in answer.times:
        factor = f"{one.factor:.3g} times faster" if one.factor >= 1 else "slower"
        row = (size(one.bytes), seconds(one.restore), seconds(one.recompute), factor)
        table.add_row(f"{one.tokens:,}", *row)
    return table


def _even(answer: Answer) -> str:
    if answer.break_even is None:
        return f"Restoring is never faster. {_needed(answer)}"
    return f"Restoring is faster from {answer.break_even:,} tokens on. {_needed(answer)}"


def _needed(answer: Answer) -> str:
    speed = answer.needed_speed
    if speed is None:
        return (
            "Only a state is stored, of one size whatever the length: the longer the prefix, the "
            "slower a drive may be."
        )
    return (
        f"A drive is faster than computing {answer.question.prefill:,.0f} tokens/s from "
        f"{speed / 1e6:,.0f} MB/s on."
    )


def verdict_words(times: Times, *, least: float = 1.5) -> tuple[bool, str]:
    """Whether a drive is worth it for one prefix, in a sentence. ``least``: the factor from which
    it is: less is lost again in what the figures leave out."""
    worth = times.factor >= least
    took = f"restores {times.tokens:,} tokens in {seconds(times.restore)}; recomputing takes about "
    return worth, took + f"{seconds(times.recompute)}: {'worth it' if worth else 'not worth it'}"


def plot(answer: Answer) -> str:
    """Both times over the length of a prefix, as SVG."""
    points = [(float(one.tokens), one.restore, one.recompute) for one in answer.times]
    both = [
        Curve("restored", "restore", [(x, restore) for x, restore, _ in points]),
        Curve("cold", "recompute", [(x, recompute) for x, _, recompute in points]),
    ]
    return curves("seconds until a prefix is ready, by its tokens", both, _ticks(points))


def _ticks(points: list[tuple[float, float, float]]) -> list[tuple[float, str]]:
    """About six places on the axis of tokens, the ends among them."""
    step = max(1, math.ceil(len(points) / 6))
    chosen = [x for x, _, _ in points[::-1][::step]]
    return [(x, f"{x / 1024:g}k" if x >= 1024 else f"{x:g}") for x in chosen]


def page(answer: Answer) -> str:
    """A self-contained page: the figures, the table and the plot. No script, no network."""
    return (
        environment()
        .get_template("size.html.j2")
        .render(
            kvhost_version=__version__,
            first=first_words(answer),
            answer=answer,
            kv=answer.kv,
            kinds=_KINDS,
            size=size,
            seconds=seconds,
            even=_even(answer) if answer.times else "",
            plot=Markup(plot(answer)) if answer.times else "",  # built as elements
        )
    )
