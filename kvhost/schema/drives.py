"""The settings of the drive: which one is claimed, and what may be done to it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator

from kvhost.schema import drive_values as _drive_values
from kvhost.schema.field import Flat, setting

_DRIVE = "Drive"
_SIZES = "MB, GB, TB or MiB, GiB, TiB, written behind the number"

_ById = Annotated[str, AfterValidator(_drive_values.by_id)]
_Serial = Annotated[str, AfterValidator(_drive_values.serial)]
_Wwn = Annotated[str, AfterValidator(_drive_values.wwn)]
_Model = Annotated[str, AfterValidator(_drive_values.model)]
_Size = Annotated[str, AfterValidator(_drive_values.drive_size)]
_Mount = Annotated[str, AfterValidator(_drive_values.mount)]
_Erase = Annotated[str, AfterValidator(_drive_values.erase)]

#: any of these set claims a drive; all that are set must be true of it
CRITERIA = (
    "drive_by_id",
    "drive_serial",
    "drive_wwn",
    "drive_model",
    "drive_min_size",
    "drive_max_size",
    "drive_transport",
)
#: accepted only from the data of one host in the inventory
HOST_DATA_ONLY = frozenset({"drive_erase"})


class DriveSettings(Flat):
    """A drive is claimed by what it is, never by a name that the kernel gives it."""

    drive_by_id: _ById | None = setting(
        _DRIVE,
        None,
        "Link in /dev/disk/by-id of the drive to use; kvhost drives shows the links of all drives.",
        example="/dev/disk/by-id/nvme-Samsung_SSD_990_PRO_2TB_S7KHNJ0W123456A",
    )
    drive_serial: _Serial | None = setting(
        _DRIVE,
        None,
        "Serial number of the drive to use, letter by letter.",
        example="S7KHNJ0W123456A",
    )
    drive_wwn: _Wwn | None = setting(
        _DRIVE,
        None,
        "World-wide name (WWN, EUI or NGUID) of the drive to use.",
        example="eui.0025385b71b00001",
    )
    drive_model: _Model | None = setting(
        _DRIVE,
        None,
        "Model of the drive to use, with * and ? as in a shell.",
        example="Samsung SSD 990 PRO*",
    )
    drive_min_size: _Size | None = setting(
        _DRIVE,
        None,
        "Least size of the drive to use; 2TB is what a maker means, 2TiB is a tenth more.",
        unit=_SIZES,
        example="1.9TB",
    )
    drive_max_size: _Size | None = setting(
        _DRIVE, None, "Greatest size of the drive to use.", unit=_SIZES, example="2.1TB"
    )
    drive_transport: (
        Literal["nvme", "sata", "sas", "scsi", "usb", "virtio", "mmc", "loop"] | None
    ) = setting(
        _DRIVE,
        None,
        "How the drive to use is attached; loop, a file in the place of a drive, is taken only if "
        "it is asked for here.",
        example="nvme",
    )
    drive_count: int = setting(
        _DRIVE,
        1,
        "How many drives must be left by the criteria; several become one RAID 0.",
        unit="drives",
        example=2,
        ge=1,
        le=32,
    )
    drive_mount: _Mount | None = setting(
        _DRIVE,
        None,
        "Directory that the drive is mounted at; without it, drive in base_dir.",
        example="/srv/kv-drive",
    )
    drive_filesystem: Literal["xfs", "ext4", "btrfs"] = setting(
        _DRIVE, "xfs", "Filesystem that a blank drive gets.", example="ext4"
    )
    drive_blank_check: Literal["full", "sampled"] = setting(
        _DRIVE,
        "full",
        "How a drive is proven blank before it is formatted: every byte read as zero, or samples "
        "(what lies between them is lost unseen).",
        example="sampled",
        reaches_host=False,
    )
    drive_erase: _Erase | None = setting(
        _DRIVE,
        None,
        "Token, printed by the plan that refuses, that allows just this drive with just these "
        "contents to be erased; taken only from the data of the host in the inventory.",
        example=f"erase-{'0123456789abcdef' * 2}",
        reaches_host=False,
    )
    drive_adopt: bool = setting(
        _DRIVE,
        False,
        "Whether a filesystem on the claimed drive that is already mounted at drive_mount, of the "
        "right type and empty, is used without formatting.",
        example=True,
        reaches_host=False,
    )
    drive_encrypt: bool = setting(
        _DRIVE,
        False,
        "Whether the drive is encrypted (LUKS2, key in a file that only root may read).",
        example=True,
    )
    drive_ephemeral: bool = setting(
        _DRIVE,
        False,
        "Whether the drive may come back blank after a stop of the machine (instance store of a "
        "cloud) and is then formatted again.",
        example=True,
    )

    @property
    def claims_a_drive(self) -> bool:
        """Whether a drive is asked for at all; without one, no drive is ever opened."""
        return any(getattr(self, key) is not None for key in CRITERIA)
