"""The command `kvhost model`: which commit a branch of a model on the hub means now."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

import click

from kvhost.basics import HF_TOKEN_VARIABLE, counted
from kvhost.commands.options import DONE_HERE
from kvhost.plan.types import size
from kvhost.schema.problems import Refusal
from kvhost.schema.values import is_hub_id, model_source

ENDPOINT = "https://huggingface.co"
LIMIT_S = 30


@click.command("model", epilog=DONE_HERE)
@click.argument("name")
@click.option("--revision", default="main", show_default=True, help="Branch, tag or commit.")
def model_command(name: str, revision: str) -> None:
    """Say which commit a model's branch means now.

    NAME is org/name on the Hugging Face hub (HF_ENDPOINT names another one, HF_TOKEN a token).
    Fetches nothing but the list of files.
    """
    try:
        if not is_hub_id(model_source(name)):
            raise Refusal("must be org/name on the hub")
    except Refusal as error:
        raise click.UsageError(f"{name}: {error.what}") from error
    info = _ask(name, revision)
    files = {str(row["rfilename"]): int(row.get("size") or 0) for row in info["siblings"]}
    weights = [n for path, n in files.items() if path.endswith(".safetensors")]
    if not weights:
        raise click.ClickException(f"{name} has no safetensors weights: kvhost does not serve it")
    count = counted(len(weights), "file")
    click.echo(f"{name} at {revision}: {count} of weights, {size(sum(weights))}")
    click.echo(f'model_source = "{name}"\nmodel_revision = "{info["sha"]}"')


def _ask(name: str, revision: str) -> dict[str, Any]:
    """What the hub says of one revision (huggingface.co/docs/hub/api). Raises ClickException."""
    endpoint = os.environ.get("HF_ENDPOINT", ENDPOINT).rstrip("/")
    quoted = urllib.parse.quote(revision, safe="")
    request = urllib.request.Request(f"{endpoint}/api/models/{name}/revision/{quoted}?blobs=True")
    if token := os.environ.get(HF_TOKEN_VARIABLE):
        # unredirected: a redirect to another host gets none
        request.add_unredirected_header("Authorization", f"Bearer {token.strip()}")
    try:
        with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
            info = json.load(answer)
        if not isinstance(info["sha"], str) or not isinstance(info["siblings"], list):
            raise ValueError("no commit in it")
        return dict(info)
    except urllib.error.HTTPError as error:
        why = {
            401: "it is private or gated: HF_TOKEN is missing or not allowed to read it",
            403: "it is gated, and HF_TOKEN is not allowed to read it",
            404: f"there is no such model, or no revision {revision!r} of it",
        }.get(error.code, error.reason)
        raise click.ClickException(f"{name}: {why} (HTTP {error.code})") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise click.ClickException(f"{endpoint} gave no answer about {name}: {error}") from error
