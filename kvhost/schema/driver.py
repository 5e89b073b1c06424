"""The settings of the GPU's driver: whether kvhost may install one, and where from."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

from kvhost.schema import driver_values as _driver_values
from kvhost.schema.field import Flat, setting
from kvhost.schema.values import controller_path

_DRIVER = "Driver of the GPU"

_Repository = Annotated[str, AfterValidator(_driver_values.repository)]
_Version = Annotated[str, AfterValidator(_driver_values.version)]
_KeyFile = Annotated[str, AfterValidator(controller_path)]


class DriverSettings(Flat):
    """A driver that works is adopted as it is; one that does not is refused, or replaced."""

    driver_install: bool = setting(
        _DRIVER,
        False,
        "Whether kvhost may install the NVIDIA driver that the plan names, where the host has none "
        "or one that does not fit.",
        example=True,
        reaches_host=False,
    )
    driver_reboot: bool = setting(
        _DRIVER,
        False,
        "Whether kvhost may reboot the host for its driver; without it, the run ends there and "
        "says that a reboot is needed.",
        example=True,
        reaches_host=False,
    )
    driver_version: _Version | None = setting(
        _DRIVER,
        None,
        "Version of the driver to install, of the branch that the plan names; without it, the "
        "newest of that branch.",
        example="580.95.05",
        reaches_host=False,
    )
    driver_repository: _Repository | None = setting(
        _DRIVER,
        None,
        "Flat apt repository to install the driver from: a mirror of NVIDIA's for Debian, or one "
        "with Ubuntu's packages; without it, NVIDIA's own on Debian, the distribution's on Ubuntu.",
        example="https://mirror.example.org/cuda/debian12/x86_64/",
        reaches_host=False,
    )
    driver_repository_key: _KeyFile | None = setting(
        _DRIVER,
        None,
        "File on the controller with the public key, in ASCII armour, that driver_repository is "
        "signed with.",
        example="secrets/driver-repository.asc",
        reaches_host=False,
    )
