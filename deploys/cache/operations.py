"""Operations of the stage cache."""

from __future__ import annotations

import json
import shlex
from io import StringIO

from pyinfra.api import operation
from pyinfra.operations import files

from deploys.common.context import Run
from deploys.common.operations import (
    Commands,
    Directory,
    as_service,
    converges,
    executing,
    make_directories,
    refuse,
    shown,
    unknown_yet,
)
from deploys.common.own import own_files
from deploys.common.rendered import (
    cache_arguments,
    look,
    not_resolved,
    runner_arguments,
    vllm_yaml,
)
from kvhost.llama import facts as llama
from kvhost.services.describe import proof_env
from kvhost.services.namespace import Namespace
from kvhost.services.native import too_little_memory
from kvhost.services.served import model_path
from kvhost.services.tier import MARKER_TEXT, NAMESPACE_FILE, TIER_MARKER
from kvhost.services.vllm import runner_env


@operation()
@converges
def resolve(run: Run) -> Commands:
    """Has the staged engine say what the configuration means, once for the same inputs.

    It is not in use yet: what it refuses is refused before anything in use is touched.

    + run: the run of this host
    """
    late = look(run)
    if late.resolved is not None:
        return
    if late.resolved_path is None:
        yield refuse(f"model: {late.why}") if executing() else unknown_yet()
        return
    if run.settings.runner != "vllm":
        yield from resolve_program(run, late.resolved_path)
        return
    # the configuration in use is replaced only once the engine has accepted the new one
    config, draft = f"{run.paths.state}/draft.yaml", f"{run.paths.state}/resolved.new"
    yield from files.put._inner(
        src=StringIO(vllm_yaml(run)), dest=config, mode="644", create_remote_dir=False
    )
    ask = as_service(
        run.user,
        runner_env(run.settings, run.paths),
        (
            f"{run.env_dir}/bin/python", run.script("resolve"),
            "--config", config, "--out", "-", "--cache-args", json.dumps(cache_arguments(run)),
            "--", *runner_arguments(run),
        ),
    )  # fmt: skip
    # the log of a good answer is long and says nothing: it is shown only when it went wrong
    log = f"{run.paths.state}/resolve.log"
    # the answer comes through the pipe: root reads no file that the service's user could replace
    yield shown(
        f"{shlex.join(ask)} 2> {log} > {draft} || "
        f"{{ tail -n 15 {log}; rm -f {config} {draft}; exit 1; }}; "
        f"python3 -m json.tool {draft} > /dev/null && mv {draft} {late.resolved_path}"
    )


def resolve_program(run: Run, path: str) -> Commands:
    """The same of llama-server: its build, and what its model's header says."""
    draft = f"{run.paths.state}/resolved.new"
    ask = as_service(
        run.user,
        proof_env(run.settings, run.paths),
        (
            f"{run.env_dir}/bin/python", run.script("llama_resolve"),
            "--program", f"{run.env_dir}/bin/{llama.PROGRAM}",
            "--model", model_path(run.settings, run.paths),
            "--context", str(run.settings.max_model_len),
        ),
    )  # fmt: skip
    yield shown(
        f"{shlex.join(ask)} > {draft} || {{ rm -f {draft}; exit 1; }}; "
        f"python3 -m json.tool {draft} > /dev/null && mv {draft} {path}"
    )


@operation()
@converges
def tier(run: Run) -> Commands:
    """The tier's directory with its marker, and the namespace of this configuration.

    + run: the run of this host
    """
    late = look(run)
    if late.resolved is None:
        yield not_resolved(late)
        return
    if (why := too_little_memory(run.settings, late.namespace(run).chunk_bytes)) is not None:
        yield refuse(why) if executing() else unknown_yet()
        return
    top, user = run.paths.tier_dir, run.user
    yield from make_directories([Directory(top, user, "700")])
    yield from own_files(run, *tier_words(run, late.namespace(run)))


def tier_words(run: Run, namespace: Namespace) -> tuple[str, ...]:
    """For onhost/own_files.py: what lies in the tier before anything is cached."""
    top, here = run.paths.tier_dir, run.paths.namespace(namespace.digest)
    return (
        "--dir",
        here,
        *("--file", f"{top}/{TIER_MARKER}", MARKER_TEXT),
        *("--file", f"{here}/{NAMESPACE_FILE}", namespace.metadata(run.settings.model_source)),
    )
