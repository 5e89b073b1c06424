"""What may stand in fleet.yaml. Addresses, groups, roles, and secrets by reference alone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

from kvhost.schema import values as _values
from kvhost.schema.problems import Refusal

#: a group becomes a name of Python in pyinfra's inventory, and group_data/GROUP.py its settings
_GROUP = re.compile(r"[a-z][a-z0-9_]{0,40}")
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,60}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ADDRESS = re.compile(r"[A-Za-z0-9_.:][A-Za-z0-9_.:%-]{0,252}")  # ssh takes -x for an option
_HOP = re.compile(r"(?:\[([0-9A-Fa-f:]+)\]|([A-Za-z0-9_.][A-Za-z0-9_.-]*))(?::([0-9]{1,5}))?")
_LOGIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@-]{0,127}")
#: names that pyinfra gives to groups itself, or that kvhost gives by role
_TAKEN = frozenset({"all", "fleet", "home", "vm", "pod"})
#: below it a pod keeps everything
VOLUME_BASE = "kvhost"
#: name and address of the machine that kvhost is started on; nothing connects to it
LOCAL = "@local"
CONNECTING = ("user", "port", "key", "jump", "password", "sudo_password", "transfer", "host_key")

Role = Literal["home", "vm", "pod"]


def address_like(value: str) -> bool:
    return _ADDRESS.fullmatch(value) is not None


def user_like(value: str) -> bool:
    return _LOGIN.fullmatch(value) is not None


def group_name(value: str) -> str:
    if value in _TAKEN:
        raise Refusal("is a name that kvhost gives itself", "another name")
    if not _GROUP.fullmatch(value):
        raise Refusal("must be small letters, digits and _, beginning with a letter", "gpu_a")
    return value


def host_name(value: str) -> str:
    if value == LOCAL:
        return value
    if not _HOST.fullmatch(value):
        raise Refusal("must be letters, digits and . _ -, at most 61", "gpu-1")
    if value in _TAKEN:
        raise Refusal("is the name of a group or a role", "gpu-1")
    return value


def _address(value: str) -> str:
    if value == LOCAL:
        return value
    if "@" in value or "://" in value or not address_like(value):
        raise Refusal("must be a name or an IP address alone; user and port have keys of their own",
                      "203.0.113.7")  # fmt: skip
    return value


def _user(value: str) -> str:
    if not user_like(value):
        raise Refusal("is no login", "root")
    return value


def jump_parts(value: str) -> list[tuple[str | None, str, int]]:
    """[USER@]HOST[:PORT][,…] -> [(user, host, port)]. Raises Refusal."""
    hops = []
    for hop in value.split(","):
        user, at, rest = hop.strip().rpartition("@")
        found = _HOP.fullmatch(rest)
        if not found or (at and not user_like(user)) or not 0 < int(found[3] or 22) < 65536:
            raise Refusal("must be [USER@]HOST[:PORT], several with commas", "me@bastion:22")
        hops.append((user or None, found[1] or found[2], int(found[3] or 22)))
    return hops


def _jump(value: str) -> str:
    jump_parts(value)
    return value


def _variable(value: str) -> str:
    if not _VARIABLE.fullmatch(value):
        raise Refusal("is no name of a variable of the environment", "GPU1_SUDO")
    return value


def _no_secret_here(value: Any) -> Any:
    if not isinstance(value, dict):
        raise Refusal(
            "a secret never stands in this file (the value is not shown)",
            "{env: NAME} or {file: secrets/NAME}",
        )
    return value


def _volume(value: str) -> str:
    _values.host_path(value)
    if len(PurePosixPath(value).parts) < 2:
        raise Refusal("is the whole disk", "/workspace")
    return value


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, hide_input_in_errors=True)


class SecretRef(_Strict):
    """Where a secret is read on the controller: a variable, or a file that only its owner reads."""

    env: Annotated[str, AfterValidator(_variable)] | None = None
    file: Annotated[str, AfterValidator(_values.controller_path)] | None = None

    @model_validator(mode="after")
    def _one_of_them(self) -> SecretRef:
        if (self.env is None) == (self.file is None):
            raise Refusal("names one place", "{env: NAME} or {file: secrets/NAME}")
        return self


Secretly = Annotated[SecretRef, BeforeValidator(_no_secret_here)]


class Group(_Strict):
    """Settings that all hosts of a group have."""

    settings: dict[str, Any] = Field(default_factory=dict)


class HostEntry(_Strict):
    """One host: how it is reached, what it is, what is set for it alone.

    `host_key`: once (the first that is seen is kept, another refused), known (it must be in
    known_hosts before), any (another one is taken, and recorded: a rented address that is a new
    machine each time). `transfer`: scp where sshd has no sftp. `volume`: of a pod, where the
    network volume is mounted.
    """

    address: Annotated[str, AfterValidator(_address)]
    user: Annotated[str, AfterValidator(_user)] | None = None
    port: int = Field(default=22, ge=1, le=65535)
    key: Annotated[str, AfterValidator(_values.controller_path)] | None = None
    jump: Annotated[str, AfterValidator(_jump)] | None = None
    password: Secretly | None = None
    sudo: bool = False
    sudo_password: Secretly | None = None
    transfer: Literal["sftp", "scp"] = "sftp"
    host_key: Literal["once", "known", "any"] = "once"
    role: Role = "vm"
    volume: Annotated[str, AfterValidator(_volume)] | None = None
    groups: list[Annotated[str, AfterValidator(group_name)]] = Field(default_factory=list)
    settings: dict[str, Any] = Field(default_factory=dict)

    def together(self) -> Iterator[tuple[str, frozenset[str], Refusal]]:
        """What does not fit together: the key to point at, those that were looked at, and why."""
        if (self.role == "pod") != (self.volume is not None):
            why = Refusal(
                "role: pod and volume belong together: what a pod keeps lies on its volume",
                "role: pod and volume: /workspace",
            )
            yield "volume" if self.volume else "role", frozenset({"role", "volume"}), why
        if self.sudo_password is not None and not self.sudo:
            why = Refusal("sudo_password is given, and sudo is not asked for", "sudo: true")
            yield "sudo_password", frozenset({"sudo", "sudo_password"}), why
        useless = [key for key in CONNECTING if key in self.model_fields_set]
        if self.address == LOCAL and useless:
            what = f"nothing connects to this machine: {', '.join(useless)} means nothing here"
            write = 'address: "@local", and sudo: true if sudo asks for no password'
            yield useless[0], frozenset(useless), Refusal(what, write)

    def from_role(self) -> dict[str, Any]:
        """Settings that come of the role; the host's own come after."""
        if self.volume is None:
            return {}
        return {
            "volume_dir": self.volume,
            "base_dir": str(PurePosixPath(self.volume, VOLUME_BASE)),
        }


class FleetFile(_Strict):
    """The whole file. Settings: of all hosts, then of its groups in their order, then its own."""

    settings: dict[str, Any] = Field(default_factory=dict)
    groups: dict[Annotated[str, AfterValidator(group_name)], Group | None] = Field(
        default_factory=dict
    )
    hosts: dict[Annotated[str, AfterValidator(host_name)], HostEntry] = Field(default_factory=dict)

    @field_validator("settings", "groups", "hosts", mode="before")
    @classmethod
    def _nothing_yet(cls, value: object) -> object:
        """A key with only comments below it, as a file has it that was just begun."""
        return {} if value is None else value
