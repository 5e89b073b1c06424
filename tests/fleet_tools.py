"""Several hosts in one run, each with a small double in the place of the engine.

The deploy is the real one. What an earlier run would have built is put there instead: an
environment whose programs are doubles, with the marker of a complete one, and tools. A host is a
directory of this machine under a name of its own, or the tree of a machine of the lab.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvhost.engine.locks import read_lock, tools_digest
from kvhost.engine.matrix import load_matrix
from kvhost.records.journal import Told, newest, read_journal
from tests.drive_runs import _INVENTORY
from tests.e2e_tools import free_ports

REPO = Path(__file__).resolve().parents[1]
LOCKS = REPO / "locks"
KEY = "sk-fleet-3b8e71d2"  # planted, and searched for
PYTHON = "#!/usr/bin/python3\n"
#: what a real vLLM says of the built-in model
RESOLVED = {
    "dtype": "float32", "quantization": None, "kv_cache_dtype": "auto", "kv_cache_layout": None,
    "block_size": 128, "tensor_parallel": 1, "pipeline_parallel": 1,
    "architectures": ["LlamaForCausalLM"], "layers": 4, "kv_heads": 2, "head_size": 64,
    "sliding_window": None, "rope": None, "max_model_len": 16384, "vocab_size": 4096,
    "versions": {"vllm": "0.32.0", "lmcache": "0.5.6", "torch": "2.13.0+cpu"},
    "machine": os.uname().machine,
}  # fmt: skip

_SHELL = """#!/bin/sh
case "$1" in */resolve.py)
  while [ -e {base}/slow-resolve ]; do sleep 0.1; done
  [ ! -e {base}/fail-resolve ] || {{ echo "the double refuses" >&2; exit 1; }}
  cat {env}/resolved.json; exit;;
esac
exec /usr/bin/python3 "$@"
"""
_VLLM = """#!/bin/sh
port=$(sed -n 's/^"\\{{0,1\\}}port"\\{{0,1\\}}: *//p' "$3")
exec /usr/bin/python3 {env}/bin/unit_service.py runner "$port"
"""
_LMCACHE = """#!/bin/sh
while [ $# -gt 0 ]; do
  case "$1" in --port) port=$2;; --http-port) http=$2;; esac
  shift
done
exec /usr/bin/python3 {env}/bin/unit_service.py cache "$port" "$http"
"""
_SUPERVISORD = (
    PYTHON + "import sys\nsys.path.insert(0, {lib!r})\nfrom supervisor.supervisord import main\n"
    "main()\n"
)


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def plant(tree: Path, base: str) -> None:
    """Everything that the stage engine finds complete, for every Python that has a lock.

    ``tree``: the root of the host's file system, ``base``: its base_dir as the host sees it.
    """
    root = tree / base.lstrip("/")
    (root / "state").mkdir(parents=True)
    (root / "state/run.lock.guard").touch()  # the mark of the run that built it
    info = load_matrix(LOCKS).fitting(os.uname().machine, "cpu")[0]
    for version in info.pythons:
        lock = read_lock(LOCKS, info, version)
        plant_environment(root, base, lock.digest, lock.text)
    digest = tools_digest(LOCKS)
    lib = f"{base}/tools/{digest[:16]}/lib"
    here = root / "tools" / digest[:16]
    found = importlib.util.find_spec("supervisor")
    assert found is not None and found.origin is not None
    shutil.copytree(Path(found.origin).parent, here / "lib/supervisor")
    program(here / "bin/python", f'#!/bin/sh\nPYTHONPATH={lib} exec /usr/bin/python3 "$@"\n')
    program(here / "bin/supervisord", _SUPERVISORD.format(lib=lib))
    program(here / "bin/uv", "#!/bin/sh\nexit 1\n")
    (here / ".kvhost-complete.json").write_text(json.dumps({"digest": digest}))
    (root / "tools/current").symlink_to(f"{base}/tools/{digest[:16]}")
    subprocess.run(["chmod", "-R", "go+rX", root], check=True)


def plant_environment(root: Path, base: str, digest: str, lock: str) -> None:
    name = f"envs/{digest[:16]}"
    env, seen = root / name, f"{base}/{name}"
    for path, text in (("python", _SHELL), ("vllm", _VLLM), ("lmcache", _LMCACHE)):
        program(env / "bin" / path, text.format(env=seen, base=base))
    double = REPO / "tests/doubles/unit_service.py"
    program(env / "bin/unit_service.py", double.read_text())
    (env / "resolved.json").write_text(json.dumps(RESOLVED))
    packages = env / "lib/python3/site-packages"
    for line in lock.splitlines():
        if "==" in line and not line.startswith(("#", " ")):
            pin, _, version = line.split()[0].partition("==")
            info = packages / f"{pin.replace('-', '_')}-{version}.dist-info"
            info.mkdir(parents=True, exist_ok=True)
            (info / "METADATA").write_text(f"Name: {pin}\nVersion: {version}\n")
    mark = (
        "import sys, engine_whole as whole; env, lock = sys.argv[1:]; "
        "whole.write_marker(env, {'lock': lock, 'abi': [], **whole.tree_manifest(env)})"
    )
    subprocess.run(
        [sys.executable, "-c", mark, env, digest], cwd=REPO / "kvhost/onhost", check=True
    )


@dataclass(frozen=True)
class Ran:
    """A finished command: exit code, all that it printed, and the journal of the run."""

    code: int
    text: str
    told: Told

    def results(self) -> dict[str, str]:
        return {row.host: row.result for row in self.told.rows.values()}


@dataclass
class Fleet:
    """Hosts of one inventory, and the folder in which the controller keeps what it keeps."""

    folder: Path
    hosts: dict[str, dict[str, Any]] = field(default_factory=dict)
    bases: dict[str, Path] = field(default_factory=dict)
    #: the working copy that the command is started from
    repo: Path = REPO
    #: the journal that was the newest before the last command
    before: Path | None = None
    #: before the command: a network namespace for instance
    prefix: tuple[str, ...] = ()

    def add_here(self, name: str, top: Path, **data: Any) -> Path:
        """A host that is a directory of this machine."""
        base = top / name
        plant(Path("/"), str(base))
        ports = free_ports(3)
        named = ("api_port", "cache_port", "cache_http_port")
        self.hosts[f"@local/{name}"] = {
            "base_dir": str(base), **SMALL, **dict(zip(named, ports, strict=True)), **data,
        }  # fmt: skip
        self.bases[name] = base
        return base

    @property
    def inventory(self) -> Path:
        path = self.folder / "inventory.py"
        path.write_text(_INVENTORY.format(hosts=list(self.hosts.items())))
        return path

    @property
    def env(self) -> dict[str, str]:
        keep = {k: v for k, v in os.environ.items() if not k.startswith(("KVHOST_", "PYTEST"))}
        kept = {
            f"KVHOST_{n.upper()}": str(self.folder / n) for n in ("runs", "reports", "receipts")
        }
        return {**keep, **kept, "COLUMNS": "250", "KVHOST_API_KEY": KEY}

    def argv(self, *words: str) -> list[str]:
        command, *rest = words
        kvhost = [sys.executable, "-m", "kvhost.cli", command]
        return [*self.prefix, *kvhost, "--inventory", str(self.inventory), *rest]

    def start(self, *words: str, stderr_apart: bool = False, **popen: Any) -> subprocess.Popen[str]:
        self.before = newest(self.folder / "runs")
        error = subprocess.PIPE if stderr_apart else subprocess.STDOUT
        return subprocess.Popen(
            self.argv(*words), cwd=self.repo, env=self.env, stdin=subprocess.DEVNULL, text=True,
            stdout=subprocess.PIPE, stderr=error, **popen,
        )  # fmt: skip

    def run(self, *words: str, timeout: float = 300) -> Ran:
        return self.end(self.start(*words), timeout)

    def end(self, process: subprocess.Popen[str], timeout: float = 300) -> Ran:
        text, _ = process.communicate(timeout=timeout)
        return Ran(process.returncode, text, self.told())

    def told(self) -> Told:
        path = newest(self.folder / "runs")
        return read_journal(path) if path is not None else Told()

    def until(self, done: Callable[[Told], bool], seconds: float = 120) -> None:
        """Until the journal of the command that was started last says so."""
        deadline = time.monotonic() + seconds
        while newest(self.folder / "runs") == self.before or not done(self.told()):
            assert time.monotonic() < deadline, self.told()
            time.sleep(0.1)

    def well(self, name: str) -> bool:
        """Whether all services of a host that is here run with their present configuration."""
        argv = ["python3", f"{self.bases[name]}/bin/services.py", "--base", str(self.bases[name])]
        status = [*argv, "--user", "kvhost", "status"]
        return subprocess.run(status, capture_output=True, check=False).returncode == 0

    def stop(self) -> None:
        """Stops the services of the hosts that are here."""
        for base in self.bases.values():
            script = base / "bin/services.py"
            if script.exists():
                argv = ["python3", str(script), "--base", str(base), "--user", "kvhost", "shutdown"]
                subprocess.run(argv, capture_output=True, check=False, timeout=120)

    def remove(self) -> None:
        """Stops the services of the hosts that are here, and removes their directories."""
        self.stop()
        for base in self.bases.values():
            shutil.rmtree(base, ignore_errors=True)


#: settings of a host whose engine is a double
SMALL: Mapping[str, Any] = {
    "cache_limit_gib": 0.1, "free_floor_gib": 0.01, "l1_gib": 1, "engine_kv_gib": 1,
    "verify": "never", "ready_timeout_s": 30, "heartbeat_s": 1,
}  # fmt: skip


def interrupt(process: subprocess.Popen[str]) -> None:
    """Ctrl-C, to the whole group. The process was started in a session of its own."""
    os.killpg(process.pid, signal.SIGINT)


@contextlib.contextmanager
def fleet_at(top: Path, folder: Path) -> Iterator[Fleet]:
    """A fleet whose hosts lie below ``top``, which is removed before and after."""
    shutil.rmtree(top, ignore_errors=True)
    made = Fleet(folder)
    try:
        yield made
    finally:
        made.remove()
        shutil.rmtree(top, ignore_errors=True)
