"""Operations of the stage runner."""

from __future__ import annotations

import hashlib
import json
import shlex
from io import StringIO
from typing import Any

from pyinfra import host
from pyinfra.api import FunctionCommand, StringCommand, operation
from pyinfra.facts.files import Sha256File
from pyinfra.operations import files

from deploys.common.back import go_back
from deploys.common.context import Run
from deploys.common.facts import CommandJson, JsonFile
from deploys.common.kept import left
from deploys.common.operations import (
    Commands,
    connector_arguments,
    executing,
    refuse,
    shown,
    unknown_yet,
)
from deploys.common.ready import ready_commands
from deploys.common.rendered import (
    Late,
    look,
    manager_texts,
    not_resolved,
    own_scripts,
    services_of,
    supervisord_conf,
    vllm_yamls,
)
from kvhost.onhost.report_held import MARKER as ENGINE_MARKER
from kvhost.receipt import make_receipt, system_of
from kvhost.runners import of_a_runner


def service_texts(run: Run, late: Late) -> dict[str, str]:
    """Path -> content of every file that describes a service."""
    described = late.services(run)
    return {
        **{f"{run.paths.etc}/{s.name}.json": s.launch_spec(run.paths) for s in described},
        f"{run.paths.etc}/model-digest": f"{late.model_digest}\n",
        **manager_texts(run, described),
    }


def left_over(run: Run, texts: dict[str, str]) -> list[str]:
    """Descriptions and configurations of runners that the settings do not have any more. Without
    its description services.py takes a runner's unit or program away, and stops it."""
    kvhost = run.report.kvhost.data
    there = (kvhost.files.data if kvhost else None) or {}
    wanted = {*texts, *vllm_yamls(run.settings, with_key=run.with_key)}
    mine = {path: path.rpartition("/") for path in there if path not in wanted}
    return sorted(
        path for path, (folder, _, name) in mine.items()
        if folder == run.paths.etc and of_a_runner(name)
    )  # fmt: skip


@operation()
def supervisor_takes_it(run: Run) -> Commands:
    """Asks the installed supervisord about its new configuration, before anything in use changes.

    + run: the run of this host
    """
    pid1 = run.report.pid1.data
    if pid1 is not None and pid1.systemd:
        return  # services.py asks systemd about its units
    text = supervisord_conf(run, services_of(run))
    in_use = host.get_fact(Sha256File, path=f"{run.paths.etc}/supervisord.conf")
    if in_use == hashlib.sha256(text.encode()).hexdigest():
        return
    draft = f"{run.paths.state}/draft.conf"
    yield from files.put._inner(src=StringIO(text), dest=draft, mode="644", create_remote_dir=False)
    check = shlex.join((run.tools_python, run.script("supervisor_check"), draft))
    yield shown(f"{check}; code=$?; rm -f {shlex.quote(draft)}; exit $code")


@operation()
def service_files(run: Run) -> Commands:
    """The descriptions that launch.py and supervisord or systemd read.

    + run: the run of this host
    """
    late = look(run)
    if late.resolved is None:
        yield not_resolved(late)
        return
    texts = service_texts(run, late)
    for path in left_over(run, texts):
        yield from files.file._inner(path=path, present=False)
    for path, text in texts.items():
        yield from files.put._inner(
            src=StringIO(text), dest=path, user="root", group="root", mode="644",
            create_remote_dir=False,
        )  # fmt: skip


def services_command(run: Run, *words: str) -> tuple[str, ...]:
    base = ("--base", run.paths.base_dir, "--user", run.user)
    return ("python3", run.script("services"), *base, *words)


@operation()
def services_answer(run: Run) -> Commands:
    """Every service runs with its present configuration, and a request has been answered.

    + run: the run of this host
    """
    state = host.get_fact(CommandJson, argv=services_command(run, "--json", "status"))
    good = state["status"] == "ok" and state["data"]["supervisor_fresh"]
    good = good and all(
        entry["state"] == "RUNNING" and entry["alive"] and entry["current"]
        for entry in state["data"]["services"].values()
    )
    if good:
        answers = [
            host.get_fact(CommandJson, argv=command) for command in ready_commands(run, "--once")
        ]
        if all(one["status"] == "ok" and one["data"]["ready"] for one in answers):
            return
    timeout = str(run.settings.ready_timeout_s)
    command = StringCommand(
        shlex.join(services_command(run, "ensure"))
        + "".join(f" && {shlex.join(argv)}" for argv in ready_commands(run, "--timeout", timeout))
    )

    def come_or_go_back(state: Any, host: Any) -> bool:
        ok, _ = host.run_shell_command(command, print_output=True, **connector_arguments())
        if not ok:
            go_back(host, run, "the services did not come up, or did not answer")
        return bool(ok)

    yield FunctionCommand(come_or_go_back, (), {})


@operation()
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
        known = host.get_fact(JsonFile, path=run.paths.drive)
        if known["status"] != "ok":
            yield refuse(f"the drive's state: {known['why']}") if executing() else unknown_yet()
            return
        drive = known["data"]
    proof = host.get_fact(JsonFile, path=f"{run.env_dir}/{ENGINE_MARKER}")
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
    yield from files.put._inner(
        src=StringIO(text), dest=run.paths.receipt, user="root", group="root", mode="644",
        create_remote_dir=False,
    )  # fmt: skip
