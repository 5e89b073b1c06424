"""The services of a host with runner = "llama_server": the server, the keeper of its slots and the
pruner. Pure. The model is one .gguf file (of a split one the first); the tier's files are the
server's own, one a slot.
"""

from __future__ import annotations

from kvhost.llama import facts as llama
from kvhost.paths import HostPaths
from kvhost.services.runners import FIRST
from kvhost.services.served import api_key_path, api_url, served_name
from kvhost.services.service import Service, plain_env, script
from kvhost.services.tier import drive_of, model_drive, pruner_service, tier_marks
from kvhost.settings import Settings

#: the service of onhost/slots.py
KEEPER = "slots"
#: seconds that saving all slots before a stop may take
SAVE_S = 120


def environment(paths: HostPaths) -> dict[str, str]:
    """Of the server, and of whoever asks the program what it is."""
    return {
        "PATH": f"{paths.current}/bin:/usr/bin:/bin",
        "HOME": paths.home,
        "LC_ALL": "C.UTF-8",
        "TMPDIR": f"{paths.home}/tmp",
    }


def server_words(settings: Settings, paths: HostPaths, namespace_dir: str) -> tuple[str, ...]:
    """The server's command line after the program. The key comes by LLAMA_API_KEY."""
    tokens = settings.max_model_len * settings.llama_slots
    return (
        *("--model", llama.model_file(settings, paths), "--alias", served_name(settings)),
        *("--host", settings.api_host, "--port", str(settings.api_port)),
        *("--ctx-size", str(tokens), "--parallel", str(settings.llama_slots)),
        # slots that share memory are cleared into --cache-ram before they can be saved
        "--no-kv-unified",
        *("--cache-ram", str(settings.l1_gib * 1024)),
        *("--cache-type-k", settings.llama_cache_type_k),
        *("--cache-type-v", settings.llama_cache_type_v),
        # a V of a type of its own needs it, and files of the two ways differ
        *("--flash-attn", "on"),
        *("--slot-save-path", namespace_dir),
        *("--slots", "--metrics", "--no-ui", "--offline"),
        *settings.runner_extra_args,
    )


def keeper_words(settings: Settings, paths: HostPaths, namespace_dir: str) -> tuple[str, ...]:
    """What onhost/slots.py is told by whoever calls it."""
    return (
        *("--dir", namespace_dir, "--api", api_url(settings)),
        *("--record", f"{paths.run}/{FIRST}.json"),
    )


def keeper_argv(
    settings: Settings, paths: HostPaths, namespace_dir: str, *command: str
) -> tuple[str, ...]:
    words = keeper_words(settings, paths, namespace_dir)
    return (*script(paths, "slots"), *words, *command)


def ready_argv(settings: Settings, paths: HostPaths) -> tuple[str, ...]:
    """Asks no more than whether it answers: a prompt would take the place of one in a slot. The
    server has computed by itself before it says that it is ready (its warm-up)."""
    api = ("--api", api_url(settings), "--model", served_name(settings))
    return ("python3", f"{paths.bin}/ready.py", "--base", paths.base_dir, *api, "--health-only")


def server_service(
    settings: Settings, paths: HostPaths, namespace_dir: str, *, with_key: bool
) -> Service:
    return Service(
        name=FIRST,
        title="llama-server",
        argv=(
            f"{paths.current}/bin/{llama.PROGRAM}",
            *server_words(settings, paths, namespace_dir),
        ),
        env=environment(paths),
        secret_env={"LLAMA_API_KEY": api_key_path(paths)} if with_key else {},
        # whoever stops it, and however: what is in the slots is saved while it still answers
        before_stop=(
            keeper_argv(settings, paths, namespace_dir, "save", "--all", "--why", "stop"),
        ),
        needs_mount=drive_of(settings) or model_drive(settings),
        require=tier_marks(settings, namespace_dir),
        watch=(paths.current, f"{paths.etc}/model-digest"),
        writes=(paths.tier_dir,),
        ready=ready_argv(settings, paths),
        ready_s=settings.ready_timeout_s,
        stop_timeout_s=SAVE_S + 30,
        priority=20,
    )


def keeper_service(
    settings: Settings, paths: HostPaths, namespace_dir: str, *, with_key: bool
) -> Service:
    every = ("run", "--every", f"{settings.llama_save_interval_s:g}")
    return Service(
        name=KEEPER,
        title="keeper of the slots",
        argv=keeper_argv(settings, paths, namespace_dir, *every),
        env=plain_env(paths),
        secret_env={"LLAMA_API_KEY": api_key_path(paths)} if with_key else {},
        watch=(f"{paths.bin}/slots.py", f"{paths.bin}/slots_files.py"),
        needs_mount=drive_of(settings),
        require=tier_marks(settings, namespace_dir),
        writes=(paths.tier_dir,),
        after=(FIRST,),
        priority=25,
    )


def services(
    settings: Settings, paths: HostPaths, namespace_dir: str, *, with_key: bool
) -> tuple[Service, ...]:
    """All services of a host in the order of their start."""
    return (
        server_service(settings, paths, namespace_dir, with_key=with_key),
        keeper_service(settings, paths, namespace_dir, with_key=with_key),
        pruner_service(settings, paths, namespace_dir),
    )
