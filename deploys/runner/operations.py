"""Operations of the stage runner."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Iterator
from io import StringIO
from typing import Any

from pyinfra.api import FunctionCommand, StringCommand, operation
from pyinfra.operations import files

from deploys.common.back import go_back
from deploys.common.context import Run
from deploys.common.kept import left
from deploys.common.looks import ask_file, ask_json, ask_json_file
from deploys.common.operations import (
    Commands,
    TextFile,
    connector_arguments,
    converges,
    executing,
    refuse,
    shown,
    unknown_yet,
    write_files,
)
from deploys.common.ready import ready_commands
from deploys.common.rendered import (
    Late,
    gone_runners,
    look,
    manager_texts,
    not_resolved,
    own_scripts,
    services_of,
    supervisord_conf,
    vllm_yamls,
)
from kvhost.onhost.engine_whole import MARKER as ENGINE_MARKER
from kvhost.onhost.ready import CACHE_HANGS, RUNNER_HANGS
from kvhost.records.receipt import make_receipt, system_of
from kvhost.services.runners import runners_of


def service_texts(run: Run, late: Late) -> dict[str, str]:
    """Path -> content of every file that describes a service."""
    described = late.services(run)
    return {
        **{f"{run.paths.etc}/{s.name}.json": s.launch_spec(run.paths) for s in described},
        f"{run.paths.etc}/model-digest": f"{late.model_digest}\n",
        **manager_texts(run, described),
    }


def service_file_paths(run: Run) -> list[str]:
    """Paths of service_texts(), which are known before the namespace is."""
    described = services_of(run)
    return [
        *(f"{run.paths.etc}/{s.name}.json" for s in described),
        f"{run.paths.etc}/model-digest",
        *manager_texts(run, described),
    ]


@operation()
@converges
def supervisor_takes_it(run: Run) -> Commands:
    """Asks the installed supervisord about its new configuration, before anything in use changes.

    + run: the run of this host
    """
    pid1 = run.report.pid1.data
    if pid1 is not None and pid1.systemd:
        return  # services.py asks systemd about its units
    text = supervisord_conf(run, services_of(run))
    in_use = ask_file(f"{run.paths.etc}/supervisord.conf") or {}
    if in_use.get("sha256") == hashlib.sha256(text.encode()).hexdigest():
        return
    draft = f"{run.paths.state}/draft.conf"
    yield from files.put._inner(src=StringIO(text), dest=draft, mode="644", create_remote_dir=False)
    check = shlex.join((run.tools_python, run.script("supervisor_check"), draft))
    yield shown(f"{check}; code=$?; rm -f {shlex.quote(draft)}; exit $code")


@operation()
@converges
def service_files(run: Run) -> Commands:
    """The descriptions that launch.py and supervisord or systemd read.

    + run: the run of this host
    """
    late = look(run)
    if late.resolved is None:
        yield not_resolved(late)
        return
    texts = service_texts(run, late)
    if gone := gone_runners(run, texts):
        yield StringCommand(shlex.join(("rm", "-f", "--", *gone)))
    wanted = [TextFile(path, text) for path, text in texts.items()]
    yield from write_files(wanted, f"{run.paths.state}/services.tar")


def services_command(run: Run, *words: str) -> tuple[str, ...]:
    base = ("--base", run.paths.base_dir, "--user", run.user)
    return ("python3", run.script("services"), *base, *words)


def ready_or_again(run: Run) -> Iterator[str]:
    """Waits for each runner; one that hangs is started anew, once, and waited for again."""
    waits = ready_commands(run, "--timeout", str(run.settings.ready_timeout_s))
    for runner, argv in zip(runners_of(run.settings), waits, strict=True):
        wait = shlex.join(argv)
        # a runner that hangs concerns no other; without the cache server none is served
        one = shlex.join(services_command(run, "restart", runner.service))
        all_of_them = shlex.join(services_command(run, "restart"))
        yield (
            f"{{ {wait}; case $? in 0) ;; {RUNNER_HANGS}) {one} && {wait} ;; "
            f"{CACHE_HANGS}) {all_of_them} && {wait} ;; *) false ;; esac; }}"
        )


@operation()
@converges
def services_answer(run: Run) -> Commands:
    """Every service runs with its present configuration, and a request has been answered.

    + run: the run of this host
    """
    state = ask_json(services_command(run, "--json", "status"))
    good = state["status"] == "ok" and state["data"]["supervisor_fresh"]
    good = good and all(
        entry["state"] == "RUNNING" and entry["alive"] and entry["current"]
        for entry in state["data"]["services"].values()
    )
    if good:
        answers = [ask_json(command) for command in ready_commands(run, "--once")]
        if all(one["status"] == "ok" and one["data"]["ready"] for one in answers):
            return
    command = StringCommand(
        " && ".join((shlex.join(services_command(run, "ensure")), *ready_or_again(run)))
    )

    def come_or_go_back(state: Any, host: Any) -> bool:
        ok, _ = host.run_shell_command(command, print_output=True, **connector_arguments())
        if not ok:
            go_back(host, run, "the services did not come up, or did not answer")
        return bool(ok)

    yield FunctionCommand(come_or_go_back, (), {})


def proof_path(run: Run) -> str:
    """The environment's marker, which holds the results of its ABI check."""
    return f"{run.env_dir}/{ENGINE_MARKER}"


@operation()
@converges
def receipt(run: Run) -> Commands:
    """What is installed, by digest: the same for two hosts that are the same.

    + run: the run of this host
    """
    late = look(run)
    if late.resolved is None:
        yield not_resolved(late)
        return
    drive = None
    if run.drive_order is not None:
        known = ask_json_file(run.paths.drive)
        if known["status"] != "ok":
            yield refuse(f"the drive's state: {known['why']}") if executing() else unknown_yet()
            return
        drive = known["data"]
    proof = ask_json_file(proof_path(run))
    if proof["status"] != "ok":
        yield refuse(f"the ABI check's results: {proof['why']}") if executing() else unknown_yet()
        return
    yamls = vllm_yamls(run.settings, with_key=run.with_key)
    texts = {**yamls, **service_texts(run, late)}
    text = make_receipt(
        run.settings,
        run.lock,
        tools_digest=run.tools_digest,
        python=run.python,
        model_digest=late.model_digest or "",
        namespace=late.namespace(run),
        files=texts,
        scripts=own_scripts(run),
        abi=proof["data"]["abi"],
        system=system_of(run.settings, run.report),
        drive=drive,
    )
    if executing():
        left(run.host, json.loads(text))
    wanted = [TextFile(run.paths.receipt, text)]
    yield from write_files(wanted, f"{run.paths.state}/receipt.tar")
