"""What a host says about its drives: the typed form of what onhost/drive_probe.py prints.

Sizes are bytes. A drive that could not be looked at says so (`unreadable`, with the reason); it
never looks like a blank one.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, model_validator


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class Told(_Model):
    """What may be unreadable or not there. `data` is there if and only if `status` is "ok"."""

    status: Literal["ok", "absent", "unreadable"]
    why: str | None = None
    data: Any = None


class Health(_Model):
    """The SMART log of an NVMe drive. `critical_warning`: bits, 0 is healthy."""

    critical_warning: int
    temperature_c: int
    available_spare_percent: int
    spare_threshold_percent: int
    percentage_used: int
    bytes_written: int
    power_on_hours: int
    unsafe_shutdowns: int
    media_errors: int


class HealthPart(Told):
    data: Health | None = None


class Link(_Model):
    """A PCIe link: GT/s and lanes, now and at most."""

    address: str
    speed_gts: float | None
    max_speed_gts: float | None
    width: int
    max_width: int

    @property
    def is_slower(self) -> bool:
        now, most = self.speed_gts or 0, self.max_speed_gts or 0
        return now * self.width < most * self.max_width


class LinkPart(Told):
    data: Link | None = None


class Backing(_Model):
    """The file behind a loop device; `dev`: the kernel's number of its filesystem."""

    path: str
    dev: int
    inode: int


class Content(_Model):
    """What blkid reads of the drive (`name` is its own) or of one of its partitions."""

    name: str
    type: str | None
    label: str | None
    uuid: str | None
    partlabel: str | None
    partuuid: str | None


class Own(_Model):
    """What says that kvhost formatted the drive. `marker`: .kvhost-drive.json, where mounted.

    `encrypted` is None of a member of an array that is not running. `uuid` is the filesystem's, or
    that of the layer that lies directly on the partition.
    """

    partition: str
    filesystem: str | None
    encrypted: bool | None
    uuid: str | None
    mounted_at: list[str]
    marker: Told


class Device(_Model):
    """What a drive is, by the kernel's word.

    `path` and `maj_min` hold until the next boot, `diskseq` (None before Linux 5.15) until it is
    exchanged. `by_ids`: all links in /dev/disk/by-id, `by_id` the best of them. `backing`: of loop
    devices alone.
    """

    name: str
    path: str
    maj_min: str
    diskseq: int | None
    size_bytes: int
    transport: str
    model: str | None
    serial: str | None
    wwn: str | None
    by_id: str | None
    by_ids: list[str]
    backing: Backing | None
    logical_bytes: int
    physical_bytes: int
    discard_bytes: int
    rotational: bool
    removable: bool
    hidden: bool
    read_only: bool
    zoned: str
    partitions: list[str]
    contents: list[Content]
    kvhost: Own | None
    health: HealthPart
    pcie: LinkPart
    notes: list[str] = []


class Finding(_Model):
    """`kind`: one of ERASABLE or NEVER of onhost/drive_probe.py."""

    kind: str
    detail: str


class Drive(_Model):
    """One drive. With status "unreadable" the findings are not all that there is."""

    status: Literal["ok", "unreadable"]
    why: str | None
    device: Device | None
    findings: list[Finding]

    @model_validator(mode="after")
    def _device_when_ok(self) -> Drive:
        if self.status == "ok" and self.device is None:
            raise ValueError("a drive that was read, without what it is")
        return self

    def has(self, *kinds: str) -> bool:
        return any(finding.kind in kinds for finding in self.findings)


class MountPoint(_Model):
    """Where the drive is to be mounted.

    `real_path`: with every link on the way followed. `kind`: of what is there. `entries`: names in
    it, at most 20; of a mounted filesystem they are what is on it. `mounts`: "SOURCE (FS)" of what
    is mounted there, the visible one last; `filesystem`, `root` (the directory of the filesystem
    that is mounted) and `drives` (kernel names of the whole drives below it) are of that one.
    `fstab`: what lines of /etc/fstab that are not kvhost's mount there. `marker`:
    .kvhost-drive.json in it.
    """

    path: str
    real_path: str
    kind: Literal["none", "directory", "other"]
    entries: list[str]
    mounts: list[str]
    filesystem: str | None
    root: str = "/"
    drives: list[str]
    fstab: list[str]
    marker: Told


class MountPointPart(Told):
    data: MountPoint | None = None


class Drives(_Model):
    """All drives of a host. `machine_id`: machine-id(5), None where there is none.

    `journal`: what a run that formatted a drive and was cut off left (state/drive-apply.json).
    """

    machine_id: str | None
    drives: list[Drive]
    mount_point: MountPointPart
    journal: Told
