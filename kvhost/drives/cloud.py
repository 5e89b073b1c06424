"""What a drive's model tells of where its bytes lie: clouds and hypervisors name theirs. Pure."""

from __future__ import annotations

from fnmatch import fnmatchcase

#: instance stores of AWS, Azure and Google: their contents are lost when the machine stops
EPHEMERAL_MODELS = ("Amazon EC2 NVMe Instance Storage", "Microsoft NVMe Direct Disk*",
                    "nvme_card", "nvme_card[0-9]*")  # fmt: skip
#: lasting disks of AWS, Azure, Google (NVMe and SCSI), Alibaba, Oracle, Hetzner and DigitalOcean:
#: volumes on other machines
NETWORK_MODELS = ("Amazon Elastic Block Store", "MSFT NVMe Accelerator*", "nvme_card-pd*",
                  "PersistentDisk*", "Alibaba Cloud Elastic Block Storage", "BlockVolume",
                  "Volume")  # fmt: skip
#: disks of a hypervisor: QEMU, Hyper-V (Azure's of SCSI too), VMware, VirtualBox
VIRTUAL_MODELS = ("QEMU *", "Virtual Disk", "Virtual disk", "VMware *", "VBOX *")
VIRTUAL_TRANSPORTS = frozenset({"virtio", "xen"})


def is_ephemeral(model: str | None) -> bool:
    """Whether it is known to lose its contents at a stop."""
    return _is_one_of(model, EPHEMERAL_MODELS)


def is_network_volume(model: str | None) -> bool:
    """Whether it is known to lie on another machine, whatever way it is attached by."""
    return _is_one_of(model, NETWORK_MODELS)


def is_virtual(model: str | None, transport: str) -> bool:
    """Whether a hypervisor made it, of a file, a drive or a network volume: nobody in it knows."""
    return transport in VIRTUAL_TRANSPORTS or _is_one_of(model, VIRTUAL_MODELS)


def _is_one_of(model: str | None, patterns: tuple[str, ...]) -> bool:
    return model is not None and any(fnmatchcase(model, one) for one in patterns)
