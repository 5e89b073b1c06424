"""What kvhost may do about a driver that does not fit: an order for onhost/driver_apply.py. Pure.

Only with driver_install. The order says what to install and why; the script probes the host again
before it changes anything. What no package mends stays refused: a card that the engine has no code
for, MIG, a silent GPU, a key that has to be enrolled at the console, a container.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvhost.driver.decide import Decision
from kvhost.driver.host import wanted_driver
from kvhost.driver.sources import Packages, Source, packages
from kvhost.plan.types import Refusal, State
from kvhost.report import HostReport
from kvhost.settings import Settings

#: packages are installed
INSTALL = frozenset({"driver_missing", "driver_too_old", "driver_dropped_card", "module_flavour",
                     "userspace_missing"})  # fmt: skip
#: what is installed is used after a reboot, without nouveau, or once it is built
OTHERS = frozenset({"driver_mismatch", "nouveau_holds_gpu", "module_not_built"})


@dataclass(frozen=True)
class Mend:
    """`order`: for the script; `refusals`: why it must not be carried out now."""

    order: dict[str, Any]
    words: str
    cost: str
    refusals: tuple[Refusal, ...]

    @property
    def state(self) -> State:
        return "change"


def mend_of(
    settings: Settings, report: HostReport, decision: Decision | None, mirror: Source | None
) -> Mend | None:
    """The order for this host; None where none may be given, or none is needed.

    ``mirror``: driver_repository with its key. Raises nothing.
    """
    host = decision.host if decision else None
    if decision is None or host is None or not decision.refusals or not settings.driver_install:
        return None
    [first, *more] = decision.refusals
    if more or first.code not in INSTALL | OTHERS or host.container is not None:
        return None
    facts, system = host.facts, report.os.data
    branch, flavour = wanted_driver(host, dropped=first.code == "driver_dropped_card")
    kernel = facts.kernel
    install = first.code in INSTALL or (
        first.code == "nouveau_holds_gpu" and not facts.on_disk and not facts.module_kernels
    )
    if first.code == "driver_mismatch" and "a reboot does not help" in first.fix:
        install = True
    made: Packages | None = None
    # what could not be read is taken for a firmware that enforces it
    secure = facts.secure_boot is not False
    if install and system is not None:
        made = packages(
            system, host.lock.machine, kernel, branch, flavour, secure_boot=secure,
            switches=facts.nvswitches > 0, mirror=mirror,
        )  # fmt: skip
    build = not (made and made.signed) and (install or first.code == "module_not_built")
    order: dict[str, Any] = {
        "code": first.code,
        "kernel": kernel,
        "headers": f"linux-headers-{kernel}" if build else None,
        "build": first.code == "module_not_built",
        "install": None,
        "fabric_manager": facts.nvswitches > 0,
    }
    words = "the host's NVIDIA driver made usable"
    if made is not None:
        order["install"] = {
            "branch": branch,
            "version": settings.driver_version,
            "main": made.main,
            "names": list(made.names),
            "source": made.source.as_order() if made.source else None,
        }
        words = (
            f"NVIDIA driver {settings.driver_version or f'of branch {branch}'}, "
            f"{'proprietary' if flavour == 'proprietary' else 'open'} module, from {made.words}"
        )
    elif first.code == "driver_mismatch":
        words = "the NVIDIA driver that is installed, after a reboot"
    elif first.code == "module_not_built":
        words = f"the NVIDIA driver's module, built for kernel {kernel}"
    elif first.code == "nouveau_holds_gpu":
        words = "nouveau kept from loading, so that the NVIDIA driver that is installed can"
    cost = "reboots the host if that is needed" if settings.driver_reboot else (
        "the run ends there if a reboot is needed: driver_reboot is off"
    )  # fmt: skip
    refusals = tuple(_refusals(settings, report, install, made, secure, branch))
    return Mend(order, words, cost, refusals)


def _refusals(
    settings: Settings,
    report: HostReport,
    install: bool,
    made: Packages | None,
    secure: bool,
    branch: int,
) -> Iterator[Refusal]:
    if not (report.pid1.data and report.pid1.data.systemd):
        yield Refusal(
            "accelerator",
            "driver_no_systemd",
            "a driver is installed only on a host with systemd, which starts its daemon at boot",
            "systemd as PID 1",
            report.pid1.data.comm if report.pid1.data else report.pid1.why or "unreadable",
            "install the driver by hand, or driver_install = false",
        )
    if install and made is None:
        system = report.os.data
        yield Refusal(
            "accelerator",
            "driver_source_unknown",
            "kvhost knows no repository of NVIDIA's driver for this system",
            "Ubuntu, Debian 12 or 13 on x86_64, or driver_repository with its key",
            system.pretty if system else report.os.why or "unreadable",
            "driver_repository and driver_repository_key, or install the driver by hand",
        )
    if install and made is not None and secure and not made.signed:
        yield Refusal(
            "accelerator",
            "driver_needs_mok",
            "Secure Boot is on, and the module would be signed with a key that this machine's "
            "firmware does not know",
            "a key that is enrolled, or Secure Boot off",
            "Secure Boot is on, or could not be read",
            "install the driver by hand and enrol its key at the machine's console, where no SSH "
            "reaches; then run again",
        )
    if settings.driver_version and int(settings.driver_version.split(".")[0]) != branch and install:
        yield Refusal(
            "accelerator",
            "driver_version_of_other_branch",
            "driver_version is of another branch than the one that fits this host",
            f"a version of branch {branch}",
            f"driver_version = {settings.driver_version!r}",
            f"a version of branch {branch}, or driver_version left out",
        )
    running = [row.name for row in (_services(report)) if row.alive]
    if running:
        yield Refusal(
            "accelerator",
            "driver_in_use",
            "kvhost's services run, and a driver is not changed below them",
            "services that are stopped",
            f"running: {', '.join(running)}",
            f"stop them when nobody needs them (python3 {settings.paths.bin}/services.py --base "
            f"{settings.base_dir} --user {settings.service_user} stop), and run again",
        )


def _services(report: HostReport) -> list[Any]:
    kvhost = report.kvhost.data
    return list((kvhost.services.data if kvhost else None) or [])
