"""The services of a host, described once: supervisord's file and systemd's units come from this.

Pure functions of settings and paths. What each runner has is in a module of its own beside this.
"""

from __future__ import annotations

from kvhost.ollama import server as ollama
from kvhost.paths import HostPaths
from kvhost.services import llama, vllm
from kvhost.services.runners import FIRST
from kvhost.services.service import Service
from kvhost.settings import Settings


def services(
    settings: Settings, paths: HostPaths, namespace_dir: str, *, with_key: bool, gpus: int = 0
) -> tuple[Service, ...]:
    """All services of a host in the order of their start. ``gpus``: how many a runner needs."""
    if settings.runner == "llama_server":
        return llama.services(settings, paths, namespace_dir, with_key=with_key)
    return vllm.services(settings, paths, namespace_dir, with_key=with_key, gpus=gpus)


def proof_env(settings: Settings, paths: HostPaths) -> dict[str, str]:
    """Environment of the check that proves an engine: that of the service that will run it."""
    if settings.runner == "llama_server":
        return llama.environment(paths)
    return vllm.service_env(settings, paths)


def ready_argv(
    settings: Settings, paths: HostPaths, *, with_key: bool, name: str = FIRST
) -> tuple[str, ...]:
    """Command that asks whether a runner has answered; run as root, it counts its request."""
    if settings.runner == "ollama":
        return ollama.ready_argv(settings, paths)
    if settings.runner == "llama_server":
        return llama.ready_argv(settings, paths)
    return vllm.ready_argv(settings, paths, with_key=with_key, name=name)
