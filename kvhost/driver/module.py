"""Why NVIDIA's module is not loaded, or is the wrong one for the card. Pure."""

from __future__ import annotations

from kvhost.driver.host import (
    OR_CPU,
    Host,
    branch_of,
    chip_at,
    how_to_install,
    refusal,
    wanted_driver,
)
from kvhost.plan.types import Refusal

REJECTED = ("rejected", "unavailable key", "required key", "verification failed")


def not_loaded(host: Host) -> Refusal:
    facts, on_disk = host.facts, host.facts.on_disk
    if host.container is not None:
        return refusal(
            "driver_not_in_container",
            "this container has a GPU on its PCI bus, but no driver",
            f"the machine's driver, branch {host.lock.driver_least} or later, in the container",
            f"{host.names()}, and no /proc/driver/nvidia/version",
            "the machine's owner starts it with the GPU (docker run --gpus all, NVIDIA container "
            f"toolkit); a driver is not installed inside a container; {OR_CPU}",
        )
    held = [card.address for card in host.cards if card.driver in ("nouveau", "nova_core")]
    if held:
        install = "then " if on_disk else f"{how_to_install(host)}; then "
        return refusal(
            "nouveau_holds_gpu",
            "the GPU is held by nouveau, with which CUDA does not work",
            "NVIDIA's own driver",
            f"{host.names()} at {', '.join(held)} bound to nouveau",
            f"{install}blacklist it (blacklist nouveau and options nouveau modeset=0 in "
            f"/etc/modprobe.d/blacklist-nouveau.conf, update-initramfs -u) and reboot; {OR_CPU}",
        )
    if dropped := dropped_on_disk(host):
        return dropped
    if on_disk:
        said = next((s for s in reversed(facts.kernel_log) if _rejects(s)), None)
        if said or facts.secure_boot:
            return _rejected(host, on_disk.version, said)
        return _idle(host, f"nvidia {on_disk.version}")
    if facts.kernel in facts.module_kernels:  # modinfo is not there, or knows it by another name
        return _idle(host, "a module nvidia")
    if facts.module_kernels or any("dkms" in n or "kernel" in n for n in facts.packages):
        return _not_built(host)
    return refusal(
        "driver_missing",
        "this host has a GPU and no NVIDIA driver",
        f"driver branch {host.lock.driver_least} or later, for CUDA {host.lock.cuda}",
        f"{host.names()}, and no module nvidia for any kernel",
        f"{how_to_install(host)}, and reboot; {OR_CPU}",
    )


def _idle(host: Host, what: str) -> Refusal:
    log = host.facts.kernel_log
    last = log[-1] if log else "the kernel log says nothing of it"
    return refusal(
        "module_not_loaded",
        "the driver is installed but its module is not loaded",
        "the module nvidia, loaded",
        f"{what} lies ready for kernel {host.facts.kernel}; {last}",
        f"modprobe nvidia, and look at what dmesg says; {OR_CPU}",
    )


def _rejects(line: str) -> bool:
    return any(word in line.lower() for word in REJECTED)


def _rejected(host: Host, version: str, said: str | None) -> Refusal:
    signer = host.facts.on_disk.signer if host.facts.on_disk else None
    found = f"nvidia {version}, signed by {signer or 'nobody'}, and Secure Boot"
    found += " is on" if host.facts.secure_boot else " or lockdown enforced by the kernel"
    return refusal(
        "module_rejected",
        "the kernel does not load the driver's module, because its signing key is not enrolled",
        "a module signed with a key that this machine's firmware or MOK list trusts",
        f"{found}; {said or 'the module is not loaded'}",
        "mokutil --import /var/lib/shim-signed/mok/MOK.der (Debian: /var/lib/dkms/mok.pub), "
        "reboot, enrol it at the machine's console, where no SSH reaches; or the distribution's "
        f"signed modules (linux-modules-nvidia-*). Secure Boot stays on; {OR_CPU}",
    )


def _not_built(host: Host) -> Refusal:
    facts = host.facts
    others = [kernel for kernel in facts.module_kernels if kernel != facts.kernel]
    has = f"for {', '.join(others)}" if others else "for no kernel"
    if any(name.startswith("linux-image") for name in facts.reboot_for) and others:
        fix = "reboot into the new kernel"
    elif not facts.headers:
        fix = f"apt-get install linux-headers-{facts.kernel}, then dkms autoinstall"
    else:
        fix = "dkms autoinstall, and look at its make.log if it fails"
    return refusal(
        "module_not_built",
        "the driver's module was not built for the running kernel",
        f"a module nvidia for kernel {facts.kernel}",
        f"one {has}; headers of the running kernel are {'' if facts.headers else 'not '}there",
        f"{fix}; no driver needs to be installed; {OR_CPU}",
    )


def dropped_on_disk(host: Host) -> Refusal | None:
    """The module that is installed has dropped the card, so that it does not load."""
    facts = host.facts
    if facts.loaded is not None or facts.on_disk is None:
        return None
    legacy = any("Legacy drivers" in line for line in facts.kernel_log)
    if legacy or drops_all(host, branch_of(facts.on_disk.version)):
        return dropped_refusal(host, facts.on_disk.version)
    return None


def drops_all(host: Host, branch: int) -> bool:
    chips = [chip_at(card) for card in host.cards]
    return all(chip and chip.last_branch and branch > chip.last_branch for chip in chips)


def dropped_refusal(host: Host, version: str) -> Refusal:
    last, _ = wanted_driver(host, dropped=True)
    return refusal(
        "driver_dropped_card",
        "this driver is too new for the GPU: its branch has dropped it",
        f"branch {last}, the last one for this card; not the latest",
        f"{host.names()}, driver {version}",
        f"{how_to_install(host, last)}; {OR_CPU}",
    )
