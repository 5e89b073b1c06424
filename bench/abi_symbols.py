"""Do LMCache's (or vLLM's) compiled modules fit a torch? Judged from the wheels, without a GPU.

    python -m bench.abi_symbols --torch torch-2.13.0-….whl lmcache-0.5.6-….whl [vllm-….whl]

For each module it compares the symbols of torch's that it needs with those that torch's libraries
offer, and prints the CUDA runtime that it links to and the compute capabilities that it holds
machine code for. A symbol that is missing means that the module does not load; none missing means
that the loader has what it asks for by name, no more: what a symbol does may still differ.

Needs readelf (binutils) and the wheels, which are large (torch half a GB): not for CI. Downloads
nothing. Exit 0: nothing is missing; 1: something is; 2: it could not be judged.
"""

from __future__ import annotations

import argparse
import mmap
import re
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

#: names of torch's own symbols: C++ namespaces at, c10, torch, caffe2 (Itanium mangling puts the
#: length before the name), Python's bindings, and the stable C interface
TORCHS = re.compile(r"_Z.*(2at|3c10|5torch|6caffe2)|THP|torch_|aoti_torch_")
#: header of a CUDA fat binary, and kinds of its entries (as cuobjdump tells them)
FATBIN = struct.pack("<I", 0xBA55ED50)
PTX, MACHINE_CODE = 1, 2


@dataclass(frozen=True)
class Module:
    """A compiled module: names that it needs, the libraries it links to, what it was built for."""

    name: str
    needs: frozenset[str]
    libraries: tuple[str, ...]
    capabilities: tuple[str, ...]


def symbols(path: Path) -> tuple[frozenset[str], frozenset[str]]:
    """(undefined, defined) dynamic symbols, without versions; weak undefined ones left out."""
    undefined, defined = set(), set()
    for line in _readelf("--dyn-syms", path).splitlines():
        cells = line.split()
        if len(cells) < 8 or not cells[0].rstrip(":").isdigit():
            continue
        binding, section, name = cells[4], cells[6], cells[7].split("@")[0]
        if section != "UND":
            defined.add(name)
        elif binding == "GLOBAL":
            undefined.add(name)
    return frozenset(undefined), frozenset(defined)


def read_module(path: Path) -> Module:
    needed = re.findall(r"\(NEEDED\).*\[(.+?)\]", _readelf("--dynamic", path))
    return Module(path.name, symbols(path)[0], tuple(needed), tuple(capabilities(path)))


def capabilities(path: Path) -> list[str]:
    """Compute capabilities of machine code in the file's fat binaries: ["7.5", "8.0", …]."""
    found = {arch for kind, arch in _fat_entries(path) if kind == MACHINE_CODE}
    return [f"{arch // 10}.{arch % 10}" for arch in sorted(found)]


def _fat_entries(path: Path) -> Iterator[tuple[int, int]]:
    """(kind, architecture) of every entry; the header of each is plain, whatever its body is."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at = data.find(FATBIN)
        while at >= 0:
            _, version, header, size = struct.unpack_from("<IHHQ", data, at)
            if version != 1 or header != 16 or at + header + size > len(data):
                at = data.find(FATBIN, at + 4)  # those bytes by chance
                continue
            entry, end = at + header, at + header + size
            while entry + 64 <= end:
                kind, _, length, body = struct.unpack_from("<HHIQ", data, entry)
                if not 64 <= length <= 4096:
                    break
                yield kind, struct.unpack_from("<I", data, entry + 28)[0]
                entry += length + body
            at = data.find(FATBIN, end)


def _readelf(what: str, path: Path) -> str:
    done = subprocess.run(
        ["readelf", "--wide", what, str(path)], capture_output=True, text=True, check=True
    )
    return done.stdout


def unpack(wheel: Path, folder: Path, part: str = "") -> list[Path]:
    """The shared objects of a wheel, below ``part``, written to ``folder``."""
    out = []
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.startswith(part) and re.search(r"\.so(\.\d+)*$", name):
                out.append(Path(archive.extract(name, folder)))
    return out


def missing(module: Module, offered: frozenset[str]) -> list[str]:
    """Symbols of torch's that the module needs and this torch does not offer."""
    return sorted(name for name in module.needs - offered if TORCHS.match(name))


def judge(torch: Path, wheels: list[Path]) -> int:
    lacking = 0
    with tempfile.TemporaryDirectory() as scratch:
        libraries = unpack(torch, Path(scratch, "torch"), "torch/lib/")
        if not libraries:
            print(f"{torch.name} holds no torch/lib/*.so", file=sys.stderr)
            return 2
        offered = frozenset[str]().union(*(symbols(path)[1] for path in libraries))
        print(f"{torch.name}: {len(offered)} symbols")
        for wheel in wheels:
            print(wheel.name)
            paths = unpack(wheel, Path(scratch, wheel.name))
            modules = [read_module(path) for path in paths]
            # what one module of a wheel offers, another may need
            own = frozenset[str]().union(*(symbols(path)[1] for path in paths))
            for module in modules:
                lost = missing(module, offered | own)
                lacking += len(lost)
                asked = sum(1 for name in module.needs if TORCHS.match(name))
                cudart = [name for name in module.libraries if name.startswith("libcudart.")]
                print(
                    f"  {module.name}: {asked} symbols of torch's, {len(lost)} missing; "
                    f"{', '.join(cudart) or 'no CUDA runtime'}; "
                    f"kernels for {', '.join(module.capabilities) or 'no GPU'}"
                )
                for name in lost[:8]:
                    print(f"    missing: {name}")
    return 1 if lacking else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--torch", type=Path, required=True, help="torch's wheel")
    parser.add_argument("wheels", type=Path, nargs="+", help="wheels of LMCache and vLLM")
    args = parser.parse_args()
    try:
        return judge(args.torch, args.wheels)
    except (OSError, zipfile.BadZipFile, subprocess.CalledProcessError) as error:
        print(f"cannot be judged: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
