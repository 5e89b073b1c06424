"""bench/abi_symbols.py, on a file laid out as CUDA's fat binaries are and on a real library."""

from __future__ import annotations

import importlib.machinery
import shutil
import struct
import sys
import zipfile
from pathlib import Path

import pytest

from bench import abi_symbols

readelf = pytest.mark.skipif(shutil.which("readelf") is None, reason="needs readelf (binutils)")


def fat(*entries: tuple[int, int]) -> bytes:
    """One fat binary with an entry for each (kind, architecture)."""
    body = b""
    for kind, arch in entries:
        head = struct.pack("<HHIQ", kind, 0x101, 64, 8) + bytes(12) + struct.pack("<I", arch)
        body += head + bytes(64 - len(head)) + b"8 bytes!"
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def test_capabilities_are_those_of_machine_code(tmp_path: Path) -> None:
    file = tmp_path / "module.so"
    one = fat(
        (abi_symbols.MACHINE_CODE, 75), (abi_symbols.MACHINE_CODE, 120), (abi_symbols.PTX, 90)
    )
    file.write_bytes(b"x" * 40 + abi_symbols.FATBIN + b"by chance" + one + b"y" * 7
                     + fat((abi_symbols.MACHINE_CODE, 89)))  # fmt: skip
    assert abi_symbols.capabilities(file) == ["7.5", "8.9", "12.0"]
    file.write_bytes(b"no fat binary")
    assert abi_symbols.capabilities(file) == []


@pytest.mark.parametrize(
    "name, torchs",
    [
        ("_ZN3c104cuda29c10_cuda_check_implementationEiPKcS2_jb", True),
        ("_ZN3c104impl3cow23materialize_cow_storageERNS_11StorageImplE", True),
        ("_ZNK2at10TensorBase14const_data_ptrIiLi0EEEPKT_v", True),
        ("aoti_torch_get_sizes", True),
        ("THPVariableClass", True),
        ("cudaMemcpyAsync", False),
        ("_ZNSt6vectorIiSaIiEED1Ev", False),
        ("PyErr_SetString", False),
    ],
)
def test_what_counts_as_torchs(name: str, torchs: bool) -> None:
    module = abi_symbols.Module("m.so", frozenset({name}), (), ())
    assert abi_symbols.missing(module, frozenset()) == ([name] if torchs else [])
    assert abi_symbols.missing(module, frozenset({name})) == []


def extension() -> Path:
    """A compiled module of this Python."""
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    for place in sys.path:
        found = sorted(Path(place).glob(f"**/*{suffix}")) if Path(place).is_dir() else []
        if found:
            return found[0]
    raise AssertionError("this Python has no compiled module")


@readelf
def test_wheels_are_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    real = extension()
    needs, offers = abi_symbols.symbols(real)
    assert any(name.startswith("PyInit_") for name in offers)
    assert any(name.startswith("Py") for name in needs)
    torch, module = tmp_path / "torch.whl", tmp_path / "module.whl"
    with zipfile.ZipFile(torch, "w") as archive:
        archive.write(real, "torch/lib/libtorch.so")
    with zipfile.ZipFile(module, "w") as archive:
        archive.write(real, "lmcache/cuda_ops.so")
    assert abi_symbols.judge(torch, [module]) == 0
    assert (
        "cuda_ops.so: 0 symbols of torch's, 0 missing; no CUDA runtime" in capsys.readouterr().out
    )
    with zipfile.ZipFile(torch, "w") as archive:
        archive.writestr("torch/version.py", "")
    assert abi_symbols.judge(torch, [module]) == 2
