#!/usr/bin/env python3
"""Proves that an engine environment really loads, as the user and in the environment of a service.

Run by the environment's own Python. A mismatch in this stack is seldom an error: it shows as a
log line, and the engine goes on without its compiled kernels. So each line here asks for the
thing itself. Prints one JSON object {"ok": bool, "checks": [{"name", "state", "detail"}]} as the
last line; state is ok, failed or not applicable (there is nothing to check on this accelerator,
which is not the same as passed). Exit 0 when none failed, else 1.

As long as its list of checks, and one file: by hand, whichever environment is to be proven runs it
alone with its own Python.
"""

# the engine is not there where types are checked
# mypy: disable-error-code="import-not-found"
from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import glob
import importlib
import importlib.metadata
import json
import os
import select
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

Check = Callable[[], str]
CHECKS: list[tuple[str, Check]] = []
#: only where a GPU is used
GPU_CHECKS: list[tuple[str, Check]] = []
#: major version of CUDA that the lock is for, None for the CPU; set by main()
CUDA: int | None = None
#: compute capability of each GPU that the host is known to have, "?" for one that is not known
GPUS: list[str] = []
OK, FAILED, NOT_APPLICABLE = "ok", "failed", "not applicable"


class NotApplicable(Exception):
    """Why a check asks nothing of this GPU."""


def check(name: str, where: list[tuple[str, Check]] = CHECKS) -> Callable[[Check], Check]:
    def register(function: Check) -> Check:
        where.append((name, function))
        return function

    return register


@contextlib.contextmanager
def module_of(name: str, source: str) -> Iterator[Any]:
    """A module from a file: numba caches beside one, and Triton reads its source from it."""
    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, f"{name}.py"), "w", encoding="utf-8") as handle:
            handle.write(source)
        sys.path.insert(0, folder)
        try:
            yield importlib.import_module(name)
        finally:
            sys.path.remove(folder)


@check("writable places")
def writable_places() -> str:
    for variable in ("HOME", "NUMBA_CACHE_DIR", "VLLM_CACHE_ROOT", "TMPDIR"):
        folder = os.environ.get(variable)
        if not folder:
            raise RuntimeError(f"{variable} is not set")
        with tempfile.TemporaryFile(dir=folder):
            pass
    return "HOME, numba's and vLLM's caches, TMPDIR"


@check("libnuma")
def libnuma() -> str:
    # without it vLLM logs "Failed to import from vllm._C" and goes on without compiled ops
    ctypes.CDLL("libnuma.so.1")
    return "libnuma.so.1 loads"


@check("torch")
def torch_build() -> str:
    import torch

    if CUDA is None and torch.version.cuda is not None:
        raise RuntimeError(f"torch {torch.__version__} is not a CPU build")
    if CUDA is not None and torch.version.cuda is None:
        raise RuntimeError(f"torch {torch.__version__} is a CPU build, and a GPU is to be used")
    if CUDA is not None and int(torch.version.cuda.split(".")[0]) != CUDA:
        raise RuntimeError(f"torch is built for CUDA {torch.version.cuda}, the lock for {CUDA}")
    if float((torch.ones(8, 8) @ torch.ones(8, 8)).sum()) != 512.0:
        raise RuntimeError("torch multiplies wrongly")
    return str(torch.__version__)


@check("numba caches")
def numba_caches() -> str:
    # imported the way LMCache does it: a function that cannot be cached degrades LMCache to
    # "CLI-only mode", with only a warning
    from numba import njit

    with module_of("kvhost_abi_numba", "def double(x):\n    return x + x\n") as module:
        if njit(cache=True)(module.double)(21) != 42:
            raise RuntimeError("numba computes wrongly")
    return "in " + os.environ["NUMBA_CACHE_DIR"]


@check("vllm")
def vllm_version() -> str:
    import vllm

    named = importlib.metadata.version("vllm")
    if not named.startswith(vllm.__version__.split("+")[0]):
        raise RuntimeError(f"vllm {vllm.__version__}, but its metadata says {named}")
    return named


@check("vllm compiled ops")
def vllm_ops() -> str:
    import torch
    import vllm._custom_ops  # noqa: F401  (loads the extension that fits this CPU)
    from vllm.platforms import current_platform

    if not (current_platform.is_cpu() if CUDA is None else current_platform.is_cuda()):
        raise RuntimeError(f"vLLM chose the platform {current_platform.device_name!r}")
    current_platform.import_kernels()
    if not hasattr(torch.ops._C, "silu_and_mul"):
        raise RuntimeError("torch.ops._C.silu_and_mul is missing: compiled ops did not load")
    device = "cpu" if CUDA is None else "cuda"
    gate = torch.ones(1, 16, device=device)
    out = torch.empty(1, 8, device=device)
    torch.ops._C.silu_and_mul(out, gate)
    if not 0.7 < float(out[0, 0]) < 0.75:  # silu(1) = 0.7311
        raise RuntimeError(f"silu_and_mul computes wrongly: {out[0, 0]}")
    return f"{type(current_platform).__name__}, silu_and_mul ran"


#: LMCache's kernels for GPUs: since 0.5.4, and before
CUDA_OPS = ("cuda_ops", "c_ops")


@check("lmcache")
def lmcache_native() -> str:
    import lmcache

    # named by what is there: 0.5.3 has native_storage_ops where 0.5.6 has lmcache_native
    compiled = sorted(
        name.partition(".")[0]
        for folder in lmcache.__path__
        for name in os.listdir(folder)
        if name.endswith(".so")
    )
    wanted = [name for name in compiled if name not in CUDA_OPS]
    if "lmcache_fs" not in wanted or not any("native" in name for name in wanted):
        raise RuntimeError(
            f"compiled parts are missing; there are: {', '.join(compiled) or 'none'}"
        )
    for name in wanted:
        importlib.import_module(f"lmcache.{name}")
    # operations of this device, by their names in 0.5.6 and 0.5.3; gone when LMCache degraded
    if not hasattr(lmcache, "device_ops") and not hasattr(lmcache, "c_ops"):
        raise RuntimeError("LMCache found no operations for this device (CLI-only mode)")
    return f"{importlib.metadata.version('lmcache')}, {', '.join(wanted)} load"


@check("lmcache server")
def lmcache_server() -> str:
    from lmcache.cli.main import main  # noqa: F401

    return "command line loads"


@check("MP connector")
def mp_connector() -> str:
    module = importlib.import_module("lmcache.integration.vllm.lmcache_mp_connector")
    return str(module.LMCacheMPConnector.__name__)


@check("store and load")
def store_and_load() -> str:
    import torch

    told = []
    for kind in ("fs", "fs_native"):
        data = torch.arange(1 << 14, dtype=torch.float32)
        if not torch.equal(through_a_file(kind, data), data):
            raise RuntimeError(f"{kind}: what came back from the file is not what was stored")
        told.append(kind)
    return f"64 KiB through a file, by LMCache's adapters {' and '.join(told)}"


def through_a_file(kind: str, data: Any) -> Any:
    """What a second L2 adapter of LMCache's loads of the CPU tensor that a first one stored.

    The first is closed before: what is found then was found on the disk. Raises RuntimeError.
    """
    import torch
    from lmcache.v1.distributed.api import ObjectKey
    from lmcache.v1.distributed.internal_api import L1MemoryDesc
    from lmcache.v1.distributed.l2_adapters import create_l2_adapter
    from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
    from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

    def place(tensor: Any) -> Any:
        size = tensor.numel() * tensor.element_size()
        about = MemoryObjMetadata(
            shape=tensor.shape, dtype=tensor.dtype, address=tensor.data_ptr(), phy_size=size,
            fmt=MemoryFormat.KV_2LTD, ref_count=1,
        )  # fmt: skip
        return TensorMemoryObj(tensor, about, parent_allocator=None)

    def within(seconds: float, event: int, what: str) -> None:
        poll = select.poll()
        poll.register(event, select.POLLIN)
        if not poll.poll(seconds * 1000):
            raise RuntimeError(f"{kind}: {what} did not end within {seconds:.0f} s")

    both = torch.zeros(2, data.numel(), dtype=data.dtype)
    both[0].copy_(data)
    memory = L1MemoryDesc(
        ptr=both.data_ptr(), size=both.numel() * both.element_size(),
        align_bytes=both.element_size(),
    )  # fmt: skip
    key = ObjectKey(chunk_hash=ObjectKey.IntHash2Bytes(1), model_name="kvhost-abi", kv_rank=0)
    with tempfile.TemporaryDirectory() as folder:
        words = argparse.Namespace(l2_adapter=[json.dumps({"type": kind, "base_path": folder})])
        [config] = parse_args_to_l2_adapters_config(words).adapters
        first = create_l2_adapter(config, l1_memory_desc=memory)
        try:
            task = first.submit_store_task([key], [place(both[0])])
            within(60, first.get_store_event_fd(), "the store")
            if not first.pop_completed_store_tasks()[task].is_successful():
                raise RuntimeError(f"{kind}: the store failed")
        finally:
            first.close()
        second = create_l2_adapter(config, l1_memory_desc=memory)
        try:
            task = second.submit_lookup_and_lock_task([key], {})
            within(60, second.get_lookup_and_lock_event_fd(), "the lookup")
            found = second.query_lookup_and_lock_result(task)
            if found is None or not found.test(0):
                raise RuntimeError(f"{kind}: what was stored is not found by a second adapter")
            task = second.submit_load_task([key], [place(both[1])])
            within(60, second.get_load_event_fd(), "the load")
            loaded = second.query_load_result(task)
            second.submit_unlock([key])
            if loaded is None or not loaded.test(0):
                raise RuntimeError(f"{kind}: the load failed")
        finally:
            second.close()
    return both[1]


# What follows was written without a GPU at hand (docs/testing.md): only that it fails without one
# was seen.


@check("GPU", GPU_CHECKS)
def gpu_computes() -> str:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < 1:
        raise RuntimeError("torch sees no GPU")
    found, capabilities = [], []
    for number in range(count):
        capabilities.append("{}.{}".format(*torch.cuda.get_device_capability(number)))
        found.append(f"{torch.cuda.get_device_name(number)} ({capabilities[-1]})")
        ones = torch.ones(8, 8, device=f"cuda:{number}")
        if float((ones @ ones).sum()) != 512.0:
            raise RuntimeError(f"GPU {number} multiplies wrongly")
    told = ", ".join(found)
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if GPUS and chosen is None and count != len(GPUS):
        raise RuntimeError(f"torch sees {count} GPUs, the host has {len(GPUS)}: {told}")
    if chosen is not None and count != len([one for one in chosen.split(",") if one]):
        raise RuntimeError(f"torch sees {count} GPUs, CUDA_VISIBLE_DEVICES is {chosen!r}: {told}")
    spare = list(GPUS)
    for capability in capabilities:
        # a chip that the host's report does not know may be any
        match = next((one for one in (capability, "?") if one in spare), None)
        if GPUS and match is None:
            raise RuntimeError(f"expected capabilities {', '.join(GPUS)}; torch sees {told}")
        if match is not None:
            spare.remove(match)
    return told


@check("CUDA runtime", GPU_CHECKS)
def one_cuda_runtime() -> str:
    # two majors in one process is what "libcudart.so.12 not found" ends in (vllm#36099)
    for name in ("torch", "vllm._C", "lmcache", "lmcache.cuda_ops", "lmcache.c_ops"):
        with contextlib.suppress(ImportError):  # those have lines of their own
            importlib.import_module(name)
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        names = {line.split("/")[-1].strip() for line in maps if "/libcudart" in line}
    installed = {
        os.path.basename(path)
        for path in glob.glob(os.path.join(sysconfig.get_paths()["purelib"], "nvidia", "*", "lib",
                                           "libcudart.so.*"))
    }  # fmt: skip
    majors = {name.split(".so.")[1].split(".")[0] for name in names | installed if ".so." in name}
    if not names or majors != {str(CUDA)}:
        raise RuntimeError(
            f"loaded: {', '.join(sorted(names)) or 'none'}; installed: "
            f"{', '.join(sorted(installed)) or 'none'}; wanted: one of {CUDA}"
        )
    return ", ".join(sorted(names))


@check("lmcache.cuda_ops", GPU_CHECKS)
def lmcache_cuda() -> str:
    try:
        module = importlib.import_module("lmcache.cuda_ops")
    except ModuleNotFoundError:
        module = importlib.import_module("lmcache.c_ops")  # its name before 0.5.4
    # before 0.5.4 that name is a shim, whatever lies behind it: what counts is the compiled file
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        mapped = [f"lmcache/{name}." in line for line in maps for name in CUDA_OPS]
    if not any(mapped):
        raise RuntimeError(f"{module.__name__} is there, but its compiled kernels were not loaded")
    return f"{module.__name__} loads"


@check("compiler", GPU_CHECKS)
def compiler() -> str:
    # Triton compiles its launchers at run time (vllm#27890: Python.h missing)
    header = os.path.join(sysconfig.get_paths()["include"], "Python.h")
    program = os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc")
    if program is None or not os.path.exists(header):
        raise RuntimeError(f"compiler {program or 'not found'}; {header} must exist too")
    return f"{program}, {header}"


@check("nvcc", GPU_CHECKS)
def nvcc() -> str:
    # on Blackwell FlashInfer does the attention, and compiles it (vllm#49497)
    import torch

    majors = [
        torch.cuda.get_device_capability(number)[0] for number in range(torch.cuda.device_count())
    ]
    if not majors:
        raise RuntimeError("torch sees no GPU")
    if max(majors) < 10:
        raise NotApplicable("nothing is compiled by nvcc for this GPU")
    home = os.environ.get("CUDA_HOME") or "/usr/local/cuda"
    program = shutil.which("nvcc") or shutil.which(os.path.join(home, "bin", "nvcc"))
    if program is None:
        raise RuntimeError(f"not in PATH, nor in {home}/bin; FlashInfer compiles for this GPU")
    return program


TRITON = """
import triton
import triton.language as tl

@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    mask = place < n
    tl.store(out + place, tl.load(x + place, mask=mask) + tl.load(y + place, mask=mask), mask=mask)
"""


@check("Triton kernel", GPU_CHECKS)
def triton_kernel() -> str:
    import torch

    with module_of("kvhost_abi_triton", TRITON) as module:
        ones = torch.ones(100, device="cuda")
        out = torch.zeros_like(ones)
        module.add[(1,)](ones, ones, out, 100, BLOCK=128)
        torch.cuda.synchronize()
    if float(out.sum()) != 200.0:
        raise RuntimeError("a kernel that Triton compiled adds wrongly")
    return "compiled, and added 100 numbers"


@check("GPU store and load", GPU_CHECKS)
def gpu_store_and_load() -> str:
    # the copies that a store and a load are made of; the whole path is the restart test's
    import torch

    there = torch.arange(1 << 16, dtype=torch.float32, device="cuda")
    host = torch.empty(1 << 16, dtype=torch.float32, pin_memory=True)
    host.copy_(there)
    back = torch.empty_like(there)
    back.copy_(through_a_file("fs_native", host).pin_memory())
    torch.cuda.synchronize()
    if not bool((back == there).all()):
        raise RuntimeError("what came back to the GPU is not what was stored")
    return "256 KiB from the GPU to pinned memory, to a file, and back"


@contextlib.contextmanager
def stderr_copy() -> Iterator[Callable[[], str]]:
    """Gathers all that this process writes to file descriptor 2, compiled code too.

    Gives a function that returns it, and passes it on at the end. A crash of compiled code shows
    on the true stderr, with the check that it happened in.
    """
    kept = os.dup(2)
    try:
        with tempfile.TemporaryFile() as spool:
            faulthandler.enable(kept)
            os.dup2(spool.fileno(), 2)

            def text() -> str:
                spool.seek(0)
                return spool.read().decode(errors="replace")

            try:
                yield text
            finally:
                os.dup2(kept, 2)
                sys.stderr.write(text())
                sys.stderr.flush()
    finally:
        faulthandler.disable()
        os.close(kept)


DEGRADED = ("CLI-only mode", "Failed to import from vllm._C", "compiled extension not found")


def run_check(name: str, function: Check) -> dict[str, str]:
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return {"name": name, "state": OK, "detail": str(function())}
    except KeyboardInterrupt:
        raise
    except NotApplicable as why:
        return {"name": name, "state": NOT_APPLICABLE, "detail": str(why)}
    except BaseException as error:  # whatever an import throws, SystemExit too, is the finding
        text = f"{type(error).__name__}: {error}"
        return {"name": name, "state": FAILED, "detail": " ".join(text.split())[:300]}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--accelerator", choices=["cpu", "cuda"], required=True)
    parser.add_argument("--cuda", type=int, help="major version that the lock is for")
    parser.add_argument("--gpus", default="", help="capability of each GPU: 8.9,8.9; ? if unknown")
    args = parser.parse_args()
    if (args.accelerator == "cuda") != (args.cuda is not None):
        parser.error("--cuda is given with --accelerator cuda, and only then")
    global CUDA, GPUS
    CUDA, GPUS = args.cuda, [one for one in args.gpus.split(",") if one]
    wanted = CHECKS + (GPU_CHECKS if CUDA is not None else [])
    with stderr_copy() as logged:
        results = [run_check(name, function) for name, function in wanted]
        seen = [text for text in DEGRADED if text in logged()]
    results.append(
        {
            "name": "no silent fallback",
            "state": FAILED if seen else OK,
            "detail": "logged: " + "; ".join(seen) if seen else "none of the known log lines",
        }
    )
    for name, _ in GPU_CHECKS if CUDA is None else []:
        results.append({"name": name, "state": NOT_APPLICABLE, "detail": "no GPU is used"})
    ok = all(entry["state"] != FAILED for entry in results)
    print(json.dumps({"ok": ok, "checks": results}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
