"""Is the NVIDIA driver of a host good for a lock, and if not, what is the one thing to do? Pure.

A driver that works is adopted as it is. A refusal says which one to install, in which flavour, and
how, and never "the latest", which may have dropped the card; with driver_install kvhost does it
(driver_mend.py). Of causes that
hide each other the first one to mend is named, so that nobody reinstalls where a reboot is needed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvhost.driver.cards import Flavour
from kvhost.driver.host import OR_CPU, Host, chip_at, how_to_install, names_of, refusal
from kvhost.driver.module import dropped_on_disk, dropped_refusal, drops_all, not_loaded
from kvhost.driver.types import Card, DriverFacts, Module, SmiGpu
from kvhost.engine.matrix import LockInfo, Matrix
from kvhost.plan.types import Refusal
from kvhost.report import HostReport


@dataclass(frozen=True)
class Decision:
    """`words`: what would be used, for the plan. With any refusal the GPU cannot be used.
    `host`: what was judged; None without a GPU."""

    words: str
    refusals: tuple[Refusal, ...]
    notes: tuple[str, ...]
    host: Host | None = None


def decide(
    facts: DriverFacts, lock: LockInfo, matrix: Matrix, container: str | None = None
) -> Decision:
    """Whether this host's GPUs can serve the lock. ``container``: its kind, where the driver is
    the machine's and may not be changed. Raises nothing."""
    log = facts.smi.log if facts.smi else None
    if facts.loaded is None and log and log.driver and log.gpus:
        # another system's driver (WSL): what nvidia-smi says is all there is
        facts = facts.model_copy(update={"loaded": Module(version=log.driver, open=None)})
    every = facts.gpus or _cards_of_smi(facts)
    usable = tuple(card for card in every if card.driver != "vfio-pci")
    host = Host(facts, lock, matrix, container, usable)
    if not usable:
        return Decision("no GPU", tuple(_none(host, every)), ())
    refusals = list(_cards(host)) or list(_driver(host))
    loaded = facts.loaded
    words = f"driver {loaded.version}, " if loaded else "no driver, "
    if loaded and not refusals:
        words = f"driver {loaded.version} as it is, "
    return Decision(words + host.names(), tuple(refusals), tuple(_notes(host, every)), host)


def expected_gpus(report: HostReport) -> list[str]:
    """Compute capability of each GPU that CUDA should see ("8.9"; "?" for an unknown chip).

    Empty where no GPU is known. A card that is kept for virtual machines is not one of them."""
    facts = report.driver.data
    if facts is None:
        return []
    cards = [card for card in facts.gpus or _cards_of_smi(facts) if card.driver != "vfio-pci"]
    return [chip.capability if (chip := chip_at(card)) else "?" for card in cards]


def _cards_of_smi(facts: DriverFacts) -> list[Card]:
    """Where PCI is not seen (WSL, some containers) nvidia-smi's list is all there is."""
    log = facts.smi.log if facts.smi else None
    listed = log.gpus if log else []
    return [Card(address=g.address, device=g.device or "", driver="nvidia") for g in listed]


def _none(host: Host, every: Sequence[Card]) -> Iterator[Refusal]:
    if every:
        yield refusal(
            "gpu_passed_through",
            "this host's GPUs are kept for virtual machines",
            "a GPU that this host may use",
            f"{names_of(every, host.facts)}, bound to vfio-pci",
            f"run kvhost in the virtual machine that has it, {OR_CPU}",
        )
        return
    inside = host.container is not None
    yield refusal(
        "no_gpu",
        "there is no NVIDIA GPU here",
        "an NVIDIA GPU, for accelerator = cuda",
        f"none on the PCI bus{f' that this {host.container} container sees' if inside else ''}",
        ("start the container with the GPU (docker run --gpus all), " if inside else "")
        + 'accelerator = "cpu", or another host',
    )


def _cards(host: Host) -> Iterator[Refusal]:
    """Cards for which the lock's kernels hold no machine code: no driver mends that.

    Which driver such a card has does not matter then, but one that dropped it is told of: people
    look for the fault there.
    """
    chips = {card: chip_at(card) for card in host.cards}
    cannot = {c: p for c, p in chips.items() if p and not host.lock.runs_on(p.capability)}
    if len(cannot) < len(chips):
        return  # one that fits, or one that is not known here
    found = sorted({f"{chip.architecture} ({chip.capability})" for chip in cannot.values()})
    yield refusal(
        "gpu_not_supported",
        f"the kernels of the lock {host.lock.name} do not run on this GPU",
        f"compute capability {', '.join(host.lock.capabilities)}, or a later minor of one of them",
        f"{host.names()}: {', '.join(found)}",
        'accelerator = "cpu" to leave the GPU alone, or another GPU; no driver changes that',
    )
    dropped = _dropped(host) or dropped_on_disk(host)
    if dropped:
        yield dropped


# The driver: the first cause that holds


def _driver(host: Host) -> Iterator[Refusal]:
    if host.facts.loaded is None:
        yield not_loaded(host)
        return
    causes = (_mismatch, _dropped, _too_old, _flavour, _no_userspace, _silent)
    first = next((one for one in (cause(host) for cause in causes) if one), None)
    if first:
        yield first
        return
    yield from _mig(host)
    yield from _fabric(host)


def _mismatch(host: Host) -> Refusal | None:
    facts, loaded = host.facts, host.facts.loaded
    if loaded is None:
        return None
    said = " ".join(facts.smi.said) if facts.smi else ""
    on_disk = facts.on_disk.version if facts.on_disk and host.container is None else None
    others = {
        words: version
        for words, version in (("module on disk", on_disk), ("user space", facts.library))
        if version and version != loaded.version
    }
    if not others and "version mismatch" not in said:
        return None
    found = ", ".join(f"{words} {version}" for words, version in others.items()) or said
    fix = "reboot; nothing needs to be installed (and hold the packages: apt-mark hold)"
    if on_disk == loaded.version and others:
        fix = (
            f"a reboot does not help, the module on disk is {on_disk} too: install the module of "
            f"{facts.library}, or the libraries of {on_disk}"
        )
    if host.container is not None:
        fix = "remove the driver's libraries from the image: the machine's own are put into it"
    return refusal(
        "driver_mismatch",
        "the loaded module and the driver's other parts are of different versions",
        f"all of {loaded.version}, or all of the new one",
        f"loaded module {loaded.version}; {found}",
        f"{fix}; {OR_CPU}",
    )


def _dropped(host: Host) -> Refusal | None:
    if host.branch is not None and host.facts.loaded and drops_all(host, host.branch):
        return dropped_refusal(host, host.facts.loaded.version)
    return None


def _too_old(host: Host) -> Refusal | None:
    facts, branch = host.facts, host.branch
    least = max(host.lock.driver_least or 0, min((c.first_branch for c in host.chips), default=0))
    if branch is None or facts.loaded is None or branch >= least:
        return None
    fix = f"{how_to_install(host)}, and reboot"
    if host.container is not None:
        rows = host.matrix.fitting(host.lock.machine, "cuda")
        fits = [one.name for one in rows if (one.driver_least or 0) <= branch]
        fix = (
            f"engine_lock = {fits[0]!r}, which this driver runs"
            if fits
            else f"no pair of the matrix runs on it: another machine, with driver {least} or later"
        ) + "; a container cannot change the machine's driver"
    return refusal(
        "driver_too_old",
        f"the driver is too old for CUDA {host.lock.cuda}",
        f"branch {least} or later (compatibility packages do not help on GeForce cards)",
        f"{facts.loaded.version}, with {host.names()}",
        f"{fix}; {OR_CPU}",
    )


def _flavour(host: Host) -> Refusal | None:
    loaded = host.facts.loaded
    wants = {chip.flavour for chip in host.chips} - {"either"}
    if loaded is None or loaded.open is None or not wants:
        return None
    right: Flavour = "open" if "open" in wants else "proprietary"
    if loaded.open == (right == "open"):
        return None
    return refusal(
        "module_flavour",
        f"this GPU needs the {right} flavour of the driver's module",
        f"the {right} kernel module",
        f"{host.names()} with the {'open' if loaded.open else 'proprietary'} module "
        f"{loaded.version}",
        f"{how_to_install(host)}, and reboot; {OR_CPU}",
    )


def _no_userspace(host: Host) -> Refusal | None:
    facts = host.facts
    if facts.smi is not None or facts.library is not None or facts.loaded is None:
        return None
    fix = f"install the driver's libraries and nvidia-smi, version {facts.loaded.version}"
    if host.container is not None:
        fix = "start the container with NVIDIA_DRIVER_CAPABILITIES=compute,utility"
    return refusal(
        "userspace_missing",
        "the driver's module is loaded, but its libraries are not there",
        f"libcuda and nvidia-smi of {facts.loaded.version}",
        "neither libnvidia-ml nor nvidia-smi",
        f"{fix}; {OR_CPU}",
    )


def _silent(host: Host) -> Refusal | None:
    smi = host.facts.smi
    if smi is None or (smi.log and smi.log.gpus):
        return None
    nvrm = [line for line in host.facts.kernel_log if "NVRM" in line]
    said = "; ".join([*smi.said[:1], *nvrm[-2:]]) or f"nvidia-smi exits {smi.exit}"
    fix = (
        "in the firmware's setup turn on Above 4G Decoding and Resizable BAR, look at power and "
        "seating, and at NVRM in dmesg; a new driver is not the first thing to try"
    )
    if smi.exit is None:  # some cards take longer to start than nvidia-smi was waited for
        fix = "systemctl enable --now nvidia-persistenced keeps the driver ready; then run again"
    return refusal(
        "gpu_not_answering",
        "the driver is loaded, but no GPU answers it",
        "a GPU in nvidia-smi",
        f"{host.names()}: {said}",
        f"{fix}; {OR_CPU}",
    )


def _mig(host: Host) -> Iterator[Refusal]:
    sliced = [gpu for gpu in _listed(host) if gpu.mig]
    if sliced:
        yield refusal(
            "mig_enabled",
            "MIG is on, and this version of kvhost uses whole GPUs",
            "GPUs that are not sliced (vLLM on a slice: vllm-project/vllm#41848)",
            f"MIG on {len(sliced)} of {len(_listed(host))}: {sliced[0].name} "
            f"at {sliced[0].address}",
            f"when nothing uses it, nvidia-smi -i {sliced[0].address} -mig 0; {OR_CPU}",
        )


def _fabric(host: Host) -> Iterator[Refusal]:
    facts = host.facts
    states = {gpu.fabric for gpu in _listed(host)} - {None, "Completed"}
    version = facts.loaded.version if facts.loaded else ""
    wrong = {
        name: package.version
        for name, package in facts.packages.items()
        if name.startswith("nvidia-fabricmanager") and not _same(package.version, version)
    }
    down = facts.nvswitches > 0 and not facts.fabric_manager and host.container is None
    if not (states or down):
        return
    found = f"{facts.nvswitches} NVSwitches, fabric manager "
    found += "running" if facts.fabric_manager else "not running"
    found += f", fabric state {', '.join(sorted(map(str, states)))}" if states else ""
    fix = (
        f"apt-get install nvidia-fabricmanager of exactly {version}, and systemctl enable --now it"
    )
    if wrong:
        found += "; " + ", ".join(f"{name} {ver}" for name, ver in wrong.items())
        fix = f"the fabric manager must be of the driver's version: {fix}"
    if host.container is not None:
        fix = "the machine's owner starts the fabric manager; a container cannot"
    yield refusal(
        "fabric_manager_missing",
        "the GPUs are joined by NVSwitch, and without its fabric manager CUDA does not start "
        "(error 802)",
        f"nvidia-fabricmanager {version}, running, and the fabric's state Completed",
        found,
        f"{fix}; {OR_CPU}",
    )


def _same(package: str, version: str) -> bool:
    """Whether Debian's version of a package ("1:580.95.05-1") is the driver's."""
    return bool(version) and re.split("[-~+]", package.rpartition(":")[2])[0] == version


def _listed(host: Host) -> list[SmiGpu]:
    log = host.facts.smi.log if host.facts.smi else None
    return log.gpus if log else []


def _notes(host: Host, every: Sequence[Card]) -> Iterator[str]:
    facts, listed = host.facts, _listed(host)
    kinds = {gpu.name for gpu in listed} or {card.device for card in host.cards}
    if len(kinds) > 1:
        yield (
            f"GPUs of different kinds: {host.names()}. vLLM uses the one that CUDA calls 0, by "
            "default the fastest."
        )
    cannot = [c for c in host.cards if (p := chip_at(c)) and not host.lock.runs_on(p.capability)]
    if cannot and len(cannot) < len(host.cards):
        yield f"The engine has no code for {names_of(cannot, facts)}, which stays unused."
    unknown = [card.device for card in host.cards if chip_at(card) is None]
    if unknown:
        yield f"kvhost does not know the GPU {', '.join(unknown)}: the ABI check will tell."
    if kept := [card.address for card in every if card.driver == "vfio-pci"]:
        yield f"Kept for virtual machines (vfio-pci), left alone: {', '.join(kept)}."
    if host.container is None and listed and len(listed) < len(host.cards):
        yield f"nvidia-smi lists {len(listed)} of {len(host.cards)} GPUs: see NVRM in dmesg."
    if facts.loaded is None:
        return
    off = [gpu for gpu in listed if not gpu.persistence]
    if off and host.container is None:
        yield (
            "Persistence mode is off: the first start after an idle time takes longer. "
            "systemctl enable --now nvidia-persistenced keeps the driver ready."
        )
    loose = [name for name, package in facts.packages.items() if not package.held]
    if facts.unattended_upgrades and loose:
        yield (
            "Unattended upgrades may replace the driver below a running engine, which then loses "
            f"the GPU: apt-mark hold {' '.join(sorted(loose)[:6])}."
        )
    if facts.reboot_for:
        yield f"This host asks for a reboot, for {', '.join(facts.reboot_for[:6])}."
