"""Stage cache: vLLM's configuration, what the engine makes of it, the tier and its namespace."""

from __future__ import annotations

from collections.abc import Iterator

from deploys.cache.operations import resolve, tier, tier_words
from deploys.common.context import Run
from deploys.common.looks import Ask
from deploys.common.operations import TextFile, file_asks, no_file, root_files, secret_file
from deploys.common.own import own_files_ask
from deploys.common.rendered import (
    digest_command,
    last_namespace,
    resolved_path,
    shared_texts,
    vllm_yamls,
)
from kvhost.services import shared


def config(run: Run) -> list[TextFile]:
    texts = vllm_yamls(run.settings, with_key=run.with_key)
    texts |= shared_texts(run.settings)
    return [TextFile(path, text) for path, text in texts.items()]


def shared_password(run: Run) -> str | None:
    """Where the password of the shared tier's store lies, or lay by the report; None: nowhere."""
    path = shared.password_path(run.paths)
    return path if run.settings.shared_tier is not None or path in run.files else None


def check_asks(run: Run) -> Iterator[Ask]:
    """What the operation of check() will ask."""
    yield ("argv", *digest_command(run))
    if (last := last_namespace(run)) is not None:
        yield ("text", resolved_path(run, last.fields["model_digest"]))


def asks(run: Run) -> Iterator[Ask]:
    """What the operations of deploy() will ask."""
    if (path := shared_password(run)) is not None:
        yield ("file", path)
    yield from file_asks(config(run))
    yield ("file", run.paths.tier_dir)
    if (last := last_namespace(run)) is not None:
        yield own_files_ask(run, *tier_words(run, last))


def check(run: Run) -> None:
    """Before anything in use is touched: does the installed version take this configuration?"""
    resolve(name="cache: what the engine makes of the configuration", run=run)


def deploy(run: Run) -> None:
    path = shared_password(run)
    if path is not None and run.shared_password is not None and run.settings.shared_tier:
        secret_file(
            name="cache: password of the shared tier",
            path=path,
            secret=run.shared_password,
            # systemd, as root, hands it to the one service that needs it
            user="root" if run.systemd else run.user,
        )
    elif path is not None:
        no_file(name="cache: no password of a shared tier", path=path)
    if wanted := config(run):
        root_files(
            name="cache: configuration of vLLM",
            wanted=wanted,
            passing=f"{run.paths.state}/config.tar",
        )
    tier(name="cache: tier and namespace", run=run)
