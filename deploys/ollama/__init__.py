"""Stage ollama: its archive or its adopted unit, the model, and what can be said of its KV."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from deploys.common.context import Run
from deploys.common.looks import Ask
from deploys.common.made import tools_lock
from deploys.common.ollama import archive_on_host
from deploys.common.ollama_texts import drop_in_source, texts_of
from deploys.common.operations import TextFile, root_files, run_unless
from deploys.ollama.operations import (
    archive_sent,
    asks_of_the_server,
    drop_in,
    kept_here,
    left_drop_in,
    left_over,
    model,
    models_place,
    own_service,
    receipt,
    state_command,
    which_kv_type,
)
from kvhost.engine.tools import tools_commands
from kvhost.ollama.server import adopted
from kvhost.records.journal import tell
from kvhost.reports.kept import tell_summary
from kvhost.schema.ollama import archive_parts
from kvhost.services.served import api_url


def tools_of(run: Run) -> tuple[str, str]:
    """(check, build) of what starts the service."""
    return tools_commands(run.paths, run.tools_digest, run.python)


def current_command(run: Run) -> tuple[str, ...]:
    link = shlex.quote(run.paths.current)
    return ("sh", "-c", f'[ "$(readlink {link})" = {shlex.quote(run.env_dir)} ] && echo true')


def asks(run: Run) -> Iterator[Ask]:
    """What the operations of deploy() will ask."""
    if not adopted(run.settings):
        yield from (("file", one.path) for one in tools_lock(run))
        yield ("argv", "sh", "-c", tools_of(run)[0])
        yield ("argv", *state_command(run))
        yield ("argv", *current_command(run))
    for path in texts_of(run):
        yield ("file", path)
    yield from asks_of_the_server(run)


def deploy(run: Run) -> None:
    left_over(name="ollama: what another runner left", run=run)
    if not adopted(run.settings):
        program(run)
    models_place(name="ollama: directory of models", run=run)
    wanted = [TextFile(path, text) for path, text in texts_of(run).items()]
    root_files(
        name="ollama: how its server is set", wanted=wanted, passing=f"{run.paths.state}/o.tar"
    )
    if adopted(run.settings):
        drop_in(name="ollama: the drop-in beside its unit", run=run)
    else:
        own_service(name="ollama: it runs and has answered", run=run)
    model(name="ollama: the model", run=run)
    receipt(name="ollama: receipt", run=run)
    verdict(run)


def program(run: Run) -> None:
    """The tools and the archive, proven before it becomes the current one."""
    root_files(
        name="ollama: lock of the tools",
        wanted=tools_lock(run),
        passing=f"{run.paths.state}/locks.tar",
    )
    check, build = tools_of(run)
    run_unless(
        name="ollama: tools (uv, supervisord)",
        check=("sh", "-c", check),
        command=build,
        when_ok=bool,
    )
    archive_sent(name="ollama: the archive, sent", run=run)
    sha256 = archive_parts(run.settings.ollama_archive or "")[1]
    install = shlex.join(
        (
            "python3", run.script("ollama_archive"), "install",
            "--archive", archive_on_host(run.settings) or "", "--sha256", sha256,
            "--env", run.env_dir, "--user", run.user, "--lock-digest", run.lock.digest,
        )
    )  # fmt: skip
    run_unless(
        name="ollama: the archive, by its digest, unpacked and proven",
        check=state_command(run),
        command=f"{install}; code=$?; rm -rf {shlex.quote(run.paths.bundle)}; exit $code",
        when_ok=lambda state: bool(state["complete"]),
    )
    run_unless(
        name="ollama: switch to it",
        check=current_command(run),
        command=(
            *("python3", run.script("engine"), "switch"),
            *("--env", run.env_dir, "--current", run.paths.current),
        ),
        when_ok=bool,
    )


def leave(run: Run) -> None:
    """In a run of another runner: the drop-in goes, and the unit runs as it was."""
    if drop_in_source(run) in run.files:
        left_drop_in(name="ollama: its unit as it was", run=run)


def verdict(run: Run, *, always: bool = False) -> None:
    """``always``: also when nothing has changed since the last one."""
    if not always:
        tell_summary(run.host, api=api_url(run.settings), model=run.settings.model_source)
    if run.settings.verify != "never" or always:
        asked = always or run.settings.verify == "always"
        which_kv_type(name="verify: which KV type is in force", run=run, asked=asked)
    else:
        tell("untested", host=run.host)
    kept_here(name="verify: the receipt is kept", run=run)
