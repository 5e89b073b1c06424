"""What onhost/report_gpu.py says of NVIDIA GPUs and their driver, as types."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class _Model(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=(), defer_build=True
    )


class Card(_Model):
    """A GPU on the PCI bus; `device`: its PCI id ("0x2684"); `driver`: what it is bound to."""

    address: str
    device: str
    driver: str | None


class Module(_Model):
    """The kernel module: as it is loaded, or as it lies on disk for the running kernel.

    `open`: its flavour; None where it is another system's (WSL)."""

    version: str
    open: bool | None
    signer: str | None = None


class SmiGpu(_Model):
    """A GPU as nvidia-smi lists it; `fabric`: its state behind NVSwitch, None without one;
    `uuid`: None where a report of an earlier version does not say it."""

    address: str
    name: str | None
    architecture: str | None
    device: str | None
    memory_mib: int | None
    mig: bool
    persistence: bool
    fabric: str | None
    uuid: str | None = None


class SmiLog(_Model):
    driver: str | None
    cuda: str | None
    gpus: list[SmiGpu]


class Smi(_Model):
    """nvidia-smi: its exit code (None when it could not run), and what it listed or else said."""

    exit: int | None
    said: list[str]
    log: SmiLog | None


class Package(_Model):
    version: str
    held: bool


class DriverFacts(_Model):
    """`module_kernels`: kernels that a module lies ready for. `headers`: those of the running
    kernel are there. `library`: version of the driver's user space. `secure_boot`: None when it
    could not be read. `reboot_for`: packages that ask for a reboot."""

    kernel: str
    gpus: list[Card]
    nvswitches: int
    nodes: list[str]
    loaded: Module | None
    on_disk: Module | None
    module_kernels: list[str]
    headers: bool
    nouveau: bool
    library: str | None
    smi: Smi | None
    packages: dict[str, Package]
    secure_boot: bool | None
    reboot_for: list[str]
    fabric_manager: bool
    unattended_upgrades: bool
    kernel_log: list[str]
