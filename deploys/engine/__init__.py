"""Stage engine: tools, and an environment that is proven before it becomes the current one."""

from __future__ import annotations

import base64
import hashlib
import json
import shlex

from deploys.common.context import REPO, Run
from deploys.common.operations import TextFile, run_unless, text_files
from deploys.engine.bundle import bundle_on_host, bundle_place
from kvhost.driver import expected_gpus
from kvhost.services import service_env
from kvhost.tools import tools_commands


def lock_path(run: Run) -> str:
    return f"{run.paths.locks}/{run.lock.name}-py{run.lock.python}-{run.lock.digest[:16]}.txt"


def deploy(run: Run) -> None:
    paths = run.paths
    text_files(
        name="engine: lock files",
        wanted=[
            TextFile(f"{paths.locks}/tools.txt", (REPO / "locks" / "tools.txt").read_text()),
            TextFile(lock_path(run), run.lock.text),
            TextFile(
                f"{paths.etc}/service-env.json",
                json.dumps(service_env(run.settings, paths), indent=1, sort_keys=True) + "\n",
            ),
        ],
    )
    place = bundle_place(run)
    script = run.script("engine")
    status = ("python3", script, "status", "--env", run.env_dir)
    check, build = tools_commands(
        paths, run.tools_digest, run.python, place.on_host if place else None
    )
    if place is not None:
        bundle_on_host(
            name="engine: the bundle, whole and verified",
            place=place,
            around=paths.bundle,
            installed=(("sh", "-c", check), status),
            prove=(
                "python3", run.script("bundle_check"), "--bundle", place.on_host,
                "--lock", lock_path(run), "--tools", f"{paths.locks}/tools.txt",
            ),
        )  # fmt: skip
    run_unless(
        name="engine: tools (uv, supervisord)",
        check=("sh", "-c", check),
        command=build,
        when_ok=bool,
    )
    for name, content in run.lock.wheels.items():
        _wheel(run, name, content)
    tools = f"{paths.tools}/current/bin"
    # PyPI has torch for CUDA; its CPU builds are in an index of their own
    proof: tuple[str, ...] = ("--torch-index", "https://download.pytorch.org/whl/cpu")
    if run.lock.cuda is not None:
        proof = ("--cuda", str(run.lock.cuda), "--gpus", ",".join(expected_gpus(run.report)))
    run_unless(
        name="engine: environment, proven by the ABI check",
        check=status,
        command=(
            "python3", script, "install", "--lock", lock_path(run),
            "--lock-digest", run.lock.digest, "--env", run.env_dir, "--wheels", paths.wheels,
            "--python", run.python, "--pip-python", f"{tools}/python", "--uv", f"{tools}/uv",
            "--cache", paths.uv_cache, "--user", run.user,
            "--service-env", f"{paths.etc}/service-env.json",
            "--abi-script", run.script("abi_check"),
            *(("--bundle", place.on_host) if place else ()),
            *proof,
        ),
        when_ok=lambda state: bool(state["complete"]),
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
        check=("sh", "-c", f'[ "$(readlink {current})" = {run.env_dir} ] && echo true'),
        command=("python3", script, "switch", "--env", run.env_dir, "--current", current),
        when_ok=bool,
    )


def _wheel(run: Run, name: str, content: bytes) -> None:
    """A small wheel of kvhost's own, by the shell: pyinfra's put takes text or files."""
    path = shlex.quote(f"{run.paths.wheels}/{name}")
    encoded = base64.b64encode(content).decode()
    digest = hashlib.sha256(content).hexdigest()
    run_unless(
        name="engine: metadata wheel",
        check=("sh", "-c", f"echo {digest} {path} | sha256sum -c --status && echo true"),
        command=f"echo {encoded} | base64 -d > {path} && chmod 644 {path}",
        when_ok=bool,
    )
