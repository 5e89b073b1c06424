"""Stage engine: tools, and an environment that is proven before it becomes the current one."""

from __future__ import annotations

import base64
import json
import shlex
from collections.abc import Iterator

from deploys.common.bundle import bundle_place
from deploys.common.context import Run
from deploys.common.looks import Ask
from deploys.common.made import lock_files, lock_path, tools_check, wheel_command
from deploys.common.operations import file_asks, root_files, run_unless
from deploys.engine.bundle import bundle_on_host
from kvhost.driver.decide import expected_gpus
from kvhost.engine.locks import Program
from kvhost.engine.tools import tools_commands


def status_command(run: Run) -> tuple[str, ...]:
    return ("python3", run.script("engine"), "status", "--env", run.env_dir)


def current_command(run: Run) -> tuple[str, ...]:
    link = shlex.quote(run.paths.current)
    return ("sh", "-c", f'[ "$(readlink {link})" = {shlex.quote(run.env_dir)} ] && echo true')


def tools_build(run: Run) -> str:
    place = bundle_place(run)
    offline = place.on_host if place else None
    return tools_commands(run.paths, run.tools_digest, run.python, offline)[1]


#: runner -> the script of kvhost/onhost that proves its environment
CHECKS = {"vllm": "abi_check", "llama_server": "llama_check"}


def program_words(program: Program) -> tuple[str, ...]:
    """What engine.py is told of a runner's program."""
    words: tuple[str, ...] = ("--program", program.name)
    if program.source is not None:
        return (*words, "--program-source", program.source)
    env = json.dumps(dict(program.env), sort_keys=True)
    return (*words, "--package", program.package or "", "--build-env", env)


def asks(run: Run) -> Iterator[Ask]:
    """What the operations of deploy() will ask."""
    yield from file_asks(lock_files(run))
    yield ("argv", *tools_check(run))
    for name in run.lock.wheels:
        yield ("argv", *wheel_command(run, name))
    yield ("argv", *status_command(run))


def switch_asks(run: Run) -> Iterator[Ask]:
    yield ("argv", *current_command(run))


def deploy(run: Run) -> None:
    paths = run.paths
    root_files(
        name="engine: lock files", wanted=lock_files(run), passing=f"{paths.state}/locks.tar"
    )
    place = bundle_place(run)
    script = run.script("engine")
    if place is not None:
        bundle_on_host(
            name="engine: the bundle, whole and verified",
            place=place,
            around=paths.bundle,
            installed=(tools_check(run), status_command(run)),
            prove=(
                "python3", run.script("bundle_check"), "--bundle", place.on_host,
                "--lock", lock_path(run), "--tools", f"{paths.locks}/tools.txt",
            ),
        )  # fmt: skip
    run_unless(
        name="engine: tools (uv, supervisord)",
        check=tools_check(run),
        command=tools_build(run),
        when_ok=bool,
    )
    for name in run.lock.wheels:
        _wheel(run, name)
    tools = f"{paths.tools}/current/bin"
    # PyPI has torch for CUDA; its CPU builds are in an index of their own
    proof: tuple[str, ...] = ("--torch-index", "https://download.pytorch.org/whl/cpu")
    if run.lock.cuda is not None:
        proof = ("--cuda", str(run.lock.cuda), "--gpus", ",".join(expected_gpus(run.report)))
    program = run.lock.program
    if program is not None:
        proof = program_words(program)
    run_unless(
        name="engine: environment, proven by the ABI check",
        check=status_command(run),
        command=(
            "python3", script, "install", "--lock", lock_path(run),
            "--lock-digest", run.lock.digest, "--env", run.env_dir, "--wheels", paths.wheels,
            "--python", run.python, "--pip-python", f"{tools}/python", "--uv", f"{tools}/uv",
            "--cache", paths.uv_cache, "--user", run.user,
            "--service-env", f"{paths.etc}/service-env.json",
            "--abi-script", run.script(CHECKS[run.settings.runner]),
            *(("--bundle", place.on_host) if place else ()),
            *proof,
        ),
        when_ok=lambda state: bool(state["complete"] and state["proven"]),
    )  # fmt: skip
    if place is not None and place.source is not None:
        run_unless(
            name="engine: the bundle's copy is not needed any more",
            check=("sh", "-c", f"[ -e {paths.bundle} ] && echo false || echo true"),
            command=("rm", "-rf", paths.bundle),
            when_ok=bool,
        )


def switch(run: Run) -> None:
    """The environment becomes the current one, once it has taken the configuration."""
    current, script = run.paths.current, run.script("engine")
    run_unless(
        name="engine: switch to it",
        check=current_command(run),
        command=("python3", script, "switch", "--env", run.env_dir, "--current", current),
        when_ok=bool,
    )


def _wheel(run: Run, name: str) -> None:
    """A small wheel of kvhost's own, by the shell: pyinfra's put takes text or files."""
    path = shlex.quote(f"{run.paths.wheels}/{name}")
    encoded = base64.b64encode(run.lock.wheels[name]).decode()
    run_unless(
        name="engine: metadata wheel",
        check=wheel_command(run, name),
        command=f"echo {encoded} | base64 -d > {path} && chmod 644 {path}",
        when_ok=bool,
    )
