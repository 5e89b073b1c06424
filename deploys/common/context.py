"""What one run knows of one host, handed from deploy.py to every stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvhost.engine.locks import EngineLock
from kvhost.paths import HostPaths
from kvhost.plan.make import Plan
from kvhost.report import HostReport
from kvhost.secrets import Secret
from kvhost.settings import Settings

REPO = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Visit:
    """One host that something is asked of, or taken from: its settings and its report."""

    host: str
    run_id: str
    settings: Settings
    report: HostReport
    #: whether the API asks for a key: of a run that installs nothing, the one that is on the host
    with_key: bool

    @property
    def paths(self) -> HostPaths:
        return self.settings.paths

    @property
    def user(self) -> str:
        return self.settings.service_user

    @property
    def files(self) -> Mapping[str, Any]:
        """Path -> what the report knows of each file in bin/, etc/ and secrets/ on the host."""
        kvhost = self.report.kvhost.data
        return (kvhost.files.data if kvhost else None) or {}

    def script(self, name: str) -> str:
        """Path on the host of one of kvhost/onhost's scripts."""
        return f"{self.paths.bin}/{name}.py"

    def lacks(self, name: str) -> bool:
        """Whether that script is known not to be on the host: no run came here yet."""
        kvhost = self.report.kvhost.data
        return (
            kvhost is not None
            and kvhost.files.data is not None
            and self.script(name) not in kvhost.files.data
        )


@dataclass(frozen=True)
class Run(Visit):
    """The plan of one host that is provisioned or tested, and what follows from it."""

    plan: Plan
    lock: EngineLock
    tools_digest: str
    #: Python on the host that the environments are made of
    python: str
    api_key: Secret | None
    hf_token: Secret | None
    #: of the store that hosts share KV through; None where the run does not write it
    shared_password: Secret | None = None
    #: what onhost/drive_apply.py is to do with the claimed drive; None where none is claimed
    drive_order: dict[str, Any] | None = None
    #: what onhost/driver_apply.py is to do about the GPU's driver; None where it is adopted
    driver_order: dict[str, Any] | None = None

    @property
    def systemd(self) -> bool:
        """Whether systemd is PID 1 on the host, and runs the services."""
        return self.report.pid1.data is not None and self.report.pid1.data.systemd

    @property
    def bare(self) -> bool:
        """Whether no run was ever here: base_dir is known to be absent or empty."""
        base = self.report.kvhost.data.base if self.report.kvhost.data else None
        if base is None or base.data is None:
            return base is not None and base.status == "absent"
        return base.data.owner == "nobody"

    @property
    def env_dir(self) -> str:
        """Directory of the engine environment that this run wants."""
        return f"{self.paths.envs}/{self.lock.digest[:16]}"

    @property
    def tools_dir(self) -> str:
        return f"{self.paths.tools}/{self.tools_digest[:16]}"

    @property
    def tools_python(self) -> str:
        return f"{self.paths.tools}/current/bin/python"
