"""NVIDIA's cards: architecture and compute capability by PCI id, and the drivers for each. Pure.

The ids are those of the PCI database (pci-ids.ucw.cz, vendor 10de): NVIDIA gives each chip a block
of them. Capabilities: developer.nvidia.com/cuda-gpus. Which branch was the last for which cards:
nvidia.com/en-us/drivers/unix/legacy-gpu (390 Fermi, 470 Kepler) and, for 580 (Maxwell, Pascal,
Volta), what the module itself logs ("supported through the NVIDIA 580.xx Legacy drivers", seen in
NixOS/nixos-hardware#1880). Flavours of the module: github.com/NVIDIA/open-gpu-kernel-modules
(Turing and later) and developer.nvidia.com/blog/nvidia-transitions-fully-towards-open-source-gpu-
kernel-modules (Grace Hopper and Blackwell need the open one).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Flavour = Literal["open", "proprietary", "either"]


@dataclass(frozen=True)
class Chip:
    """`last_branch`: the last one that drives it, None while every new one does."""

    name: str
    architecture: str
    capability: str
    first_branch: int
    last_branch: int | None
    flavour: Flavour

    def driven_by(self, branch: int) -> bool:
        return branch >= self.first_branch and (
            self.last_branch is None or branch <= self.last_branch
        )


_Row = tuple[str, str, int, int | None, Flavour]
_FERMI: _Row = ("Fermi", "2.0", 260, 390, "proprietary")
_MAXWELL1: _Row = ("Maxwell", "5.0", 340, 580, "proprietary")
_MAXWELL2: _Row = ("Maxwell", "5.2", 343, 580, "proprietary")
_PASCAL: _Row = ("Pascal", "6.1", 367, 580, "proprietary")
_TURING: _Row = ("Turing", "7.5", 410, None, "either")
_AMPERE: _Row = ("Ampere", "8.6", 455, None, "either")
_ADA: _Row = ("Ada Lovelace", "8.9", 520, None, "either")
_RTX_BLACKWELL: _Row = ("Blackwell", "12.0", 570, None, "open")

#: first and last PCI id of a block, chip, and its architecture
_BLOCKS: tuple[tuple[int, int, str, _Row], ...] = (
    (0x06C0, 0x06DF, "GF100", _FERMI),
    (0x0DC0, 0x0E3F, "GF10x", _FERMI),
    (0x0F00, 0x0F0F, "GF108", _FERMI),
    (0x0FC0, 0x0FFF, "GK107", ("Kepler", "3.0", 304, 470, "proprietary")),
    (0x1001, 0x103F, "GK110 or GK210", ("Kepler", "3.5", 304, 470, "proprietary")),
    (0x1040, 0x109F, "GF11x", _FERMI),
    (0x1180, 0x11FF, "GK104 or GK106", ("Kepler", "3.0", 304, 470, "proprietary")),
    (0x1200, 0x125F, "GF114 or GF116", _FERMI),
    (0x1280, 0x12BF, "GK208", ("Kepler", "3.5", 304, 470, "proprietary")),
    (0x1340, 0x13BF, "GM107 or GM108", _MAXWELL1),
    (0x13C0, 0x143F, "GM204 or GM206", _MAXWELL2),
    (0x15F0, 0x15FF, "GP100", ("Pascal", "6.0", 367, 580, "proprietary")),
    (0x1617, 0x1667, "GM204", _MAXWELL2),
    (0x17C0, 0x17FF, "GM200", _MAXWELL2),
    (0x1B00, 0x1B7F, "GP102", _PASCAL),
    (0x1B80, 0x1BFF, "GP104", _PASCAL),
    (0x1C00, 0x1CFF, "GP106 or GP107", _PASCAL),
    (0x1D00, 0x1D7F, "GP108", _PASCAL),
    (0x1D80, 0x1DFF, "GV100", ("Volta", "7.0", 384, 580, "proprietary")),
    (0x1E00, 0x1FFF, "TU10x or TU117", _TURING),
    (0x2080, 0x20FF, "GA100", ("Ampere", "8.0", 450, None, "either")),
    (0x2180, 0x21FF, "TU116", _TURING),
    (0x2200, 0x227F, "GA102", _AMPERE),
    (0x2300, 0x233F, "GH100", ("Hopper", "9.0", 515, None, "either")),
    (0x2340, 0x237F, "GH200", ("Hopper", "9.0", 525, None, "open")),
    (0x2420, 0x25FF, "GA103 to GA107", _AMPERE),
    (0x2680, 0x28FF, "AD10x", _ADA),
    (0x2900, 0x297F, "GB100", ("Blackwell", "10.0", 570, None, "open")),
    (0x2B80, 0x2BFF, "GB202", _RTX_BLACKWELL),
    (0x2C00, 0x2D7F, "GB203 or GB206", _RTX_BLACKWELL),
    (0x2D80, 0x2DFF, "GB207", _RTX_BLACKWELL),
    (0x2E00, 0x2E7F, "GB10", ("Blackwell", "12.1", 580, None, "open")),
    (0x2F00, 0x2F7F, "GB205", _RTX_BLACKWELL),
    (0x3180, 0x31FF, "GB110", ("Blackwell", "10.3", 580, None, "open")),
)


def chip_of(device: str | None) -> Chip | None:
    """The chip with a PCI id ("0x2684"); None for one that this list does not know."""
    try:
        number = int(device or "", 16)
    except ValueError:
        return None
    for first, last, name, row in _BLOCKS:
        if first <= number <= last:
            return Chip(name, *row)
    return None
