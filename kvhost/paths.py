"""Where everything of kvhost lies on a host. The only place that spells these paths."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath


@dataclass(frozen=True)
class HostPaths:
    """Absolute paths on the host, all below ``base_dir`` except a ``tier_dir`` set elsewhere."""

    base_dir: str
    tier_dir: str

    def _p(self, *parts: str) -> str:
        return str(PurePosixPath(self.base_dir, *parts))

    @property
    def bin(self) -> str:
        """Scripts of kvhost/onhost, root's, 0755."""
        return self._p("bin")

    @property
    def lib(self) -> str:
        """Modules that the services load (the guard of the API), root's."""
        return self._p("lib")

    @property
    def etc(self) -> str:
        """Rendered configuration, root's, readable by the service's user."""
        return self._p("etc")

    @property
    def secrets(self) -> str:
        """Keys, each 0600 and its reader's own; the directory is root's."""
        return self._p("secrets")

    @property
    def locks(self) -> str:
        """Copies of the lock files that were installed from."""
        return self._p("locks")

    @property
    def wheels(self) -> str:
        """Wheels that kvhost supplies itself (the metadata shim of vLLM)."""
        return self._p("wheels")

    @property
    def bundle(self) -> str:
        """The copy of a bundle (engine_bundle), while the engine is installed from it."""
        return self._p("bundle")

    @property
    def tools(self) -> str:
        """Virtual environments of uv and supervisord, one a lock digest."""
        return self._p("tools")

    @property
    def envs(self) -> str:
        """Engine environments, one a lock digest."""
        return self._p("envs")

    @property
    def current(self) -> str:
        """Symlink to the engine environment in use."""
        return self._p("current")

    @property
    def models(self) -> str:
        return self._p("models")

    @property
    def home(self) -> str:
        """Home and caches of the service's user (numba, vLLM, torch, bytecode)."""
        return self._p("home")

    @property
    def log(self) -> str:
        """Log files of the services, the service's user's, 0700."""
        return self._p("log")

    @property
    def run(self) -> str:
        """Sockets, PID files, start records of the services."""
        return self._p("run")

    @property
    def state(self) -> str:
        """Receipt, resolved configurations, digests of models; root's."""
        return self._p("state")

    @property
    def receipt(self) -> str:
        return self._p("state", "receipt.json")

    @property
    def drive(self) -> str:
        """Which drive is mounted where (drive_apply.py writes it), for launch.py."""
        return self._p("state", "drive.json")

    @property
    def run_lock(self) -> str:
        """Who is changing this host right now."""
        return self._p("state", "run.lock")

    @property
    def uv_cache(self) -> str:
        return self._p("uv-cache")

    def namespace(self, digest: str) -> str:
        """Directory of one namespace of the KV cache (0700, the service's user's)."""
        return str(PurePosixPath(self.tier_dir, f"ns-{digest[:24]}"))
