"""What every run makes on a host, and the questions by which it tells whether that is as wanted.

The stages make it; drift compares it. What is rendered is in rendered.py.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

from deploys.common.context import REPO, Run
from deploys.common.ollama import packages_of
from deploys.common.operations import Directory, TextFile
from kvhost.engine.packages import drive_packages, needed_packages, runner_packages
from kvhost.engine.tools import tools_commands
from kvhost.ollama.server import adopted, model_words
from kvhost.schema.values import SENT
from kvhost.services.describe import proof_env
from kvhost.services.served import api_url, model_dir, model_path


def wanted_directories(run: Run) -> list[Directory]:
    paths, user = run.paths, run.user
    roots = (
        paths.base_dir, paths.bin, paths.lib, paths.etc, paths.locks, paths.wheels, paths.tools,
        paths.envs, paths.models, paths.state,
    )  # fmt: skip
    if adopted(run.settings):  # the unit has a user of its own, and its program is not kvhost's
        few = (paths.base_dir, paths.bin, paths.lib, paths.etc, paths.state)
        return [Directory(path, "root", "755") for path in few]
    return [
        *(Directory(path, "root", "755") for path in roots),
        # root's, so that nobody can put a link in the place of a key; a key is its reader's, 0600
        Directory(paths.secrets, "root", "711"),
        *(Directory(path, user, "700") for path in (paths.log, paths.run, paths.home)),
    ]


def inside_home(run: Run) -> tuple[str, ...]:
    home = run.paths.home
    return (f"{home}/tmp", *(f"{home}/.cache{sub}" for sub in ("", "/numba", "/vllm")))


def packages(run: Run) -> tuple[str, ...]:
    if run.settings.runner == "ollama":
        return packages_of(run.settings, run.python)
    return (
        *needed_packages(run.python, gpu=run.lock.cuda is not None),
        *runner_packages(run.settings),
        *drive_packages(run.settings),
    )


def lock_path(run: Run) -> str:
    return f"{run.paths.locks}/{run.lock.name}-py{run.lock.python}-{run.lock.digest[:16]}.txt"


def lock_files(run: Run) -> list[TextFile]:
    paths = run.paths
    env = json.dumps(proof_env(run.settings, paths), indent=1, sort_keys=True) + "\n"
    return [
        *tools_lock(run),
        TextFile(lock_path(run), run.lock.text),
        TextFile(f"{paths.etc}/service-env.json", env),
    ]


def tools_lock(run: Run) -> list[TextFile]:
    text = (REPO / "locks" / "tools.txt").read_text(encoding="utf-8")
    return [TextFile(f"{run.paths.locks}/tools.txt", text)]


def wheel_command(run: Run, name: str) -> tuple[str, ...]:
    path = shlex.quote(f"{run.paths.wheels}/{name}")
    digest = hashlib.sha256(run.lock.wheels[name]).hexdigest()
    return ("sh", "-c", f"echo {digest} {path} | sha256sum -c --status && echo true")


def tools_check(run: Run) -> tuple[str, ...]:
    return ("sh", "-c", tools_commands(run.paths, run.tools_digest, run.python)[0])


def builtin_script(run: Run) -> tuple[str, str]:
    """What makes the built-in model for this runner, and where."""
    name = "model_gguf" if run.settings.runner == "llama_server" else "model_builtin"
    return run.script(name), model_path(run.settings, run.paths)


def model_check(run: Run) -> tuple[str, ...]:
    here = model_dir(run.settings, run.paths)
    if run.settings.model_source == "builtin":
        script, path = builtin_script(run)
        return ("python3", script, "--check", path)
    return ("cat", f"{here}/.kvhost-complete.json")


def settle_command(run: Run, resolved: str, *, clear: bool) -> tuple[str, ...]:
    argv = ("python3", run.script("generations"), "settle", "--base", run.paths.base_dir)
    return (*argv, "--resolved", resolved, *(() if clear else ("--record-only",)))


@functools.cache
def digest_here(source: str) -> tuple[str, str]:
    """(digest, why there is none) of a model on the controller, by the host's own script. What was
    read once is remembered in the user's cache directory."""
    caches = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "kvhost"
    caches.mkdir(parents=True, exist_ok=True)
    script = REPO / "kvhost" / "onhost" / "model_digest.py"
    done = subprocess.run(
        [
            *(sys.executable, str(script), "--model", str(folder_of(source))),
            *("--cache", str(caches / "models.json")),
        ],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        return "", done.stderr.strip()
    return str(json.loads(done.stdout)["digest"]), ""


def folder_of(source: str) -> Path:
    return Path(source.removeprefix(SENT)).expanduser()


def ollama_model(run: Run, verb: str) -> tuple[str, ...]:
    digest = run.settings.ollama_model_digest
    pinned = ("--digest", digest) if digest else ()
    words = (*model_words(run.settings, run.paths), "--url", api_url(run.settings), *pinned)
    return ("python3", run.script("ollama_model"), verb, *words)
