"""The services of a host, described once: supervisord's file and systemd's units come from this.

Pure functions of settings and paths. A service is started by onhost/launch.py from a JSON
description (`launch_spec`); what differs between supervisors is only who starts launch.py.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvhost.llama import facts as llama
from kvhost.onhost.model_builtin import DIGEST as BUILTIN_DIGEST
from kvhost.paths import HostPaths
from kvhost.schema.values import SENT, is_sent
from kvhost.services import native
from kvhost.services import shared as kvhost_shared
from kvhost.services.runners import FIRST, config_name, ranks, runners_of
from kvhost.settings import Settings

#: Files that the services share with the host scripts
TIER_MARKER = ".kvhost-tier"
NAMESPACE_FILE = ".kvhost-namespace.json"
#: seconds after a boot within which a driver has listed its GPUs; those of a large host take one
GPU_WAIT_S = 120


def unit_file(name: str) -> str:
    """Name of a service's unit; without systemd there is no such file."""
    return f"kvhost-{name}.service"


@dataclass(frozen=True)
class Service:
    """One service, for whichever supervisor runs it. Times in seconds."""

    name: str
    #: what it is, for people
    title: str
    argv: tuple[str, ...]
    env: dict[str, str]
    #: environment variable -> file that holds its secret value
    secret_env: dict[str, str] = field(default_factory=dict)
    #: "host:port" that must answer first
    wait_for: tuple[str, ...] = ()
    #: files whose change means that the service has to be restarted
    watch: tuple[str, ...] = ()
    #: (source, copy): the service reads the copy, made when it starts, so that what it was started
    #: with is what its record says, whatever is written to the source meanwhile
    copies: tuple[tuple[str, str], ...] = ()
    #: commands run before it; the argument "{unclean}" becomes --unclean after an unclean stop
    before: tuple[tuple[str, ...], ...] = ()
    #: commands run, while it still answers, before it is told to stop; they have its secrets
    before_stop: tuple[tuple[str, ...], ...] = ()
    #: mount point of the drive that it works on; it does not start while that is away
    needs_mount: str | None = None
    #: it does not start again sooner than this after its end
    min_gap_s: float = 0
    #: files that tell the right place (a mounted tier) from an empty directory; it waits for them
    require: tuple[str, ...] = ()
    #: where it writes, beside its home, log and run directories
    writes: tuple[str, ...] = ()
    #: command that ends well once it has answered, and how long that may take
    ready: tuple[str, ...] = ()
    ready_s: int = 0
    #: ports of loopback that only root and the service's user may open, where systemd runs it
    closed_ports: tuple[int, ...] = ()
    #: services that are started first, and are wanted
    after: tuple[str, ...] = ()
    stop_timeout_s: int = 30
    #: start order, low first
    priority: int = 100

    def launch_spec(self, paths: HostPaths) -> str:
        """What launch.py reads, as JSON. Holds no secret, only the names of files that do."""
        spec: dict[str, Any] = {
            "service": self.name,
            "argv": list(self.argv),
            "env": self.env,
            "secret_env": self.secret_env,
            "record": f"{paths.run}/{self.name}.json",
            "watch": [*self.watch, f"{paths.etc}/{unit_file(self.name)}"],
            "require": list(self.require),
            "log": f"{paths.log}/{self.name}.log",
            "wait_for": list(self.wait_for),
            "wait_s": 120,
            "before": [list(argv) for argv in self.before],
            **({"before_stop": list(map(list, self.before_stop))} if self.before_stop else {}),
            "copies": [list(pair) for pair in self.copies],
            "min_gap_s": self.min_gap_s,
            "stop_timeout_s": self.stop_timeout_s,
        }
        if self.needs_mount is not None:
            spec["drive"] = {"mount": self.needs_mount, "record": paths.drive}
        return json.dumps(spec, indent=1, sort_keys=True) + "\n"


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


def dtype(settings: Settings) -> str:
    """The dtype to ask vLLM for. Its "auto" turns float32 weights into bfloat16; the built-in
    model's answers are only stable enough to be compared in float32 (docs/model.md)."""
    if settings.dtype == "auto" and settings.model_source == "builtin":
        return "float32"
    return settings.dtype


def api_url(settings: Settings) -> str:
    """Base URL of vLLM as the host itself reaches it."""
    address = "127.0.0.1" if settings.api_host in ("0.0.0.0", "::") else settings.api_host
    return f"http://{f'[{address}]' if ':' in address else address}:{settings.api_port}"


def api_key_path(paths: HostPaths) -> str:
    return f"{paths.secrets}/api-key"


def ready_argv(
    settings: Settings, paths: HostPaths, *, with_key: bool, name: str = FIRST
) -> tuple[str, ...]:
    """Command that asks whether a runner has answered; run as root, it counts its request."""
    if settings.runner == "ollama":
        from kvhost.ollama import server  # it takes Service from here

        return server.ready_argv(settings, paths)
    if settings.runner == "llama_server":
        from kvhost.services import llama as services_llama  # it takes Service from here

        return services_llama.ready_argv(settings, paths)
    key = ("--key-file", api_key_path(paths)) if with_key else ()
    which = ("--runner", name) if name != FIRST else ()
    return (
        *(_asker(paths) if settings.native else cache_ready_argv(settings, paths)),
        *("--api", api_url(settings), "--model", served_name(settings), *key, *which),
    )


def cache_ready_argv(settings: Settings, paths: HostPaths) -> tuple[str, ...]:
    """The same for the cache server alone."""
    return (*_asker(paths), "--cache", f"http://127.0.0.1:{settings.cache_http_port}")


def _asker(paths: HostPaths) -> tuple[str, ...]:
    return ("python3", f"{paths.bin}/ready.py", "--base", paths.base_dir)


def service_env(settings: Settings, paths: HostPaths) -> dict[str, str]:
    """Environment of the services and of the ABI check (docs/engine.md says why each is here)."""
    return {
        "PATH": f"{paths.current}/bin:/usr/bin:/bin",
        "HOME": paths.home,
        "LC_ALL": "C.UTF-8",
        "TMPDIR": f"{paths.home}/tmp",
        "XDG_CACHE_HOME": f"{paths.home}/.cache",
        # unset, `import lmcache` silently degrades: numba has nowhere to cache
        "NUMBA_CACHE_DIR": f"{paths.home}/.cache/numba",
        "VLLM_CACHE_ROOT": f"{paths.home}/.cache/vllm",
        "HF_HOME": f"{paths.home}/.cache/huggingface",
        # the environment is root's and stays as it was built: bytecode goes elsewhere
        "PYTHONPYCACHEPREFIX": f"{paths.home}/.cache/pycache",
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "LMCACHE_TRACK_USAGE": "false",
        "LMCACHE_DISABLE_BANNER": "1",
        # a single host: no default route is needed
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "VLLM_CPU_KVCACHE_SPACE": str(settings.engine_kv_gib),
        # on a GPU it is compiled at the start, and without nvcc the engine dies (vllm#49497)
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        # else a request with logprobs is compiled for, and without g++ it ends the engine
        "TORCH_COMPILE_DISABLE": "1",
    }


def proof_env(settings: Settings, paths: HostPaths) -> dict[str, str]:
    """Environment of the check that proves an engine: that of the service that will run it."""
    if settings.runner == "llama_server":
        from kvhost.services import llama as services_llama  # it takes Service from here

        return services_llama.environment(paths)
    return service_env(settings, paths)


def runner_env(settings: Settings, paths: HostPaths) -> dict[str, str]:
    """Environment of vLLM, and of whoever reads its configuration: lib/ holds modules of kvhost."""
    # CUDA and vLLM take UUIDs here (vllm/platforms/cuda.py asks NVML by them)
    gpus = {"CUDA_VISIBLE_DEVICES": ",".join(settings.gpus)} if settings.gpus else {}
    # bound by itself, vLLM on a CPU asks for a NUMA node for each rank, and ends without
    ranked = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"} if ranks(settings) > 1 else {}
    return {**service_env(settings, paths), "PYTHONPATH": paths.lib, **gpus, **ranked}


def vllm_config(settings: Settings, paths: HostPaths, *, with_key: bool) -> dict[str, Any]:
    """vLLM's options, for its YAML configuration (templates/vllm.yaml.j2)."""
    # vLLM's own check of the key leaves paths open that generate text
    guard = {"middleware": ["kvhost_guard.Guard"]} if with_key else {}
    share, tensor = settings.gpu_memory_share, settings.tensor_parallel_size
    return {
        **guard,
        "model": model_dir(settings, paths),
        "served-model-name": [served_name(settings)],
        "host": settings.api_host,
        "port": settings.api_port,
        "max-model-len": settings.max_model_len,
        "dtype": dtype(settings),
        "kv-cache-dtype": settings.kv_cache_dtype,
        **({"tensor-parallel-size": tensor} if tensor > 1 else {}),
        **({"gpu-memory-utilization": share} if share is not None else {}),
        "enable-prompt-tokens-details": True,
        "enforce-eager": True,
        # without it vLLM kills its engine at SIGTERM, and a request that has not reached it hangs
        "shutdown-timeout": settings.drain_s,
        "disable-uvicorn-access-log": True,
        **({} if settings.native else {"kv-transfer-config": mp_transfer_config(settings)}),
    }


def mp_transfer_config(settings: Settings) -> dict[str, Any]:
    """How vLLM reaches the cache server. With vLLM's own tiering: kvhost/services/native.py."""
    return {
        "kv_connector": "LMCacheMPConnector",
        # LMCache's, with one repair
        "kv_connector_module_path": "kvhost_connector",
        "kv_role": "kv_both",
        # the default, "fail", turns a damaged file into a failed request
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "lmcache.mp.host": "tcp://127.0.0.1",
            "lmcache.mp.port": settings.cache_port,
            "lmcache.mp.mq_timeout": settings.mq_timeout_s,
            "lmcache.mp.heartbeat_interval": settings.heartbeat_s,
        },
    }


def l2_adapter(settings: Settings, namespace_dir: str) -> dict[str, Any]:
    """LMCache's description of the file tier. No cap here: none of its caps survives a restart."""
    adapter: dict[str, Any] = {"type": settings.l2_adapter, "base_path": namespace_dir}
    if settings.l2_adapter == "fs_native":
        adapter["num_workers"] = 4
    return adapter


def shm_name(paths: HostPaths) -> str:
    """Name of the cache server's shared memory, one an installation."""
    return "kvhost" + paths.base_dir.replace("/", "-")


def shm_sweep(paths: HostPaths, *patterns: str) -> tuple[str, ...]:
    """Command that removes what a killed service left in /dev/shm."""
    return (f"{paths.tools}/current/bin/python", f"{paths.bin}/shm_sweep.py", *patterns)


def drive_of(settings: Settings) -> str | None:
    return settings.resolved_drive_mount if settings.claims_a_drive else None


def model_drive(settings: Settings) -> str | None:
    """The drive's mount point, where the model lies on the drive."""
    mount = drive_of(settings)
    on_it = mount is not None and model_dir(settings, settings.paths).startswith(f"{mount}/")
    return mount if on_it else None


def tier_marks(settings: Settings, namespace_dir: str) -> tuple[str, ...]:
    """Files without which the tier is not the tier, but the directory below an absent mount."""
    return (f"{settings.paths.tier_dir}/{TIER_MARKER}", f"{namespace_dir}/{NAMESPACE_FILE}")


def tier_hooks(
    settings: Settings, paths: HostPaths, namespace_dir: str, writer: str
) -> tuple[tuple[str, ...], ...]:
    """Commands before the service starts that writes the tier: no other writes to it then."""
    sweep = (
        f"{paths.tools}/current/bin/python",
        f"{paths.bin}/pruner.py",
        "sweep",
        "--tier",
        settings.paths.tier_dir,
        "--current",
        namespace_dir.rpartition("/")[2],
        *("--record", f"{paths.run}/{writer}.json"),
        *("--status", pruner_status(paths)),
        "{unclean}",
    )
    # files that a test which is dead had moved aside; before the sweep, which judges what is there
    heal = (
        *(f"{paths.tools}/current/bin/python", f"{paths.bin}/evidence_aside.py"),
        *("heal", "--tier", settings.paths.tier_dir),
    )
    return heal, sweep


def cache_service(settings: Settings, paths: HostPaths, namespace_dir: str) -> Service:
    stale = shm_sweep(paths, f"lmcache_l1_pool_{shm_name(paths)}", "lmcache_kv_*")
    shared = kvhost_shared.adapter(settings, paths, namespace_dir)
    argv = (
        *(f"{paths.current}/bin/lmcache", "server"),
        *("--host", "127.0.0.1", "--port", str(settings.cache_port)),
        *("--http-host", "127.0.0.1", "--http-port", str(settings.cache_http_port)),
        *("--l1-size-gb", str(settings.l1_gib), "--l1-init-size-gb", str(settings.l1_gib)),
        *("--eviction-policy", "LRU", "--chunk-size", str(settings.chunk_size)),
        *("--max-workers", "4"),  # as measured (docs/l2-adapters.md)
        *("--supported-transfer-mode", "auto", "--shm-name", shm_name(paths)),
        # in this order: what both tiers hold comes from the host's own
        *("--l2-adapter", json.dumps(l2_adapter(settings, namespace_dir), sort_keys=True)),
        *(("--l2-adapter", json.dumps(shared, sort_keys=True)) if shared else ()),
    )
    return Service(
        name="cache",
        title="LMCache server",
        argv=argv,
        env={**service_env(settings, paths), **({"PYTHONPATH": paths.lib} if shared else {})},
        secret_env=kvhost_shared.secret_env(settings, paths),
        watch=(paths.current, *kvhost_shared.modules(settings, paths)),
        before=(stale, *tier_hooks(settings, paths, namespace_dir, "cache")),
        needs_mount=drive_of(settings),
        # back within a heartbeat, it would leave vLLM unregistered (LMCache#4642)
        min_gap_s=2 * settings.heartbeat_s + 1,
        require=tier_marks(settings, namespace_dir),
        writes=(settings.paths.tier_dir,),
        ready=cache_ready_argv(settings, paths),
        ready_s=120,
        closed_ports=(settings.cache_port, settings.cache_http_port),
        stop_timeout_s=60,
        priority=10,
    )


def gpu_gate(paths: HostPaths, gpus: int, uuids: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Command that waits for the GPUs which the engine needs; none without one."""
    if not gpus:
        return ()
    gate = (f"{paths.tools}/current/bin/python", f"{paths.bin}/gpu_gate.py")
    named = tuple(word for uuid in uuids for word in ("--uuid", uuid))
    return ((*gate, "--expect", str(gpus), *named, "--wait", str(GPU_WAIT_S)),)


def runner_service(
    settings: Settings, paths: HostPaths, *, with_key: bool, gpus: int = 0, name: str = FIRST
) -> Service:
    """One runner, of whose own settings (kvhost/services/runners.py) this is made."""
    config, copy = f"{paths.etc}/{config_name(name)}", f"{paths.run}/{config_name(name)}"
    return Service(
        name=name,
        title="vLLM" + name.removeprefix(FIRST).replace("-", " "),
        argv=(
            *(f"{paths.current}/bin/vllm", "serve", "--config", copy),
            *settings.runner_extra_args,
        ),
        env=runner_env(settings, paths),
        secret_env={"VLLM_API_KEY": api_key_path(paths)} if with_key else {},
        wait_for=(f"127.0.0.1:{settings.cache_port}",),
        copies=((config, copy),),
        # Python's names for shared memory and semaphores; both services run as one user
        needs_mount=model_drive(settings),
        before=(*gpu_gate(paths, gpus, settings.gpus), shm_sweep(paths, "psm_*", "sem.mp-*")),
        watch=(
            *(paths.current, config, f"{paths.etc}/model-digest"),
            f"{paths.lib}/kvhost_guard.py",
            f"{paths.lib}/kvhost_connector.py",
        ),
        after=("cache",),
        ready=ready_argv(settings, paths, with_key=with_key, name=name),
        ready_s=settings.ready_timeout_s,
        stop_timeout_s=settings.drain_s + 30,
        priority=20,
    )


def native_runner(
    settings: Settings, paths: HostPaths, namespace_dir: str, *, with_key: bool, gpus: int
) -> Service:
    """The runner that keeps its cache itself: it does for the tier what the cache server does."""
    runner = runner_service(settings, paths, with_key=with_key, gpus=gpus)
    words = native.transfer_words(settings, namespace_dir, cuda=bool(gpus))
    serve, extra = runner.argv[:4], runner.argv[4:]
    stale = shm_sweep(paths, native.SHM, f"lmcache_l1_pool_{shm_name(paths)}")
    return replace(
        runner,
        argv=(*serve, *words, *extra),
        wait_for=(),
        after=(),
        before=(*runner.before, stale, *tier_hooks(settings, paths, namespace_dir, FIRST)),
        watch=(*runner.watch, f"{paths.lib}/{native.MODULE}.py"),
        needs_mount=drive_of(settings),
        require=tier_marks(settings, namespace_dir),
        writes=(settings.paths.tier_dir,),
    )


def pruner_status(paths: HostPaths) -> str:
    """File that the pruner writes its status to, at every look."""
    return f"{paths.log}/pruner-status.json"


def pruner_service(settings: Settings, paths: HostPaths, namespace_dir: str) -> Service:
    gib, limit = 1 << 30, settings.limit_gib
    return Service(
        name="pruner",
        title="pruner of the tier",
        argv=(
            *(f"{paths.tools}/current/bin/python", f"{paths.bin}/pruner.py", "run"),
            *("--tier", settings.paths.tier_dir),
            *("--limit-bytes", "all" if limit is None else str(int(limit * gib))),
            *("--high", str(settings.cache_high_watermark)),
            *("--low", str(settings.cache_low_watermark)),
            *("--free-floor-bytes", str(int(settings.free_floor_gib * gib))),
            *("--interval", str(settings.pruner_interval_s)),
            *("--current", namespace_dir.rpartition("/")[2]),
            *("--status", pruner_status(paths)),
        ),
        env={"PATH": "/usr/bin:/bin", "HOME": paths.home, "LC_ALL": "C.UTF-8"},
        watch=(f"{paths.bin}/pruner.py", f"{paths.bin}/pruner_tier.py"),
        needs_mount=drive_of(settings),
        require=tier_marks(settings, namespace_dir),
        writes=(settings.paths.tier_dir,),
        priority=30,
    )


def services(
    settings: Settings, paths: HostPaths, namespace_dir: str, *, with_key: bool, gpus: int = 0
) -> tuple[Service, ...]:
    """All services of a host in the order of their start. ``gpus``: how many a runner needs.

    Another runner than vLLM has services of its own, in kvhost/services_<runner>.py."""
    if settings.runner == "llama_server":
        from kvhost.services import (
            llama as services_llama,  # it takes Service and the pruner from here
        )

        return services_llama.services(settings, paths, namespace_dir, with_key=with_key)
    if settings.native:
        return (
            native_runner(settings, paths, namespace_dir, with_key=with_key, gpus=gpus),
            pruner_service(settings, paths, namespace_dir),
        )
    return (
        cache_service(settings, paths, namespace_dir),
        *(
            runner_service(one.settings, paths, with_key=with_key, gpus=gpus, name=one.service)
            for one in runners_of(settings)
        ),
        pruner_service(settings, paths, namespace_dir),
    )
