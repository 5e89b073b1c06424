"""Stage cache: vLLM's configuration, what the engine makes of it, the tier and its namespace."""

from __future__ import annotations

from collections.abc import Iterator

from deploys.cache.operations import resolve, tier, tier_words
from deploys.common.context import Run
from deploys.common.looks import Ask
from deploys.common.operations import TextFile, file_asks, root_files
from deploys.common.own import own_files_ask
from deploys.common.rendered import (
    digest_command,
    last_namespace,
    resolved_path,
    vllm_yamls,
)


def config(run: Run) -> list[TextFile]:
    texts = vllm_yamls(run.settings, with_key=run.with_key)
    return [TextFile(path, text) for path, text in texts.items()]


def check_asks(run: Run) -> Iterator[Ask]:
    """What the operation of check() will ask."""
    yield ("argv", *digest_command(run))
    if (last := last_namespace(run)) is not None:
        yield ("text", resolved_path(run, last.fields["model_digest"]))


def asks(run: Run) -> Iterator[Ask]:
    """What the operations of deploy() will ask."""
    yield from file_asks(config(run))
    yield ("file", run.paths.tier_dir)
    if (last := last_namespace(run)) is not None:
        yield own_files_ask(run, *tier_words(run, last))


def check(run: Run) -> None:
    """Before anything in use is touched: does the installed version take this configuration?"""
    resolve(name="cache: what the engine makes of the configuration", run=run)


def deploy(run: Run) -> None:
    root_files(
        name="cache: configuration of vLLM",
        wanted=config(run),
        passing=f"{run.paths.state}/config.tar",
    )
    tier(name="cache: tier and namespace", run=run)
