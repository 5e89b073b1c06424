#!/usr/bin/env python3
"""Proves that an engine environment really loads, as the user and in the environment of a service.

Run by the environment's own Python. A mismatch in this stack is seldom an error: it shows as a
log line, and the engine goes on without its compiled kernels. So each line here asks for the
thing itself. Prints one JSON object {"ok": bool, "checks": [{"name", "state", "detail"}]} as the
last line; state is ok, FAIL or n/a (n/a: there is nothing to check on this accelerator, which is
not the same as passed). Exit 0 when all are ok, else 1.
"""

# the engine is not there where types are checked
# mypy: disable-error-code="import-not-found"
from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import importlib
import importlib.metadata
import json
import os
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator

Check = Callable[[], str]
CHECKS: list[tuple[str, Check]] = []
#: only where a GPU is used
GPU_CHECKS: list[tuple[str, Check]] = []
#: major version of CUDA that the lock is for, None for the CPU; set by main()
CUDA: int | None = None


def check(name: str, where: list[tuple[str, Check]] = CHECKS) -> Callable[[Check], Check]:
    def register(function: Check) -> Check:
        where.append((name, function))
        return function

    return register


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

    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, "kvhost_abi_numba.py"), "w", encoding="utf-8") as handle:
            handle.write("def double(x):\n    return x + x\n")
        sys.path.insert(0, folder)
        try:
            double = njit(cache=True)(importlib.import_module("kvhost_abi_numba").double)
            if double(21) != 42:
                raise RuntimeError("numba computes wrongly")
        finally:
            sys.path.remove(folder)
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


@check("lmcache")
def lmcache_native() -> str:
    from lmcache import device_ops  # noqa: F401  (missing when LMCache degraded itself)

    for name in ("lmcache.lmcache_native", "lmcache.lmcache_fs"):
        importlib.import_module(name)
    version = importlib.metadata.version("lmcache")
    return f"{version}, lmcache_native and lmcache_fs load"


@check("lmcache server")
def lmcache_server() -> str:
    from lmcache.cli.main import main  # noqa: F401

    return "command line loads"


@check("MP connector")
def mp_connector() -> str:
    module = importlib.import_module("lmcache.integration.vllm.lmcache_mp_connector")
    return str(module.LMCacheMPConnector.__name__)


# What follows was written without a GPU at hand (docs/testing.md): only that it fails without one
# was seen.


@check("GPU", GPU_CHECKS)
def gpu_computes() -> str:
    import torch

    if not torch.cuda.is_available() or torch.cuda.device_count() < 1:
        raise RuntimeError("torch sees no GPU")
    found = []
    for number in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(number)
        found.append(f"{torch.cuda.get_device_name(number)} ({major}.{minor})")
        ones = torch.ones(8, 8, device=f"cuda:{number}")
        if float((ones @ ones).sum()) != 512.0:
            raise RuntimeError(f"GPU {number} multiplies wrongly")
    return ", ".join(found)


@check("CUDA runtime", GPU_CHECKS)
def one_cuda_runtime() -> str:
    # two majors in one process is what "libcudart.so.12 not found" ends in (vllm#36099)
    import torch  # noqa: F401

    with contextlib.suppress(ImportError):
        importlib.import_module("lmcache")
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        names = {line.split("/")[-1].strip() for line in maps if "/libcudart" in line}
    majors = {name.split(".so.")[1].split(".")[0] for name in names if ".so." in name}
    if majors != {str(CUDA)}:
        raise RuntimeError(f"loaded: {', '.join(sorted(names)) or 'none'}; wanted: one of {CUDA}")
    return ", ".join(sorted(names))


@check("lmcache.cuda_ops", GPU_CHECKS)
def lmcache_cuda() -> str:
    try:
        module = importlib.import_module("lmcache.cuda_ops")
    except ModuleNotFoundError:
        module = importlib.import_module("lmcache.c_ops")  # its name before 0.5.4
    return f"{module.__name__} loads"


@check("compiler", GPU_CHECKS)
def compiler() -> str:
    # Triton compiles its launchers at run time (vllm#27890: Python.h missing)
    header = os.path.join(sysconfig.get_paths()["include"], "Python.h")
    program = os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc")
    if program is None or not os.path.exists(header):
        raise RuntimeError(f"compiler {program or 'not found'}; {header} must exist too")
    return f"{program}, {header}"


@check("GPU store and load", GPU_CHECKS)
def gpu_store_and_load() -> str:
    # the copies that a store and a load are made of; the cache's whole path is the restart test's
    import torch

    there = torch.arange(1 << 16, dtype=torch.float32, device="cuda")
    host = torch.empty(1 << 16, dtype=torch.float32, pin_memory=True)
    host.copy_(there)
    back = torch.empty_like(there)
    back.copy_(host)
    torch.cuda.synchronize()
    if not bool((back == there).all()):
        raise RuntimeError("what came back from host memory is not what was stored")
    return "256 KiB to pinned memory and back"


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
            return {"name": name, "state": "ok", "detail": str(function())}
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever an import throws, SystemExit too, is the finding
        text = f"{type(error).__name__}: {error}"
        return {"name": name, "state": "FAIL", "detail": " ".join(text.split())[:300]}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--accelerator", choices=["cpu", "cuda"], required=True)
    parser.add_argument("--cuda", type=int, help="major version that the lock is for")
    args = parser.parse_args()
    if (args.accelerator == "cuda") != (args.cuda is not None):
        parser.error("--cuda is given with --accelerator cuda, and only then")
    global CUDA
    CUDA = args.cuda
    wanted = CHECKS + (GPU_CHECKS if CUDA is not None else [])
    with stderr_copy() as logged:
        results = [run_check(name, function) for name, function in wanted]
        seen = [text for text in DEGRADED if text in logged()]
    results.append(
        {
            "name": "no silent fallback",
            "state": "FAIL" if seen else "ok",
            "detail": "logged: " + "; ".join(seen) if seen else "none of the known log lines",
        }
    )
    for name, _ in GPU_CHECKS if CUDA is None else []:
        results.append({"name": name, "state": "n/a", "detail": "no GPU is used"})
    ok = all(entry["state"] != "FAIL" for entry in results)
    print(json.dumps({"ok": ok, "checks": results}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
