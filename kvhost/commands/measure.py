"""`kvhost drives --measure`: asks, measures every tier, says whether its drive is worth it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import click
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvhost.basics import printable
from kvhost.commands.care import ask_all
from kvhost.commands.up import INTERRUPTED, Runner
from kvhost.drives.smart import Wear
from kvhost.drives.worth import Counted, Judged, Measured, judge_drive, mb, parse_measured
from kvhost.llama.evidence import LlamaEvidence
from kvhost.records import receipts
from kvhost.reports.kept import reports_dir, standing_report
from kvhost.verdict.evidence import Evidence

Command = Callable[..., Any]
#: GiB, where a person is asked: past the fast part of most drives' cells
SOME_GIB = 20.0
TOKENS = 65536
STYLES = {True: "bold green", False: "bold red", None: "bold yellow"}


def measure_options(command: Command) -> Command:
    """The options of --measure; without it the others mean nothing."""
    above = click.FloatRange(min=0, min_open=True)
    for option in reversed(
        (
            click.option("--measure", is_flag=True, help="Measure the tier with fio; it writes."),
            click.option("--write-gib", type=above, help="GiB that --measure writes to each tier."),
            click.option("-y", "--yes", is_flag=True, help="Do not ask."),
            click.option("--install", is_flag=True, help="Install the package fio first."),
            click.option("--prefill", type=above, metavar="TOKENS/S",
                         help="What the engine computes; default: from the last restart test."),
            click.option("--tokens", type=click.IntRange(min=1),
                         help="Length of the prefix; default: the context, at most 65536."),
            click.option("--tbw", type=above, metavar="TB",
                         help="What the maker rates each drive for."),
            click.option("--seconds", type=click.IntRange(min=1), default=60, show_default=True,
                         help="At most, of each of three jobs."),
        )
    ):  # fmt: skip
        command = option(command)
    return command


def how_much(write_gib: float | None, *, yes: bool) -> float:
    """GiB that may be written to each tier; asks where nobody said. Raises click's errors."""
    if write_gib is None:
        if not sys.stdin.isatty():
            raise click.UsageError(
                "--measure writes to the drive: say how much with --write-gib (20 goes past the "
                "fast part of most drives' cells)"
            )
        write_gib = click.prompt(
            "GiB to write to the tier of every host, read twice and remove",
            default=SOME_GIB,
            type=click.FloatRange(min=0, min_open=True),
        )
    if not yes and sys.stdin.isatty():
        click.confirm(
            f"{write_gib:g} GiB are written to every tier, and wear its drive by as much. Go on?",
            abort=True,
        )
    return write_gib


def measure(
    run: Runner,
    inventory: str,
    args: tuple[str, ...],
    *,
    write_gib: float | None,
    yes: bool,
    seconds: int,
    install: bool,
    prefill: float | None,
    tokens: int | None,
    tbw: float | None,
    as_json: bool,
) -> int:
    """0: worth it on every host; 1: not on one or more, or it failed; 2: one cannot be told."""
    question = {"write_gib": how_much(write_gib, yes=yes), "seconds": seconds, "install": install}
    code, found, silent = ask_all(run, inventory, "deploys/measure.py", args, question)
    if code == INTERRUPTED:
        return code
    told: dict[str, Any] = {name: {"unreadable": [why]} for name, why in silent.items()}
    judged: list[Judged] = []
    for one in found:
        measured = parse_measured(one["measured"])
        speed = prefill or prefill_of(one["host"])
        verdict = judge_drive(
            measured,
            bytes_per_token=one["bytes_per_token"],
            prefill=speed,
            tokens=tokens or min(TOKENS, one["context"]),
            tbw=tbw * 1e12 if tbw else None,
            earlier=earlier_of(one["host"]),
        )
        judged.append(verdict)
        if as_json:
            told[one["host"]] = to_json(measured, verdict, speed)
        else:
            Console().print(render(one["host"], measured, verdict), highlight=False)
    if as_json:
        click.echo(json.dumps(told, indent=1))
    if code or not judged or any(one.worth is False for one in judged):
        return 1
    return 2 if any(one.worth is None for one in judged) else 0


def prefill_of(host: str) -> float | None:
    """Tokens a second that the engine computed in the host's last restart test; None: no test."""
    try:
        report, _ = standing_report(reports_dir(), host)
    except (OSError, ValueError):
        return None
    results = () if report is None else (report.result, *report.results)
    speeds = (computed(one.evidence) for one in results)
    return next((speed for speed in speeds if speed is not None), None)


def computed(evidence: object) -> float | None:
    """Tokens a second of a test's cold prompt; None where nothing was asked, or another's runner
    answered."""
    if isinstance(evidence, LlamaEvidence):
        asked = evidence.requests.get("cold")
        return _rate(asked.prompt_n, asked.ttft_s) if asked else None
    if isinstance(evidence, Evidence):
        cold = evidence.requests.get("cold")
        return _rate(cold.usage_prompt_tokens, cold.ttft_s) if cold else None
    return None


def _rate(tokens: int | None, took: float | None) -> float | None:
    return tokens / took if tokens and took else None


def earlier_of(host: str) -> tuple[Counted, ...]:
    """What the host's drives counted as written at the runs that its kept receipt knows of."""
    rows = receipts.counted(receipts.receipts_dir(), host)
    return tuple(Counted(time=row["time"], written=row["written"]) for row in rows)


def render(host: str, measured: Measured, judged: Judged) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    rows = (("whole files", measured.read_files), ("one stream", measured.read))
    for name, rate in rows:
        table.add_row(f"read, {name}", mb(rate.bytes_per_s), f"{rate.bytes / 1e9:.1f} GB")
    table.add_row("written", mb(measured.write.bytes_per_s), f"{measured.write.bytes / 1e9:.1f} GB")
    disks = ", ".join(f"{d.name} ({d.model or d.transport})" for d in measured.after)
    head = Text(f"{printable(host)}: {printable(judged.words)}", STYLES[judged.worth])
    parts: list[RenderableType] = [head, Text(f"{measured.filesystem} on {printable(disks)}")]
    parts.append(table)
    parts += [Text(f"- {printable(one.words)}", "yellow") for one in judged.findings]
    parts += [Text(f"- {name}: {wear_words(wear)}", "dim") for name, wear in judged.wear]
    return Group(*parts)


def wear_words(wear: Wear) -> str:
    """What is known of a drive's writes, in a sentence."""
    if wear.written is None:
        return "it does not tell what was written to it"
    words = f"{wear.written / 1e12:.1f} TB written"
    words += f" in {wear.hours} hours" if wear.hours is not None else ""
    if wear.per_day is not None:
        words += f", {wear.per_day / 1e9:.0f} GB a day"
        words += f" in the last {wear.days:.0f} days" if wear.days is not None else ""
    if wear.rated is None:
        return words + "; how much it is rated for is not known (--tbw)"
    rated = f"{wear.rated / 1e12:.0f} TB ({wear.rated_from})"
    if wear.years_left is not None:
        years = f"{wear.years_left:.{0 if wear.years_left >= 10 else 1}f}"
        return f"{words}; of {rated} that lasts {years} years more"
    why = "in how many hours is not known" if wear.per_day is None else "nothing was written"
    return f"{words}; how long {rated} last is not known: {why}"


def to_json(measured: Measured, judged: Judged, prefill: float | None) -> dict[str, Any]:
    times = judged.times
    return {
        "worth_it": {True: "yes", False: "no", None: "unknown"}[judged.worth],
        "words": judged.words,
        "prefill_tokens_per_s": prefill,
        "times": {**vars(times), "factor": times.factor} if times else None,
        "findings": [vars(one) for one in judged.findings],
        "wear": {name: vars(wear) for name, wear in judged.wear},
        "measured": measured.model_dump(mode="json", by_alias=True),
    }
