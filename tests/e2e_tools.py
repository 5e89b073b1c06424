"""A clean copy of the repository that provisions this machine, for the tests that go the whole way.

Everything lies in a directory of its own below /var/lib and on ports of its own; at the end its
services are stopped by their own supervisor and the directory is removed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
BASE = Path(os.environ.get("KVHOST_E2E_BASE", "/var/lib/kvhost-e2e"))
API_KEY = "sk-e2e-7c1d0f4b9a"  # planted, and searched for everywhere


def free_ports(count: int) -> list[int]:
    """Ports of loopback that are free now; all are held until the last is known."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


@dataclass
class Done:
    """A finished run of kvhost."""

    code: int
    text: str

    def counts(self) -> dict[str, tuple[int, int, int]]:
        """Operation -> (changed, failed, unchanged), of pyinfra's table of results."""
        rows = re.findall(r"^ {4}(\w+: .*?) {2,}\d+ +(\d+|-) +(\d+|-) +(\d+|-) *$", self.text, re.M)
        plain = [[name, *(cell.replace("-", "0") for cell in cells)] for name, *cells in rows]
        return {name: (int(a), int(b), int(c)) for name, a, b, c in plain}

    def changed(self) -> list[str]:
        return [name for name, (changed, _, _) in self.counts().items() if changed]


@dataclass
class Site:
    """One copy of the repository and the installation that it makes."""

    repo: Path
    home: Path
    ports: list[int]
    base: Path = BASE
    data: dict[str, str] = field(default_factory=dict)

    @property
    def own_env(self) -> dict[str, str]:
        """The environment of a program of the test's own Python that is to run this copy.

        That Python may know the repository under test (bin/test's does): the copy comes first.
        """
        keep = {k: v for k, v in os.environ.items() if not k.startswith(("KVHOST_", "PYTEST"))}
        return {**keep, "HOME": str(self.home), "PYTHONPATH": str(self.repo)}

    @property
    def env(self) -> dict[str, str]:
        keep = {k: v for k, v in self.own_env.items() if k != "PYTHONPATH"}
        return {**keep, "KVHOST_API_KEY": API_KEY}

    def arguments(self, **data: str) -> list[str]:
        given = {
            "base_dir": str(self.base),
            "api_port": str(self.ports[0]),
            "cache_port": str(self.ports[1]),
            "cache_http_port": str(self.ports[2]),
            "cache_limit_gib": "4",
            **self.data,
            **data,
        }
        if given.get("cache_kind") == "native":  # no cache server: its settings are refused
            del given["cache_port"], given["cache_http_port"]
        return [part for key, value in given.items() for part in ("--data", f"{key}={value}")]

    def run(self, *argv: str, env: dict[str, str] | None = None, **popen: Any) -> Done:
        done = subprocess.run(
            argv,
            cwd=self.repo,
            env={**self.env, **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=1500,
            check=False,
            stdin=subprocess.DEVNULL,
            **popen,
        )
        return Done(done.returncode, done.stdout)

    def up(self, env: dict[str, str] | None = None, **data: str) -> Done:
        """`bin/up`, the README's command."""
        return self.run("bin/up", *self.arguments(**data), env=env)

    def killed_up(self, kill: str, **data: str) -> int:
        """A run in a process group of its own that the hook kills; its exit code."""
        # not through `kvhost up`: the group that is killed must be the run's, whole
        argv = [".venv/bin/pyinfra", "inventory.py", "deploy.py", "-y", *self.arguments(**data)]
        done = self.run(*argv, env={"KVHOST_TEST_KILL": kill}, start_new_session=True)
        self.last = done
        return done.code

    def reports(self) -> list[dict[str, Any]]:
        """All verdicts that this copy has written, oldest first."""
        paths = sorted((self.repo / "reports").glob("*/*.json"), key=lambda p: p.stem)
        return [json.loads(path.read_text()) for path in paths]

    def receipt(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads((self.base / "state/receipt.json").read_text())
        return loaded

    def record(self, service: str) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads((self.base / f"run/{service}.json").read_text())
        return loaded

    def services(self, *words: str) -> Done:
        script = str(self.base / "bin/services.py")
        return self.run("python3", script, "--base", str(self.base), "--user", "kvhost", *words)

    def remove(self) -> None:
        """Stops the services by their own supervisor, then removes the installation."""
        if (self.base / "bin/services.py").exists():
            self.services("shutdown")
        if self.base == BASE and self.base.exists():
            shutil.rmtree(self.base)


def make_site(folder: Path) -> Site:
    """A copy of what a clone would hold, with an empty home directory beside it."""
    repo, home = folder / "kvhost", folder / "home"
    home.mkdir(parents=True)
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPO,
        capture_output=True,
        check=True,
    ).stdout.decode()
    for name in filter(None, listed.split("\0")):
        source, target = REPO / name, repo / name
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
    return Site(repo, home, free_ports(3))
