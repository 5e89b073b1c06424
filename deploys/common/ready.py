"""The command that asks a server whether it has answered; two stages use it."""

from __future__ import annotations

from deploys.common.context import Visit
from kvhost.services import api_key_path, api_url, served_name


def ready_command(run: Visit, *words: str) -> tuple[str, ...]:
    settings = run.settings
    key = ("--key-file", api_key_path(run.paths)) if run.with_key else ()
    return (
        "python3", run.script("ready"), "--base", run.paths.base_dir,
        "--api", api_url(settings),
        "--cache", f"http://127.0.0.1:{settings.cache_http_port}",
        "--model", served_name(settings), *key, *words,
    )  # fmt: skip
