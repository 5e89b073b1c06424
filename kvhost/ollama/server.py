"""Ollama's server as a service of kvhost's, from its own archive. Pure."""

from __future__ import annotations

from kvhost.engine.locks import EngineLock
from kvhost.ollama.dropin import UNIT, variables
from kvhost.paths import HostPaths
from kvhost.schema.ollama import archive_parts
from kvhost.services.served import api_url
from kvhost.services.service import Service, gpu_gate, plain_env
from kvhost.services.tier import drive_of
from kvhost.settings import Settings

#: bytes on disk of an archive with its CUDA libraries, unpacked (a release of 2026: 4 to 5 GB)
UNPACKED_BYTES = 5_000_000_000


def adopted(settings: Settings) -> bool:
    """Whether the ollama.service of the host is adopted by a drop-in: kvhost has no service."""
    return settings.runner == "ollama" and settings.ollama_archive is None


def lock_of(settings: Settings, machine: str) -> EngineLock:
    """What names the environment: the archive's digest, or that there is none."""
    text = f"{UNIT}, adopted\n"
    if settings.ollama_archive is not None:
        text = f"archive {archive_parts(settings.ollama_archive)[1]}\n"
    return EngineLock(
        name="ollama",
        cuda=None,
        machine=machine,
        python="any",
        text=text,
        versions={},
        download_bytes=0,
        disk_bytes=UNPACKED_BYTES if settings.ollama_archive is not None else 0,
        third_party=None,
    )


def models_dir(settings: Settings) -> str | None:
    """Where Ollama's models lie, if not where Ollama puts them by itself."""
    return variables(settings).get("OLLAMA_MODELS")


def ready_argv(settings: Settings, paths: HostPaths) -> tuple[str, ...]:
    """Command that asks whether the server answers."""
    return ("python3", f"{paths.bin}/ollama_ready.py", "--url", api_url(settings))


def log_argv(settings: Settings, paths: HostPaths) -> tuple[str, ...]:
    """Where ollama_look.py reads the server's log."""
    return ("--unit", UNIT) if adopted(settings) else ("--log", f"{paths.log}/runner.log")


def model_words(settings: Settings, paths: HostPaths) -> tuple[str, ...]:
    """Arguments of ollama_model.py that name the model."""
    source = settings.model_source
    what = ("--gguf", source) if source.startswith("/") else ("--model", source)
    return (*what, "--state", paths.state)


def services(settings: Settings, paths: HostPaths, *, gpus: int) -> tuple[Service, ...]:
    """The one service; none where a unit of the host's is adopted. ``gpus``: how many it waits
    for."""
    store = models_dir(settings)
    if adopted(settings) or store is None:
        return ()
    # its key is made in HOME at the first start (ollama#9148)
    env = {**plain_env(paths), **variables(settings)}
    mount = drive_of(settings)
    on_drive = mount is not None and store.startswith(f"{mount}/")
    return (
        Service(
            name="runner",
            title="Ollama",
            argv=(f"{paths.current}/bin/ollama", "serve"),
            env=env,
            watch=(paths.current,),
            before=gpu_gate(paths, gpus, ()),
            needs_mount=mount if on_drive else None,
            require=(store,),
            writes=(store,),
            ready=ready_argv(settings, paths),
            ready_s=settings.ready_timeout_s,
            stop_timeout_s=30,
            priority=20,
        ),
    )
