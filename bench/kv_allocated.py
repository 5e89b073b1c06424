"""What the installed vLLM allocates as KV cache, architecture by architecture.

Run by the engine environment's Python, on its CPU build:

    ENV/bin/python bench/kv_allocated.py --out tests/fixtures/sizing/engine.json \\
        tests/fixtures/sizing/tiny.json

The input maps a name to a config.json of a small model; the weights are random ("dummy"). Each is
started for real (way "started": the tensors that hold the KV cache are measured); where the CPU
build cannot run the architecture, its layers are built without memory and asked for their own
specification of the cache (way "specification"). What fits neither is written down with the reason.
"""

# the engine is not there where types are checked
# mypy: disable-error-code="import-not-found"
from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

#: room for the KV cache of each model, in bytes
ROOM = 64 << 20
CONTEXT = 512
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "OMP_NUM_THREADS": "1",
}


def arguments(folder: str, kv_dtype: str) -> dict[str, Any]:
    """For vLLM: as little as it takes to come to the KV cache."""
    return {
        "model": folder,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": CONTEXT,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 2048,
        "kv_cache_memory_bytes": ROOM,
        "kv_cache_dtype": kv_dtype,
        "dtype": "bfloat16",
        "disable_log_stats": True,
        "enable_prefix_caching": True,
    }


def started(folder: str, kv_dtype: str) -> dict[str, Any]:
    """The engine, started; its specification, its blocks, and the bytes of the tensors it made."""
    from vllm import LLM

    llm = LLM(**arguments(folder, kv_dtype))
    core = llm.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    storages = {
        (storage := tensor.untyped_storage()).data_ptr(): storage.nbytes()
        for tensor in tensors(runner.kv_caches)
    }
    config = core.scheduler.kv_cache_manager.kv_cache_config
    answer = layers(runner.get_kv_cache_spec())
    return {
        **answer,
        "way": "started",
        "blocks": config.num_blocks,
        "groups": [len(group.layer_names) for group in config.kv_cache_groups],
        "allocated_bytes": sum(storages.values()),
    }


def tensors(found: Any) -> list[Any]:
    """All tensors in nested lists (a state has several)."""
    if isinstance(found, list | tuple):
        return [tensor for one in found for tensor in tensors(one)]
    return [found]


def specified(folder: str, kv_dtype: str) -> dict[str, Any]:
    """The engine's own specification of the cache, from layers that are built without memory."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

    config = EngineArgs(**arguments(folder, kv_dtype)).create_engine_config()
    with set_current_vllm_config(config), tempfile.NamedTemporaryFile() as rendezvous:
        init_distributed_environment(1, 0, f"file://{rendezvous.name}", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("meta"):
            initialize_model(vllm_config=config)
        if config.cache_config.mamba_block_size is None:
            config.cache_config.mamba_block_size = CONTEXT
        specs = get_kv_cache_spec(config)
        return {**layers(specs), **planned(config, specs), "way": "specification"}


def planned(config: Any, specs: dict[str, Any]) -> dict[str, Any]:
    """Blocks, groups and bytes that the engine plans for ROOM; {} where it pads pages at a start
    only (states beside attention)."""
    from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
    from vllm.v1.worker.worker_base import (
        get_current_attn_backends,
        get_supported_kv_cache_layouts,
    )

    try:
        backends = get_current_attn_backends(config)
        names = [layout.name for layout in get_supported_kv_cache_layouts(backends)]
        resolve_kv_cache_layout(config, [names], list(specs.values()))
        (plan,) = get_kv_cache_configs(config, [dict(specs)], [ROOM])
    except Exception:  # of any kind: what vLLM raises is its answer
        traceback.print_exc()
        return {}
    return {
        "blocks": plan.num_blocks,
        "groups": [len(group.layer_names) for group in plan.kv_cache_groups],
        "planned_bytes": max(tensor.size for tensor in plan.kv_cache_tensors),
    }


def layers(specs: dict[str, Any]) -> dict[str, Any]:
    """One entry a kind of layer: bytes of a page with and without padding, tokens in it."""
    kinds: dict[str, dict[str, Any]] = {}
    for spec in specs.values():
        entry = {
            "kind": type(spec).__name__,
            "block_tokens": spec.block_size,
            "page_bytes": getattr(spec, "real_page_size_bytes", spec.page_size_bytes),
            "padded_bytes": spec.page_size_bytes,
            "window": getattr(spec, "sliding_window", None)
            or getattr(spec, "attention_chunk_size", None),
            "layers": 0,
        }
        kinds.setdefault(json.dumps(entry), entry)["layers"] += 1
    return {"layers": list(kinds.values())}


def in_child(work: Any, *args: Any) -> dict[str, Any]:
    """The answer of ``work`` in a forked process: vLLM keeps state that a second start trips on."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        os.dup2(2, 1)
        try:
            answer = work(*args)
        except BaseException as error:  # of any kind: what vLLM raises is its answer
            traceback.print_exc()
            answer = {"why": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
        os.write(write, json.dumps(answer).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        told = pipe.read()
    os.waitpid(child, 0)
    return json.loads(told) if told else {"why": "the process ended without an answer"}


def measure(config: dict[str, Any], kv_dtype: str, *, start: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        answer = {"why": "not tried"}
        if start:
            answer = in_child(started, folder, kv_dtype)
        if "why" not in answer:
            return answer
        other = in_child(specified, folder, kv_dtype)
        if "why" in other:
            return {"way": "none", "why": other["why"], "not_started": answer["why"]}
        return {**other, "not_started": answer["why"]}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", type=Path, help="JSON: name -> {config, kv_dtype}")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", help="these names alone; others in --out stay")
    parser.add_argument("--no-start", action="store_true", help="ask for specifications alone")
    options = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    import vllm  # noqa: F401  once, before the forks

    known = json.loads(options.out.read_text())["models"] if options.out.exists() else {}
    import torch

    # vllm/platforms/cpu.py: where it has these instructions, "auto" becomes float32
    recurrent = "float32" if torch.cpu._is_avx512_bf16_supported() else "auto"
    head = {"vllm": importlib.metadata.version("vllm"), "room_bytes": ROOM, "dtype": "bfloat16"}
    head["recurrent_dtype"] = recurrent
    for name, config in json.loads(options.models.read_text()).items():
        if options.only and name not in options.only:
            continue
        kv_dtype = config.pop("kvhost_kv_dtype", "auto")
        before = time.monotonic()
        known[name] = measure(config, kv_dtype, start=not options.no_start)
        took = time.monotonic() - before
        print(f"{name}: {known[name]['way']} {took:.0f} s", file=sys.stderr, flush=True)
        text = json.dumps({**head, "models": dict(sorted(known.items()))}, indent=1)
        options.out.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
