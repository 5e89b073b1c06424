"""Stage cache: vLLM's configuration, what the engine makes of it, the tier and its namespace."""

from __future__ import annotations

from deploys.cache.operations import resolve, tier
from deploys.common.context import Run
from deploys.common.operations import TextFile, text_files
from deploys.common.rendered import vllm_yaml


def check(run: Run) -> None:
    """Before anything in use is touched: does the installed version take this configuration?"""
    resolve(name="cache: what the engine makes of the configuration", run=run)


def deploy(run: Run) -> None:
    text_files(
        name="cache: configuration of vLLM",
        wanted=[TextFile(f"{run.paths.etc}/vllm.yaml", vllm_yaml(run))],
    )
    tier(name="cache: tier and namespace", run=run)
