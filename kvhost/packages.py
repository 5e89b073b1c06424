"""Debian packages that a host needs."""

from __future__ import annotations


def needed_packages(python: str) -> tuple[str, ...]:
    """Debian packages; a Python outside /usr/bin brings its own venv module."""
    venv = (f"{python.rpartition('/')[2]}-venv",) if python.startswith("/usr/bin/") else ()
    return ("libnuma1", "ca-certificates", "util-linux", *venv)
