"""The engine for the hosts of the lab: built once by kvhost's own scripts, and bound in.

The private network of a host reaches no registry, and an environment takes minutes to make. So
it is built in a mount namespace in which the directory of the cache lies at the place that it will
have on the hosts (environments hold absolute paths), proven there by the ABI check, and bound
read-only into every host; there the stage engine finds it complete, by its marker.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path

from kvhost.engine.locks import read_lock, tools_digest
from kvhost.engine.matrix import load_matrix
from kvhost.engine.tools import tools_commands
from kvhost.paths import HostPaths
from kvhost.services.vllm import service_env
from kvhost.settings import Settings
from tests.lab.nspawn import Host, Lab
from tests.lab.nspawn_image import LabError, lab_dir, only_one, sh

REPO = Path(__file__).resolve().parents[2]
#: the Python of the hosts' image (Debian 12), and of the machine that builds for it
PYTHON = "/usr/bin/python3.11"
#: an unprivileged user that every machine has, for the ABI check
PROVER = "nobody"


def engine_binds(base_dir: str = "/var/lib/kvhost") -> dict[str, str]:
    """Path on a host -> directory of this machine, to be bound read-only: envs and tools.

    Raises LabError.
    """
    if not Path(PYTHON).exists():
        raise LabError(f"{PYTHON} is missing: it must be the Python that the hosts have")
    paths = HostPaths(base_dir, f"{base_dir}/tier")
    locks = REPO / "locks"
    machine = sh("uname", "-m").strip()
    lock = read_lock(locks, load_matrix(locks).fitting(machine, "cpu")[0], "3.11")
    tools = tools_digest(locks)
    name = hashlib.sha256(repr((1, base_dir, lock.digest, tools)).encode()).hexdigest()[:16]
    place = lab_dir() / f"engine-{name}"
    with only_one(lab_dir(), "engine"):
        if not (place / "done").exists():
            base = place / "base"
            for folder in ("locks", "wheels", "envs", "tools", "etc", "home/tmp",
                           "home/.cache/numba", "home/.cache/vllm"):  # fmt: skip
                (base / folder).mkdir(parents=True, exist_ok=True)
            (base / "locks/tools.txt").write_text((locks / "tools.txt").read_text())
            (base / "locks/engine.txt").write_text(lock.text)
            for wheel, content in lock.wheels.items():
                (base / "wheels" / wheel).write_bytes(content)
            env = service_env(Settings(), paths)
            (base / "etc/service-env.json").write_text(json.dumps(env))
            install = [
                PYTHON, str(REPO / "kvhost/onhost/engine.py"), "install",
                "--lock", f"{paths.locks}/engine.txt", "--lock-digest", lock.digest,
                "--env", f"{paths.envs}/{lock.digest[:16]}", "--wheels", paths.wheels,
                "--python", PYTHON, "--pip-python", f"{paths.tools}/current/bin/python",
                "--uv", f"{paths.tools}/current/bin/uv", "--cache", paths.uv_cache,
                "--user", PROVER, "--service-env", f"{paths.etc}/service-env.json",
                "--abi-script", f"{base_dir}/etc/abi_check.py",
                "--torch-index", "https://download.pytorch.org/whl/cpu",
            ]  # fmt: skip
            shutil.copy(REPO / "kvhost/onhost/abi_check.py", base / "etc")
            sh("chown", "-R", PROVER, str(base / "home"))
            sh("chmod", "-R", "go+rX", str(base))
            inside_mounts(base, base_dir, [tools_commands(paths, tools, PYTHON)[1],
                                           shlex.join(install)])  # fmt: skip
            (place / "done").write_text("")
    return {paths.envs: str(place / "base/envs"), paths.tools: str(place / "base/tools")}


def engine_host(lab: Lab, name: str, *, boot: bool = True, **binds: Mapping[str, str]) -> Host:
    """A host on which an earlier run has built the engine; see Lab.host. Raises LabError."""
    base_dir = "/var/lib/kvhost"
    given = {**engine_binds(base_dir), **binds.pop("binds_ro", {})}
    host = lab.host(name, binds_ro=given, boot=False, **binds)
    # the mark of that run: without it what lies there is taken for somebody else's
    state = host.tree / base_dir.lstrip("/") / "state"
    state.mkdir(parents=True)
    (state / "run.lock.guard").touch()
    if boot:
        host.boot()
    return host


def inside_mounts(source: Path, target: str, commands: list[str]) -> None:
    """Runs shell commands where ``source`` lies at ``target``; nobody else sees it there."""
    made = not Path(target).exists()
    script = " && ".join(
        (
            f"mkdir -p {target}",
            f"mount --bind {shlex.quote(str(source))} {target}",
            *commands,
        )
    )
    try:
        sh("unshare", "--mount", "--propagation", "private", "sh", "-c", script, timeout=1500)
    finally:
        if made:
            Path(target).rmdir()
