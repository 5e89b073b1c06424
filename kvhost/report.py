"""What a host says about itself: the typed form of the JSON that onhost/report.py prints.

Sizes are bytes, times seconds since the epoch by the host's clock. A part that could not be read
says so (`unreadable`), so that it never looks like "nothing there". As long as that JSON: it is one
table of its parts, in their order.
"""

from __future__ import annotations

import json
from typing import Any, Generic, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from kvhost.driver.types import DriverFacts
from kvhost.drives.types import Drives
from kvhost.state_files import SHAPES, trouble

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)


class ReportError(ValueError):
    """What came from the host is not a report."""


class _Model(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", protected_namespaces=(), defer_build=True
    )


class Part(_Model, Generic[T]):
    """One part. `data` is there if and only if `status` is "ok"; `why` is there if it is not."""

    status: Literal["ok", "absent", "unreadable"]
    why: str | None = None
    data: T | None = None

    @model_validator(mode="after")
    def _data_when_ok(self) -> Part[T]:
        if (self.status == "ok") != (self.data is not None):
            raise ValueError(f"a part that is {self.status} with data {self.data!r:.60}")
        if self.status != "ok" and not self.why:
            raise ValueError(f"a part that is {self.status} without a reason")
        return self


class Os(_Model):
    """os-release(5)."""

    id: str
    version_id: str | None
    id_like: list[str]
    pretty: str


class Arch(_Model):
    machine: str
    kernel: str


class Pid1(_Model):
    """`systemd`: it is PID 1 and runs the system; `container`: the kind, None outside of one."""

    comm: str
    systemd: bool
    container: str | None


class Memory(_Model):
    """`cgroup_limit`, `cgroup_used` (without inactive page cache): of the tightest cgroup."""

    total: int
    available: int
    cgroup_limit: int | None
    cgroup_used: int | None


class ShmFile(_Model):
    name: str
    bytes: int
    uid: int


class Shm(_Model):
    """/dev/shm; `files`: those named as vLLM, LMCache and kvhost name theirs."""

    size: int
    free: int
    files: list[ShmFile]


class Cpus(_Model):
    """`count` by affinity; `quota` in CPUs, None without one; `flags`: those that matter here."""

    count: int
    quota: float | None
    flags: list[str]
    model: str | None


class Mount(_Model):
    mount_point: str
    fs: str
    dev: str
    source: str
    options: list[str]
    super_options: list[str]


class Disk(_Model):
    """The filesystem below `path`, seen from `ancestor`, its nearest existing directory.

    `real_path`: with every link on the way followed. `directory`: whether `ancestor` is one.
    `blocked_by`: the first directory above `path` that the service's user may not pass through.
    `inodes` is 0 where a filesystem counts none.
    """

    path: str
    real_path: str
    ancestor: str
    exists: bool
    directory: bool
    mount_point: str
    fs: str
    read_only: bool
    noexec: bool
    total: int
    free: int
    avail: int
    inodes: int
    inodes_free: int
    blocked_by: str | None


class DiskAt(_Model):
    path: str
    disk: Part[Disk]


class Account(_Model):
    name: str
    uid: int
    gid: int
    home: str
    shell: str


class Users(_Model):
    """`sudo`: whether it works without a password; None for root. `login_users`: all others."""

    name: str | None
    uid: int
    gid: int
    sudo: bool | None
    service_user: Account | None
    login_users: list[str]


class Python(_Model):
    """`usable_by_service`: the service's user (nobody, until it exists) can run it."""

    path: str
    version: str | None
    usable_by_service: bool
    blocked_by: str | None
    ensurepip: bool
    venv: bool
    error: str | None


class PciDevice(_Model):
    address: str
    device_class: str
    device: str


class NvidiaSmi(_Model):
    exit: int | None
    lines: list[str]


class Nvidia(_Model):
    pci: list[PciDevice]
    nodes: list[str]
    driver: str | None
    smi: NvidiaSmi | None


class Amd(_Model):
    pci: list[PciDevice]


class Gpu(_Model):
    nvidia: Nvidia
    amd: Amd


class Listener(_Model):
    """`pid` and `comm` are None where the process could not be found out."""

    address: str
    port: int
    uid: int
    pid: int | None
    comm: str | None


class Ports(_Model):
    wanted: list[int]
    listening: list[Listener]


class ModelFile(_Model):
    name: str
    bytes: int


class ModelWeights(_Model):
    """`dtypes`: bytes by the dtype on disk, "?" where it is not known; `missing`: files that the
    index names; `total_size`: bytes of all by the index."""

    dtypes: dict[str, int]
    missing: list[str]
    total_size: int | None


class ModelDir(_Model):
    """`closed`: files whose mode keeps the service's user out; `config`: config.json; `weights`: of
    its safetensors, absent of a .gguf file."""

    path: str
    files: list[ModelFile]
    closed: list[str]
    blocked_by: str | None
    config: Part[dict[str, Any]]
    weights: Part[ModelWeights]


class Base(_Model):
    """`owner` of base_dir: nobody when it is empty."""

    owner: Literal["kvhost", "foreign", "nobody"]
    entries: list[str]


class Current(_Model):
    target: str
    resolves: bool


class Built(_Model):
    """A directory that is finished when it has a marker; `why` it is not; `bytes` of models."""

    name: str
    complete: bool
    marker: dict[str, Any] | None
    why: str | None
    bytes: int | None


class Namespace(_Model):
    name: str
    metadata: Part[Any]
    files: int
    bytes: int
    newest_mtime: float | None


class Tier(_Model):
    namespaces: list[Namespace]
    foreign: list[str]

    @property
    def bytes(self) -> int:
        return sum(namespace.bytes for namespace in self.namespaces)


class Service(_Model):
    """run/NAME.json and its process: `pids` with descendants, memory that it holds."""

    name: str
    record: dict[str, Any]
    alive: bool
    pids: list[int]
    anon_bytes: int
    shmem_bytes: int


class RunLock(_Model):
    """state/run.lock and the seconds since it was last written, both by the host's clock."""

    content: dict[str, Any]
    age_s: float


class HostFile(_Model):
    """`mode` as four octal digits; `sha256` is None for secrets."""

    uid: int
    mode: str
    sha256: str | None


NOT_TOLD: Part[Any] = Part[Any](status="absent", why="the report does not tell of it")


class OwnUnit(_Model):
    """A unit of kvhost's names; `ours`: of this installation and in its place; `installation`:
    base_dir of another one that wrote it."""

    path: str
    ours: bool
    installation: str | None = None


class Kvhost(_Model):
    """`good`, `previous`: manifests of what last passed; `failed`: what was gone back from.

    `drive`: the drive that a run put into use and no release gave back. `last_run`: id of the last
    run that held the lock, "" where an older version left no name.
    """

    base: Part[Base]
    receipt: Part[Any]
    verified: Part[Any]
    drive: Part[Any] = NOT_TOLD
    good: Part[Any] = NOT_TOLD
    previous: Part[Any] = NOT_TOLD
    failed: Part[Any] = NOT_TOLD
    current: Part[Current]
    envs: Part[list[Built]]
    tools: Part[list[Built]]
    models: Part[list[Built]]
    tier: Part[Tier]
    services: Part[list[Service]]
    run_lock: Part[RunLock]
    last_run: Part[str] = NOT_TOLD
    files: Part[dict[str, HostFile]]
    units: Part[list[OwnUnit]]

    @field_validator(*SHAPES)
    @classmethod
    def _as_kvhost_writes_it(cls, part: Part[Any], info: ValidationInfo) -> Part[Any]:
        """What is not is unreadable: a plan reads these files by their keys."""
        why = trouble(str(info.field_name), part.data) if part.status == "ok" else None
        return part if why is None else Part[Any](status="unreadable", why=why)


class ForeignProcess(_Model):
    """An engine that this kvhost did not start; secrets in `argv` are masked. `installation`:
    base_dir of another kvhost on this host, that did."""

    pid: int
    comm: str
    argv: list[str]
    uid: int
    installation: str | None = None


class HfModel(_Model):
    name: str
    bytes: int


class HfCache(_Model):
    user: str
    path: str
    models: Part[list[HfModel]]


class Adoptable(_Model):
    processes: list[ForeignProcess]
    hf_caches: list[HfCache]
    units: list[str]


class SharedStore(_Model):
    """Whether the store of the shared tier answers from the host, and why not."""

    answers: bool
    why: str | None


class HostReport(_Model):
    """Everything that one run of onhost/report.py found out about a host."""

    kvhost_report: Literal[1]
    time_unix: float
    os: Part[Os]
    arch: Part[Arch]
    pid1: Part[Pid1]
    memory: Part[Memory]
    shm: Part[Shm]
    cpus: Part[Cpus]
    mounts: Part[list[Mount]]
    disks: Part[list[DiskAt]]
    users: Part[Users]
    pythons: Part[list[Python]]
    gpu: Part[Gpu]
    ports: Part[Ports]
    packages: Part[dict[str, str]]
    kvhost: Part[Kvhost]
    model: Part[ModelDir]
    adoptable: Part[Adoptable]
    #: NVIDIA's GPUs, and the driver
    driver: Part[DriverFacts] = Part[DriverFacts](status="absent", why="not asked for")
    #: looked at only where a drive is claimed, or asked for
    drives: Part[Drives] = Part[Drives](status="absent", why="not asked for")
    #: the store of the shared tier, as the host reaches it
    shared: Part[SharedStore] = Part[SharedStore](status="absent", why="not asked for")

    def disk(self, path: str) -> Part[Disk]:
        """The filesystem at a path that was asked for; unreadable when it was not asked for."""
        if self.disks.data is None:
            return Part[Disk](status="unreadable", why=self.disks.why)
        for row in self.disks.data:
            if row.path == path:
                return row.disk
        return Part[Disk](status="unreadable", why=f"the report does not tell of {path}")


def parse_report(text: str) -> HostReport:
    """The report in what a host printed.

    Raises ReportError; where something else than a report came, it quotes the first line of it.
    """
    return _parsed(text, HostReport, "report", "kvhost_report")


def parse_drives(text: str) -> Drives:
    """The drives in what onhost/report_drives.py printed. Raises ReportError as parse_report."""
    return _parsed(text, Drives, "report of drives", "drives")


def _parsed(text: str, kind: type[M], name: str, key: str) -> M:
    lines = text.strip().splitlines()
    if not lines:
        raise ReportError(f"the host printed nothing where its {name} was expected")
    first = f"the first line that came is: {lines[0][:200]!r}"
    try:
        data = json.loads(text)
    except ValueError as why:
        raise ReportError(f"what the host printed is not a {name} ({why}); {first}") from None
    if not isinstance(data, dict) or key not in data:
        raise ReportError(f"what the host printed is JSON but not a {name}; {first}")
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        wrong = [".".join(map(str, e["loc"])) + f": {e['msg']}" for e in error.errors()[:5]]
        raise ReportError(f"the host's {name} is not as expected: " + "; ".join(wrong)) from None
