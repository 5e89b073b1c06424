"""What a runner serves, and where it is asked: its model by path and by name, its URL. Pure."""

from __future__ import annotations

from kvhost.llama import facts as llama
from kvhost.onhost.model_builtin import DIGEST as BUILTIN_DIGEST
from kvhost.paths import HostPaths
from kvhost.schema.values import SENT, is_sent
from kvhost.settings import Settings


def model_dir(settings: Settings, paths: HostPaths) -> str:
    """Where the model's files lie on the host."""
    if settings.model_source == "builtin":
        return f"{paths.models}/builtin-{BUILTIN_DIGEST[:16]}"
    if settings.model_source.startswith("/"):
        return settings.model_source
    store = settings.resolved_model_dir
    if is_sent(settings.model_source):
        return f"{store}/sent--{last_name(settings.model_source)}"
    owner, _, name = settings.model_source.partition("/")
    return f"{store}/{owner}--{name}--{(settings.model_revision or '')[:12]}"


def model_path(settings: Settings, paths: HostPaths) -> str:
    """What the runner is given as its model: a directory, or one file."""
    if settings.runner == "llama_server":
        return llama.model_file(settings, paths)
    return model_dir(settings, paths)


def last_name(source: str) -> str:
    """The last part of a model's path or name on the hub."""
    return source.removeprefix(SENT).rstrip("/").rpartition("/")[2]


def served_name(settings: Settings) -> str:
    """The name that clients ask for."""
    if settings.served_model_name is not None:
        return settings.served_model_name
    if settings.model_source == "builtin":
        return "kvhost-builtin"
    return last_name(settings.model_source).removesuffix(".gguf")


def api_url(settings: Settings) -> str:
    """Base URL of vLLM as the host itself reaches it."""
    address = "127.0.0.1" if settings.api_host in ("0.0.0.0", "::") else settings.api_host
    return f"http://{f'[{address}]' if ':' in address else address}:{settings.api_port}"


def api_key_path(paths: HostPaths) -> str:
    return f"{paths.secrets}/api-key"
