"""The ABI check's own decisions; a module of three names stands in for torch where it is asked."""

from __future__ import annotations

import contextlib
import json
import mmap
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvhost.onhost import abi_check
from tests.report_tools import put

SCRIPT = Path(str(abi_check.__file__))


class Ones:
    """torch.ones(8, 8), which is asked for one sum."""

    def __matmul__(self, other: Ones) -> Ones:
        return self

    def sum(self) -> float:
        return 512.0


def torch_double(
    version: str, cuda: str | None, gpus: int = 0, capability: tuple[int, int] = (8, 9)
) -> Any:
    return SimpleNamespace(
        __version__=version,
        version=SimpleNamespace(cuda=cuda),
        ones=lambda *shape, device="cpu": Ones(),
        cuda=SimpleNamespace(
            is_available=lambda: gpus > 0,
            device_count=lambda: gpus,
            get_device_capability=lambda number: capability,
            get_device_name=lambda number: "NVIDIA GeForce RTX 4090",
        ),
    )


@pytest.mark.parametrize(
    "lock, version, cuda, said",
    [
        (None, "2.13.0+cpu", None, "2.13.0+cpu"),
        (13, "2.13.0+cu130", "13.0", "2.13.0+cu130"),
        (None, "2.13.0+cu130", "13.0", "is not a CPU build"),
        (13, "2.13.0+cpu", None, "is a CPU build, and a GPU is to be used"),  # vllm#28371
        (13, "2.11.0+cu129", "12.9", "built for CUDA 12.9, the lock for 13"),
    ],
)
def test_torch_must_be_the_build_that_the_lock_is_for(
    monkeypatch: pytest.MonkeyPatch, lock: int | None, version: str, cuda: str | None, said: str
) -> None:
    monkeypatch.setattr(abi_check, "CUDA", lock)
    monkeypatch.setitem(sys.modules, "torch", torch_double(version, cuda))
    got = abi_check.run_check("torch", abi_check.torch_build)
    assert (got["state"] == "ok") == (said == version)
    assert said in got["detail"]


@pytest.mark.parametrize("gpus, state", [(0, "failed"), (2, "ok")])
def test_a_gpu_must_be_seen(monkeypatch: pytest.MonkeyPatch, gpus: int, state: str) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch_double("2.13.0+cu130", "13.0", gpus))
    got = abi_check.run_check("GPU", abi_check.gpu_computes)
    assert got["state"] == state
    assert (got["detail"].count("RTX 4090 (8.9)") == 2) == (gpus == 2)


@pytest.mark.parametrize(
    "expected, chosen, gpus, said",
    [
        ([], None, 2, None),
        (["8.9", "8.9"], None, 2, None),
        (["?", "8.9"], None, 2, None),
        (["8.9", "8.9"], None, 1, "torch sees 1 GPUs, the host has 2"),
        (["8.9"], None, 2, "torch sees 2 GPUs, the host has 1"),
        (["8.6", "8.6"], None, 2, "expected capabilities 8.6, 8.6; torch sees"),
        (["8.6", "8.9"], None, 2, "expected capabilities 8.6, 8.9; torch sees"),
        (["8.6", "8.9"], "GPU-1b2c", 1, None),
        (["8.6", "8.9"], "GPU-1b2c,GPU-77aa", 1, "CUDA_VISIBLE_DEVICES is 'GPU-1b2c,GPU-77aa'"),
    ],
)
def test_the_gpus_are_those_that_the_host_has(
    monkeypatch: pytest.MonkeyPatch, expected: list[str], chosen: str | None, gpus: int,
    said: str | None,
) -> None:  # fmt: skip
    monkeypatch.setattr(abi_check, "GPUS", expected)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if chosen:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    monkeypatch.setitem(sys.modules, "torch", torch_double("2.13.0+cu130", "13.0", gpus))
    got = abi_check.run_check("GPU", abi_check.gpu_computes)
    assert (got["state"], (said or "RTX 4090") in got["detail"]) == (
        "failed" if said else "ok", True
    ), got  # fmt: skip


def test_nvcc_is_asked_where_the_engine_compiles_with_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def asked(capability: tuple[int, int], gpus: int = 1) -> tuple[str, str]:
        double = torch_double("2.13.0+cu130", "13.0", gpus, capability)
        monkeypatch.setitem(sys.modules, "torch", double)
        got = abi_check.run_check("nvcc", abi_check.nvcc)
        return got["state"], got["detail"]

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    assert asked((9, 0))[0] == "not applicable"
    assert asked((12, 0), gpus=0) == ("failed", "RuntimeError: torch sees no GPU")
    state, detail = asked((12, 0))
    assert (state, f"nor in {tmp_path}/cuda/bin" in detail) == ("failed", True)
    put(tmp_path / "cuda/bin/nvcc", "").chmod(0o755)
    assert asked((10, 0)) == ("ok", str(tmp_path / "cuda/bin/nvcc"))


@contextlib.contextmanager
def mapped(path: Path) -> Iterator[None]:
    """The file in this process's memory, as one that was loaded."""
    put(path, "x")
    with path.open("rb") as handle, mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ):
        yield


def test_a_second_cuda_runtime_that_is_installed_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(abi_check, "CUDA", 13)
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"purelib": str(tmp_path)})
    with mapped(tmp_path / "nvidia/cu13/lib/libcudart.so.13"):
        got = abi_check.run_check("CUDA runtime", abi_check.one_cuda_runtime)
        assert (got["state"], got["detail"]) == ("ok", "libcudart.so.13")
        put(tmp_path / "nvidia/cuda_runtime/lib/libcudart.so.12", "")
        got = abi_check.run_check("CUDA runtime", abi_check.one_cuda_runtime)
        said = "loaded: libcudart.so.13; installed: libcudart.so.12, libcudart.so.13; wanted: one"
        assert (got["state"], said in got["detail"]) == ("failed", True)
        (tmp_path / "nvidia/cuda_runtime/lib/libcudart.so.12").unlink()
        with mapped(tmp_path / "elsewhere/libcudart.so.12"):
            got = abi_check.run_check("CUDA runtime", abi_check.one_cuda_runtime)
            assert got["state"] == "failed"


def test_kernels_that_are_only_a_name_are_not_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """LMCache before 0.5.4 puts a module of this name there on every machine."""
    monkeypatch.setitem(sys.modules, "lmcache.cuda_ops", SimpleNamespace(__name__="lmcache.c_ops"))
    got = abi_check.run_check("lmcache.cuda_ops", abi_check.lmcache_cuda)
    assert (got["state"], "were not loaded" in got["detail"]) == ("failed", True)
    with mapped(tmp_path / "lmcache/c_ops.cpython-311-x86_64-linux-gnu.so"):
        assert abi_check.run_check("lmcache.cuda_ops", abi_check.lmcache_cuda)["state"] == "ok"


def test_without_a_cuda_runtime_none_is_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(abi_check, "CUDA", 13)
    monkeypatch.setitem(sys.modules, "torch", torch_double("2.13.0+cu130", "13.0"))
    got = abi_check.run_check("CUDA runtime", abi_check.one_cuda_runtime)
    assert (got["state"], "loaded: none; installed: none; wanted: one of 13" in got["detail"]) == (
        "failed",
        True,
    )


def test_a_compiler_and_the_headers_are_needed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "Python.h").write_text("")
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": str(tmp_path)})
    monkeypatch.setenv("CC", "/usr/bin/some-cc")
    assert abi_check.run_check("compiler", abi_check.compiler)["state"] == "ok"
    (tmp_path / "Python.h").unlink()
    assert abi_check.run_check("compiler", abi_check.compiler)["state"] == "failed"
    (tmp_path / "Python.h").write_text("")
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path))
    got = abi_check.run_check("compiler", abi_check.compiler)
    assert (got["state"], "compiler not found" in got["detail"]) == ("failed", True)


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    """In a Python without any engine, so that all that needs one must fail."""
    return subprocess.run(
        [sys.executable, "-I", "-S", str(SCRIPT), *argv], capture_output=True, text=True,
        check=False, env={"PATH": "/usr/bin:/bin"}, timeout=60,
    )  # fmt: skip


@pytest.mark.parametrize("cuda", [(), ("--cuda", "13")])
def test_every_line_is_asked_and_none_passes_without_an_engine(cuda: tuple[str, ...]) -> None:
    done = run("--accelerator", "cuda" if cuda else "cpu", *cuda)
    result = json.loads(done.stdout.splitlines()[-1])
    assert (done.returncode, result["ok"]) == (1, False)
    states = {row["name"]: row["state"] for row in result["checks"]}
    gpu = {name for name, _ in abi_check.GPU_CHECKS}
    assert set(states) == {name for name, _ in abi_check.CHECKS} | gpu | {"no silent fallback"}
    assert {states[name] for name in ("torch", "vllm", "lmcache")} == {"failed"}
    asked = {states[name] for name in gpu - {"compiler"}}
    assert asked == ({"failed"} if cuda else {"not applicable"})


def test_the_major_belongs_to_cuda_alone() -> None:
    for argv in (["--accelerator", "cuda"], ["--accelerator", "cpu", "--cuda", "13"]):
        done = run(*argv)
        assert (done.returncode, done.stdout) == (2, "")
        assert "--cuda is given with --accelerator cuda" in done.stderr
