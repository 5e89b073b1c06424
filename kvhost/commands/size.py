"""The command `kvhost size`: figures from a config.json; nothing of it reaches a host."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from kvhost.plan.types import GIB
from kvhost.reports.html import write_text
from kvhost.sizing.answer import Question, answer, to_json
from kvhost.sizing.kv_bytes import SizeError
from kvhost.sizing.layer import UnknownArchitecture
from kvhost.sizing.model import find_model
from kvhost.sizing.view import page, render_answer


class _Amount(click.FloatRange):
    """Above zero, and no inf or nan, which a range lets through."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        given = super().convert(value, param, ctx)
        if not math.isfinite(given):
            self.fail(f"{given} is no amount", param, ctx)
        return given


_GIB = _Amount(min=0, min_open=True, max=1e12)
_TOKENS = click.IntRange(min=1, max=10**9)


def _bytes(gib: float | None) -> int | None:
    return None if gib is None else int(gib * GIB)


@click.command("size")
@click.argument("model")
@click.option(
    "--kv-dtype",
    default="auto",
    show_default=True,
    help="bf16 (or bfloat16), fp16 (float16), fp32, fp8; "
    "of llama.cpp: q8_0, q5_1, q5_0, q4_1, q4_0, iq4_nl.",
)
@click.option(
    "--state-dtype",
    default="auto",
    show_default=True,
    help="Of recurrent states: vLLM's --mamba-ssm-cache-dtype.",
)
@click.option(
    "--tp",
    "ranks",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="GPUs of tensor parallelism.",
)
@click.option(
    "--context",
    type=_TOKENS,
    metavar="TOKENS",
    help="Length of a session; default: the model's, at most 32768.",
)
@click.option("--gpu-gib", type=_GIB, help="Memory of each GPU.")
@click.option(
    "--weights-gib",
    type=_GIB,
    help="Weights in memory; default: the safetensors beside config.json.",
)
@click.option("--ram-gib", type=_GIB, help="RAM for the cache.")
@click.option("--drive-gib", type=_GIB, help="Drive for the cache.")
@click.option("--drive-mb-s", type=_GIB, metavar="MB/S", help="What the drive reads, 10^6 bytes/s.")
@click.option("--prefill", type=_GIB, metavar="TOKENS/S", help="What the engine computes.")
@click.option(
    "--overhead-ms",
    type=_Amount(min=0, max=1e9),
    default=0.0,
    show_default=True,
    help="Before the first byte of a restore.",
)
@click.option(
    "--chunk",
    type=_TOKENS,
    default=256,
    show_default=True,
    help="Tokens of a stored chunk.",
)
@click.option("--json", "as_json", is_flag=True, help="All figures as one JSON object.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE.html",
              help="A page with a plot; needs --drive-mb-s and --prefill.")  # fmt: skip
def size_command(
    model: str,
    kv_dtype: str,
    state_dtype: str,
    ranks: int,
    context: int | None,
    gpu_gib: float | None,
    weights_gib: float | None,
    ram_gib: float | None,
    drive_gib: float | None,
    drive_mb_s: float | None,
    prefill: float | None,
    overhead_ms: float,
    chunk: int,
    as_json: bool,
    plot: Path | None,
) -> None:
    """Bytes of KV, and whether a drive is worth it.

    MODEL is a directory, a config.json, a .gguf file, or an id (org/name) in the Hugging Face cache
    of this machine. Nothing is downloaded. Exit: 0; 1 if the architecture is not known, or the
    weights do not fit into the GPU; 2 wrong usage.
    """
    if plot and not (drive_mb_s and prefill):
        raise click.UsageError("--plot shows times: give --drive-mb-s and --prefill too")
    try:
        found = answer(
            Question(
                model=find_model(model),
                kv_dtype=kv_dtype,
                recurrent=state_dtype,
                ranks=ranks,
                context=context,
                gpu_bytes=_bytes(gpu_gib),
                weights_bytes=_bytes(weights_gib),
                ram_bytes=_bytes(ram_gib),
                drive_bytes=_bytes(drive_gib),
                drive_speed=drive_mb_s * 1e6 if drive_mb_s else None,
                prefill=prefill,
                overhead=overhead_ms / 1000,
                chunk=chunk,
            )
        )
    except (SizeError, UnknownArchitecture) as error:
        raise click.ClickException(str(error)) from error
    if plot:
        try:
            write_text(plot, page(found))
        except OSError as error:
            raise click.ClickException(f"{plot} cannot be written: {error}") from error
    if as_json:
        click.echo(json.dumps(to_json(found), indent=1))
    else:
        Console().print(render_answer(found), highlight=False)
    sys.exit(1 if found.short else 0)
