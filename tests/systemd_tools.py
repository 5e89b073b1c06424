"""kvhost's units on a host of the lab, with doubles in the place of the engine."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

from kvhost.services.describe import services
from kvhost.services.namespace import digest_of
from kvhost.services.runners import runners_of
from kvhost.services.served import api_key_path
from kvhost.services.service import Service, unit_file
from kvhost.services.units import unit_text
from kvhost.settings import Settings
from tests.lab.nspawn import Host

REPO = Path(__file__).resolve().parents[1]
ORDER = ("cache", "runner", "pruner")
KEY = "sk-unit-5e1f0c77"


class Units:
    """What a deploy leaves on a host, and the script that it calls."""

    def __init__(self, host: Host, *, with_key: bool = True) -> None:
        self.host = host
        self.settings = Settings(heartbeat_s=1, ready_timeout_s=20)
        self.paths = self.settings.paths
        self.base = self.paths.base_dir
        self.with_key = with_key
        self.namespace = self.paths.namespace(digest_of({"of": "a test"}))

    def described(self) -> tuple[Service, ...]:
        """The services as they are, but for the program and its environment."""
        made = services(self.settings, self.paths, self.namespace, with_key=self.with_key)
        return tuple(self.double(service) for service in made)

    def double(self, service: Service) -> Service:
        ports = {
            "cache": (self.settings.cache_port, self.settings.cache_http_port),
            **{one.service: (one.settings.api_port,) for one in runners_of(self.settings)},
        }.get(service.name, ())
        program = ("/usr/bin/python3", f"{self.base}/bin/unit_service.py", service.name)
        env = {"PATH": "/usr/bin:/bin", "HOME": self.paths.home}
        argv = (*program, *map(str, ports))
        return dataclasses.replace(service, argv=argv, env=env, before=(), copies=(), watch=())

    def make(self) -> None:
        """Everything but the units."""
        host, base = self.host, self.base
        host.root("useradd", "--system", "--home-dir", self.paths.home, "--shell",
                  "/usr/sbin/nologin", "kvhost")  # fmt: skip
        for name in ("bin", "etc", "tools", "state", "secrets"):
            host.root("mkdir", "-p", f"{base}/{name}")
        for path in (self.paths.home, self.paths.log, self.paths.run, self.namespace):
            host.root("install", "-d", "-m", "700", "-o", "kvhost", "-g", "kvhost", path)
        host.root("chown", "kvhost:", self.paths.tier_dir)
        if self.paths.tools not in host.binds_ro:  # else the real tools, supervisord among them
            host.root("mkdir", "-p", f"{base}/tools/current/bin")
            host.root("ln", "-s", "/usr/bin/python3", f"{base}/tools/current/bin/python")
        for script in [*(REPO / "kvhost/onhost").glob("[a-z]*.py"),
                       REPO / "tests/doubles/unit_service.py"]:  # fmt: skip
            shutil.copy(script, host.tree / base.lstrip("/") / "bin" / script.name)
        for mark in self.described()[0].require:
            host.write(mark, "")
        host.write(api_key_path(self.paths), KEY + "\n")
        host.root("chmod", "600", api_key_path(self.paths))
        self.render()

    def render(self, **edits: str) -> None:
        """The descriptions and the units; ``edits``: text to append to the unit of a service."""
        for service in self.described():
            self.host.write(f"{self.paths.etc}/{service.name}.json",
                            service.launch_spec(self.paths))  # fmt: skip
            text = unit_text(service, self.settings, self.paths, gpu=False)
            text += edits.get(service.name, "")
            self.host.write(f"{self.paths.etc}/{unit_file(service.name)}", text)

    def call(self, *words: str, code: int = 0) -> str:
        """What services.py says, as root."""
        argv = ["python3", f"{self.base}/bin/services.py", "--base", self.base, "--user", "kvhost"]
        said = self.host.root("sh", "-c", '"$@" 2>&1; echo "exit $?"', "-", *argv, *words, ok=False)
        assert said.rstrip().endswith(f"exit {code}"), said
        return said

    def status(self) -> dict[str, Any]:
        # the code is of the words, not of the JSON
        lines = self.call("--json", "status").splitlines()
        return dict(json.loads(lines[-2]))

    def rows(self) -> dict[str, Any]:
        return dict(self.status()["services"])

    def pids(self) -> dict[str, int]:
        return {name: row["pid"] for name, row in self.rows().items()}

    def good(self) -> bool:
        now = self.status()
        rows = now["services"].values()
        return bool(now["supervisor_fresh"]) and all(
            row["state"] == "RUNNING" and row["alive"] and row["current"] for row in rows
        )

    def tell(self, role: str, what: str) -> None:
        self.host.write(f"{self.paths.home}/{role}.do", what)

    def saw(self, role: str) -> dict[str, Any]:
        return dict(json.loads(self.host.read(f"{self.paths.home}/{role}.saw")))

    def kill(self, name: str, who: str = "pid") -> None:
        record = json.loads(self.host.read(f"{self.paths.run}/{name}.json"))
        self.host.root("kill", "-9", str(record[who]))

    def show(self, name: str, what: str) -> str:
        return self.host.root("systemctl", "show", "-P", what, unit_file(name)).strip()
