"""How a host's cache server is told of the tier that several hosts share. Pure functions.

What LMCache loads for it is onhost/kvhost_shared.py; docs/shared-tier.md says what it does.
"""

from __future__ import annotations

from typing import Any

from kvhost.basics import SHARED_PASSWORD_VARIABLE
from kvhost.paths import HostPaths
from kvhost.schema.shared_values import has_tls, is_s3, parts_of, port_of
from kvhost.settings import Settings


def password_path(paths: HostPaths) -> str:
    return f"{paths.secrets}/shared-password"


def ca_path(paths: HostPaths) -> str:
    """Certificates that the store's own must come from; no secret."""
    return f"{paths.etc}/shared-ca.pem"


def pause_path(paths: HostPaths) -> str:
    """While a test of the host's own tier runs, it lies there: nothing else may answer."""
    return f"{paths.state}/shared-pause.json"


def place(settings: Settings, paths: HostPaths) -> dict[str, Any] | None:
    """Where the store is, for kvhost_store.py; None without a shared tier. Holds no secret."""
    if settings.shared_tier is None:
        return None
    url = parts_of(settings.shared_tier)
    where: dict[str, Any] = {
        "host": url.hostname,
        "port": port_of(url),
        "tls": has_tls(url),
        "ca": ca_path(paths) if settings.shared_tier_ca_file is not None else None,
    }
    if not is_s3(settings.shared_tier):
        return {**where, "user": url.username}
    return {
        **where,
        "bucket": url.path[1:],
        "access": settings.shared_tier_access_key,
        "region": settings.shared_tier_region,
    }


def adapter(settings: Settings, paths: HostPaths, namespace_dir: str) -> dict[str, Any] | None:
    """LMCache's description of the shared tier, beside that of the file tier; None without one."""
    where = place(settings, paths)
    if where is None:
        return None
    return {
        "type": "plugin",
        "module_path": "kvhost_shared",
        "class_name": "SharedAdapter",
        "adapter_params": {
            **where,
            "namespace": namespace_dir.rpartition("/")[2],
            "timeout_s": settings.shared_tier_timeout_s,
            "pause": pause_path(paths),
        },
    }


def secret_env(settings: Settings, paths: HostPaths) -> dict[str, str]:
    """Variable -> file with its value, of the cache server."""
    return {SHARED_PASSWORD_VARIABLE: password_path(paths)} if settings.shared_tier else {}


def modules(settings: Settings, paths: HostPaths) -> tuple[str, ...]:
    """Files whose change means that the cache server has to be restarted."""
    if settings.shared_tier is None:
        return ()
    names = ("kvhost_shared", "kvhost_store", "kvhost_s3", "kvhost_resp")
    return (*(f"{paths.lib}/{name}.py" for name in names), ca_path(paths))
