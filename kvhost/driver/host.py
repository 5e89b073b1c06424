"""A host with an NVIDIA GPU, as the decisions about its driver see it, and their words. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvhost.driver.cards import Chip, Flavour, chip_of
from kvhost.driver.types import Card, DriverFacts
from kvhost.engine.matrix import LockInfo, Matrix
from kvhost.plan.types import Refusal

OPT_IN = "driver_install = true lets kvhost do it"
OR_CPU = 'or accelerator = "cpu" to leave the GPU alone'
STEPS = (
    "docs.nvidia.com/datacenter/tesla/driver-installation-guide has the steps for each distribution"
)


@dataclass(frozen=True)
class Host:
    """The facts with what they are judged by. `cards`: those that kvhost may use."""

    facts: DriverFacts
    lock: LockInfo
    matrix: Matrix
    container: str | None
    cards: tuple[Card, ...]

    @property
    def chips(self) -> list[Chip]:
        """Of the cards that the engine would use; of all, where it can use none."""
        every = [chip for chip in map(chip_at, self.cards) if chip]
        return [chip for chip in every if self.lock.runs_on(chip.capability)] or every

    @property
    def branch(self) -> int | None:
        return branch_of(self.facts.loaded.version) if self.facts.loaded else None

    def names(self) -> str:
        return names_of(self.cards, self.facts)


def branch_of(version: str) -> int:
    """580 of "580.95.05"."""
    return int(version.split(".")[0])


def refusal(code: str, what: str, needed: str, found: str, fix: str) -> Refusal:
    return Refusal("accelerator", code, what, needed, found, fix)


def chip_at(card: Card) -> Chip | None:
    return chip_of(card.device)


def names_of(cards: Sequence[Card], facts: DriverFacts) -> str:
    log = facts.smi.log if facts.smi else None
    # nvidia-smi writes eight digits of the domain, the kernel four
    by_address = {gpu.address[-12:]: gpu.name for gpu in log.gpus} if log else {}
    words: dict[str, int] = {}
    for card in cards:
        chip = chip_at(card)
        known = f"{chip.architecture} {chip.name}" if chip else "unknown chip"
        name = by_address.get(card.address[-12:]) or f"NVIDIA {known} ({card.device})"
        words[name] = words.get(name, 0) + 1
    return ", ".join(f"{count} x {name}" if count > 1 else name for name, count in words.items())


def wanted_driver(host: Host, *, dropped: bool = False) -> tuple[int, Flavour]:
    """(branch, flavour) that drives the cards; ``dropped``: the newest branches do not."""
    lasts = [chip.last_branch for chip in host.chips if chip.last_branch] if dropped else []
    branch = min(lasts, default=host.lock.driver_best or 0)
    flavours = {chip.flavour for chip in host.chips}
    return branch, "proprietary" if "proprietary" in flavours else "open"


def how_to_install(host: Host, branch: int | None = None) -> str:
    """Which driver to install: a branch that drives the cards, in their flavour."""
    best, flavour = wanted_driver(host)
    best, needs_old = branch or best, flavour == "proprietary"
    ubuntu = f"nvidia-driver-{best}-server{'' if needs_old else '-open'}"
    debian = "cuda-drivers" if needs_old else "nvidia-open"
    kind = "proprietary" if needs_old else "open"
    return (
        f"install branch {best}, {kind} module (Ubuntu: apt-get install "
        f"{ubuntu}; from NVIDIA's repository: apt-get install nvidia-driver-pinning-{best}, then "
        f"{debian}; {STEPS}); {OPT_IN}"
    )
