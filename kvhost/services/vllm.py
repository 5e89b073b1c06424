"""vLLM and its cache server, LMCache's: their environment, configuration and services. Pure."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from kvhost.paths import HostPaths
from kvhost.services import native
from kvhost.services import shared as kvhost_shared
from kvhost.services.runners import FIRST, config_name, ranks, runners_of
from kvhost.services.served import api_key_path, api_url, model_dir, served_name
from kvhost.services.service import Service, gpu_gate, shm_sweep
from kvhost.services.tier import drive_of, model_drive, pruner_service, tier_hooks, tier_marks
from kvhost.settings import Settings


def dtype(settings: Settings) -> str:
    """The dtype to ask vLLM for. Its "auto" turns float32 weights into bfloat16; the built-in
    model's answers are only stable enough to be compared in float32 (docs/model.md)."""
    if settings.dtype == "auto" and settings.model_source == "builtin":
        return "float32"
    return settings.dtype


def ready_argv(
    settings: Settings, paths: HostPaths, *, with_key: bool, name: str = FIRST
) -> tuple[str, ...]:
    """Command that asks whether a runner has answered; run as root, it counts its request."""
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


def services(
    settings: Settings, paths: HostPaths, namespace_dir: str, *, with_key: bool, gpus: int
) -> tuple[Service, ...]:
    """All services of a host in the order of their start."""
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
