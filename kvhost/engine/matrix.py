"""The matrix of versions (locks/matrix.yaml): what is installed together, what is known of each.

Pure, but for `load_matrix`, which reads the file. What is not in the matrix is never installed:
LMCache declares a bare torch, so that a resolver's yes proves nothing, and a mismatch shows only as
a line in a log (vllm-project/vllm#53424).
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

_VERSION = r"\d+(\.\d+)+"
_Version = Annotated[str, Field(pattern=f"^{_VERSION}$")]
_Capability = Annotated[str, Field(pattern=r"^\d+\.\d$")]
_Text = Annotated[str, Field(min_length=1)]
#: a pair as `engine_lock` may name it: VLLM+LMCACHE
PAIR = re.compile(rf"({_VERSION})\+({_VERSION})")


class LockError(Exception):
    """A lock is missing, or does not fit what was asked for. The message says what does."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


class MatrixRun(_Model):
    """A command that was really run with a lock: on what, when, and what came of it."""

    host: _Text
    command: _Text
    when: datetime.date
    commit: Annotated[str, Field(pattern="^[0-9a-f]{7,40}$")]
    result: _Text


def state_of(runs: Sequence[MatrixRun]) -> str:
    """What was run with a lock, in words."""
    if not runs:
        return "resolved, never run"
    last = max(runs, key=lambda run: run.when)
    return f"run {last.when:%Y-%m-%d} on {last.host}: {last.result}"


class LockInfo(_Model):
    """One lock: versions that fit together, on one machine (`uname -m`).

    `cuda`: its major, None for the CPU. `driver_least`, `driver_best`: branches of NVIDIA's driver.
    `capabilities`: compute capabilities that the kernels hold machine code for. Sizes are bytes.
    `third_party`: who built the engine, when it was not its maintainers.
    """

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")]
    vllm: _Version
    lmcache: _Version
    torch: Annotated[str, Field(pattern=rf"^{_VERSION}(\+cpu)?$")]
    cuda: Annotated[int, Field(ge=12)] | None
    machine: Annotated[str, Field(pattern="^(x86_64|aarch64)$")]
    pythons: Annotated[tuple[Annotated[str, Field(pattern=r"^3\.\d+$")], ...], Field(min_length=1)]
    driver_least: int | None
    driver_best: int | None
    capabilities: tuple[_Capability, ...]
    download_bytes: Annotated[int, Field(gt=0)]
    disk_bytes: Annotated[int, Field(gt=0)]
    third_party: str | None
    runs: tuple[MatrixRun, ...]

    @model_validator(mode="after")
    def _of_one_kind(self) -> LockInfo:
        gpu = (bool(self.driver_least), bool(self.driver_best), bool(self.capabilities))
        if gpu != (self.cuda is not None,) * 3:
            raise ValueError(
                "driver_least, driver_best and capabilities are given with cuda, and only then"
            )
        if ("+cpu" in self.torch) != (self.cuda is None):
            raise ValueError(f"torch {self.torch} with cuda {self.cuda}")
        if (self.driver_least or 0) > (self.driver_best or 0):
            raise ValueError("driver_best is below driver_least")
        return self

    @property
    def accelerator(self) -> str:
        return "cpu" if self.cuda is None else "cuda"

    @property
    def pair(self) -> str:
        """The pair as `engine_lock` names it."""
        return f"{self.vllm}+{self.lmcache}"

    @property
    def state(self) -> str:
        """What was run with it, in words: never more than that."""
        return state_of(self.runs)

    def runs_on(self, capability: str) -> bool:
        """Whether its kernels hold machine code for a GPU of this compute capability ("8.9").

        Machine code of one major runs on every later minor of it, never on another major
        (docs.nvidia.com/cuda/cuda-c-programming-guide, "Binary Compatibility").
        """
        major, minor = _numbers(capability)
        built = [_numbers(text) for text in self.capabilities]
        return any(one == major and other <= minor for one, other in built)


class ProgramInfo(_Model):
    """One lock of a runner that is one program, no pair of vLLM and LMCache: for CPUs, in this
    version. Its requirements lie in one file for every Python; `build`: how long it takes to
    build it on the host. What else is here is as in LockInfo.
    """

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")]
    runner: Literal["llama_server", "ollama"]
    title: _Text
    version: _Text
    machine: Annotated[str, Field(pattern="^(x86_64|aarch64)$")]
    pythons: Annotated[tuple[Annotated[str, Field(pattern=r"^3\.\d+$")], ...], Field(min_length=1)]
    download_bytes: Annotated[int, Field(gt=0)]
    disk_bytes: Annotated[int, Field(gt=0)]
    build: _Text | None
    third_party: str | None
    runs: tuple[MatrixRun, ...]

    @property
    def cuda(self) -> None:
        return None

    @property
    def accelerator(self) -> str:
        return "cpu"

    @property
    def state(self) -> str:
        return state_of(self.runs)


class Absent(_Model):
    """A version of vLLM that is not in the matrix, and why."""

    vllm: _Version
    why: _Text


class Matrix(_Model):
    """All locks, by name, those of other runners, and what is known of pairs that are not there."""

    locks: Annotated[dict[str, LockInfo], Field(min_length=1)]
    programs: dict[str, ProgramInfo]
    absent: tuple[Absent, ...]

    @model_validator(mode="after")
    def _no_two_alike(self) -> Matrix:
        seen: set[tuple[str, str, str]] = set()
        for one in self.locks.values():
            what = (one.pair, one.machine, one.accelerator)
            if what in seen:
                raise ValueError(f"{one.name}: there is another lock of {' '.join(what)}")
            seen.add(what)
        listed = {one.vllm for one in self.locks.values()}
        both = [one.vllm for one in self.absent if one.vllm in listed]
        if both:
            raise ValueError(f"absent and there: vLLM {', '.join(both)}")
        if twice := sorted(set(self.locks) & set(self.programs)):
            raise ValueError(f"two locks are called {', '.join(twice)}")
        return self

    def fitting(self, machine: str, accelerator: str) -> list[LockInfo]:
        """Locks for such a host, the newest vLLM first."""
        rows = [
            one
            for one in self.locks.values()
            if one.machine == machine and one.accelerator == accelerator
        ]
        return sorted(rows, key=lambda one: (_numbers(one.vllm), _numbers(one.lmcache)))[::-1]

    def nearest(self, vllm: str, machine: str, accelerator: str) -> LockInfo | None:
        """The newest lock for such a host that is not newer than this vLLM, else the oldest."""
        rows = self.fitting(machine, accelerator)
        older = [one for one in rows if _numbers(one.vllm) <= _numbers(vllm)]
        return older[0] if older else rows[-1] if rows else None

    def why_absent(self, vllm: str) -> str | None:
        return next((one.why for one in self.absent if one.vllm == vllm), None)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def load_matrix(folder: Path) -> Matrix:
    """The matrix of a folder of locks. Raises LockError that names every mistake in it."""
    path = folder / "matrix.yaml"
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
        named = {
            kind: {name: {**entry, "name": name} for name, entry in raw[kind].items()}
            for kind in ("locks", "programs")
        }
        return Matrix.model_validate({**raw, **named})
    except ValidationError as error:
        wrong = [".".join(map(str, e["loc"])) + f": {e['msg']}" for e in error.errors()]
        raise LockError(f"{path} is not usable: {'; '.join(wrong)}") from None
    except (OSError, yaml.YAMLError, TypeError, KeyError, AttributeError) as error:
        raise LockError(f"{path} is not usable: {error!r}") from error
