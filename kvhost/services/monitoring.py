"""What runs onhost/metrics.py on a host: a unit of systemd's, or a program of supervisord's. Pure.

It is none of the services in describe.py: nothing waits for it, and its end ends nothing.
"""

from __future__ import annotations

import hashlib

from kvhost.onhost import metrics
from kvhost.paths import HostPaths
from kvhost.services.runners import runners_of
from kvhost.services.served import api_url
from kvhost.services.units import below, command, escaped
from kvhost.settings import Settings

UNIT = "kvhost-metrics.service"
#: supervisord's name of it
PROGRAM = "metrics"
#: seconds from pass to pass
EVERY_S = 30


def textfile(settings: Settings) -> str:
    """The file that node_exporter reads."""
    return f"{settings.monitoring_textfile_dir}/{metrics.FILE}"


def written_for(paths: HostPaths) -> str:
    """What unit and figures begin with, by which an installation tells its own from others'."""
    return f"# Written by kvhost for {paths.base_dir}."


def argv(settings: Settings, paths: HostPaths) -> tuple[str, ...]:
    """The collector's command, all but its Python."""
    runners = [
        word
        for one in runners_of(settings)
        for word in ("--runner", f"{one.service}={api_url(one.settings)}")
    ]
    return (
        *(f"{paths.bin}/metrics.py", "--base", paths.base_dir, "--tier", paths.tier_dir),
        *("--out", settings.monitoring_textfile_dir, "--loop", str(EVERY_S)),
        *(() if settings.native else ("--cache", f"http://127.0.0.1:{settings.cache_http_port}")),
        *runners,
    )


def program(settings: Settings, paths: HostPaths, script: str) -> dict[str, str] | None:
    """For supervisord.conf.j2; None when it is not wanted. ``script``: the collector's own text,
    whose digest is in its environment so that supervisord starts a changed one anew."""
    if not settings.monitoring:
        return None
    words = (f"{paths.tools}/current/bin/python", *argv(settings, paths))
    return {"name": PROGRAM, "command": " ".join(words), "digest": _digest(script)}


def unit_text(settings: Settings, paths: HostPaths, script: str) -> str:
    """The unit. Root's, for a drive's health is asked for by root alone, and the cache server's
    page is closed to others; it may write to the one directory, and change nothing else."""
    used = (paths.base_dir, paths.tier_dir, settings.monitoring_textfile_dir)
    lines: list[tuple[str, object]] = [
        ("Type", "exec"),
        ("ExecStart", command(("/usr/bin/python3", *argv(settings, paths)))),
        ("Restart", "always"),
        ("RestartSec", 30),
        ("Nice", 10),
        ("UMask", "0022"),
        ("NoNewPrivileges", "yes"),
        # ADMIN and RAWIO: the drive's log; DAC_OVERRIDE: the services' records are their user's,
        # the directory may be node_exporter's
        ("CapabilityBoundingSet", "CAP_SYS_ADMIN CAP_SYS_RAWIO CAP_DAC_OVERRIDE"),
        ("ProtectSystem", "strict"),
        ("ReadWritePaths", escaped(settings.monitoring_textfile_dir)),
        ("ProtectHome", "read-only" if below(used, "/home", "/root", "/run/user") else "yes"),
        ("PrivateTmp", "no" if below(used, "/tmp", "/var/tmp") else "yes"),
        ("ProtectKernelModules", "yes"),
        ("ProtectKernelLogs", "yes"),
        ("RestrictAddressFamilies", "AF_INET AF_INET6 AF_UNIX"),
        ("RestrictNamespaces", "yes"),
        ("RestrictRealtime", "yes"),
        ("LockPersonality", "yes"),
        ("MemoryMax", "256M"),
        ("SyslogIdentifier", "kvhost-metrics"),
    ]
    parts = [
        # by the first line kvhost tells its own from others'
        f"{written_for(paths)} Changes here are undone by the next run:",
        f"# put yours into {UNIT}.d/ (systemctl edit). It runs metrics.py {_digest(script)}.",
        "",
        "[Unit]",
        "Description=kvhost: figures for Prometheus",
        "",
        "[Service]",
        *(f"{key}={value}" for key, value in lines),
        "",
        "[Install]",
        "WantedBy=multi-user.target",
    ]
    return "\n".join(parts) + "\n"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
