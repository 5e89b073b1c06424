"""Stage cache: vLLM's configuration, what the engine makes of it, the tier and its namespace."""

from __future__ import annotations

from deploys.cache.operations import resolve, tier
from deploys.common.context import Run
from deploys.common.operations import TextFile, text_files
from deploys.common.rendered import vllm_yamls


def check(run: Run) -> None:
    """Before anything in use is touched: does the installed version take this configuration?"""
    resolve(name="cache: what the engine makes of the configuration", run=run)


def deploy(run: Run) -> None:
    text_files(
        name="cache: configuration of vLLM",
        wanted=[
            TextFile(path, text)
            for path, text in vllm_yamls(run.settings, with_key=run.with_key).items()
        ],
    )
    tier(name="cache: tier and namespace", run=run)
