"""The real cache server and runner as kvhost describes them, without a host that is provisioned.

    python -m tests.engine_pair start|stop|restart cache|runner BASE

Used by the tests as a restart command, too. BASE holds what a base_dir of kvhost would: the launch
specifications in etc/, records in run/, logs in log/, the tier in tier/. Between stop and start of
the cache server BASE/between.sh runs, if it is there: that is where a test breaks something.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvhost.onhost import model_builtin
from kvhost.paths import HostPaths
from kvhost.services.service import Service
from kvhost.services.tier import NAMESPACE_FILE, TIER_MARKER
from kvhost.services.vllm import cache_service, native_runner, runner_service, vllm_config
from kvhost.settings import Settings
from tests.e2e_tools import free_ports

REPO = Path(__file__).resolve().parents[1]
NAMESPACE = "ns-" + "e1" * 12
Json = dict[str, Any]


def live(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def launcher(base: Path, name: str) -> int | None:
    path = base / "run" / f"{name}.launcher"
    return int(path.read_text()) if path.exists() else None


def keep(base: Path, name: str) -> None:
    """The parent of the launcher, which ends when its parent does."""
    spec = base / "etc" / f"{name}.json"
    child = subprocess.Popen([sys.executable, str(REPO / "kvhost/onhost/launch.py"), str(spec)])
    (base / "run" / f"{name}.launcher").write_text(str(child.pid))
    child.wait()


def start(base: Path, name: str) -> None:
    """Returns when the service's own process runs and its record names it."""
    record, path = base / "run" / f"{name}.json", base / "log" / f"{name}.log"
    before = record.read_text() if record.exists() else ""
    with path.open("ab") as log:
        keeper = subprocess.Popen(
            [sys.executable, "-m", "tests.engine_pair", "keep", name, str(base)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=REPO,
            start_new_session=True,
        )
    deadline = time.monotonic() + 120
    while not record.exists() or record.read_text() == before:
        if keeper.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"{name} did not start: {path.read_text()[-2000:]}")
        time.sleep(0.05)


def stop(base: Path, name: str) -> None:
    pid = launcher(base, name)
    if pid is None or not live(pid):
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + 100
    while live(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    if live(pid):
        raise SystemExit(f"{name} does not stop")


def restart(base: Path, name: str) -> None:
    stop(base, name)
    between = base / "between.sh"
    if between.exists() and (name == "cache" or not (base / "etc/cache.json").exists()):
        subprocess.run(["sh", str(between)], check=True, cwd=base)
    start(base, name)


@dataclass
class Pair:
    """One cache server and one runner in ``base``; ``env`` is an environment with the engine."""

    base: Path
    env: Path
    ports: list[int] = field(default_factory=lambda: free_ports(3))
    #: changes of the settings
    data: Json = field(default_factory=dict)

    @property
    def settings(self) -> Settings:
        api, cache, http = self.ports
        given: Json = {"base_dir": str(self.base), "api_port": api}
        server = {"cache_port": cache, "cache_http_port": http, "heartbeat_s": 2.0}
        native = self.data.get("cache_kind") == "native"
        return Settings(**{**given, **({} if native else server), **self.data})

    @property
    def paths(self) -> HostPaths:
        return self.settings.paths

    @property
    def namespace(self) -> Path:
        return Path(self.paths.tier_dir) / NAMESPACE

    def describe(self) -> dict[str, Service]:
        """Service descriptions; the sweep needs no tools of its own here."""
        settings, paths, where = self.settings, self.paths, str(self.namespace)
        if settings.native:
            return {"runner": native_runner(settings, paths, where, with_key=False, gpus=0)}
        found = (
            cache_service(settings, paths, str(self.namespace)),
            runner_service(settings, paths, with_key=False),
        )
        return {one.name: one for one in found}

    def write(self, **changed: Any) -> None:
        """Writes specifications; ``changed`` are fields of a service by name."""
        for name, service in self.describe().items():
            service = dataclasses.replace(service, **changed.get(name, {}))
            (self.base / "etc" / f"{name}.json").write_text(service.launch_spec(self.paths))

    def make(self) -> None:
        for name in ("etc", "run", "log", "state", "home/tmp", "tools/current", "models"):
            (self.base / name).mkdir(parents=True, exist_ok=True)
        self.namespace.mkdir(parents=True, exist_ok=True)
        (self.namespace.parent / TIER_MARKER).touch()  # without both the cache server stays down
        (self.namespace / NAMESPACE_FILE).write_text('{"chunk_bytes": null}\n')
        for link, target in (
            ("current", self.env),
            ("bin", REPO / "kvhost/onhost"),
            ("lib", REPO / "kvhost/onhost"),
            ("tools/current/bin", Path(sys.executable).parent),
        ):
            if not (self.base / link).is_symlink():
                (self.base / link).symlink_to(target)
        model = self.settings.paths.models + f"/builtin-{model_builtin.DIGEST[:16]}"
        model_builtin.build(Path(model))
        self.configure(vllm_config(self.settings, self.paths, with_key=False))
        self.write()

    def configure(self, config: Json) -> None:
        """vLLM's configuration; JSON is YAML."""
        (self.base / "etc/vllm.yaml").write_text(json.dumps(config, indent=1))

    def start(self) -> None:
        for name in self.describe():
            start(self.base, name)

    def stop(self) -> None:
        for name in reversed(self.describe()):
            stop(self.base, name)

    def log(self, name: str) -> str:
        return (self.base / "log" / f"{name}.log").read_text(errors="replace")

    def config(self, **changed: Any) -> Json:
        """What evidence.py is told."""
        api, http = (f"http://127.0.0.1:{self.ports[n]}" for n in (0, 2))
        command = [sys.executable, "-m", "tests.engine_pair", "restart"]
        shell = ["sh", "-c", f'cd {REPO} && exec "$@"', "sh"]
        return {
            "api_base": api,
            "metrics_url": f"{api}/metrics",
            "cache_http": None if self.settings.native else http,
            "model": "kvhost-builtin",
            "namespace_dir": str(self.namespace),
            "own_requests": str(self.base / "state/own-requests.json"),
            "services": {
                name: {
                    "record": str(self.base / f"run/{name}.json"),
                    "restart": [*shell, *command, name, str(self.base)],
                    "log": str(self.base / f"log/{name}.log"),
                }
                for name in self.describe()
            },
            "prompt_tokens": 2056,
            "chunk_size": self.settings.chunk_size,
            "vocab": [20, 236],
            "heartbeat_s": self.settings.heartbeat_s,
            "timeouts": {"write_s": 20, "ready_s": 240},
            **changed,
        }


def main() -> None:
    verb, name, base = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    {"keep": keep, "start": start, "stop": stop, "restart": restart}[verb](base, name)


if __name__ == "__main__":
    main()
