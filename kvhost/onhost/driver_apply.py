#!/usr/bin/env python3
"""Makes the NVIDIA driver of this host as an order of kvhost's says: apply --base DIR --order FILE

Run as root, by the stage driver alone (kvhost/driver/mend.py writes the order). Its steps: nothing
uses the GPU; the repository and its key; the newest version of the branch, to which all of the
driver is pinned; what apt would do, and nothing of others is removed; the old driver's packages
kept aside, the running kernel marked as wanted; the packages; a module for the running kernel;
held, and kept from unattended upgrades; nouveau off; the daemon at boot; the module loaded, or a
reboot needed. Every step looks first and may be cut off: the next run goes on with the same order.

check prints {"ok", "why", "reboot", "version"} as one line of JSON; apply the same at its end, with
progress on stderr. Exit: 0, or 1 with the reason on stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvhost.onhost import report_gpu
    from kvhost.onhost.driver_look import (
        DRIVER,
        ROOT,
        Data,
        Failed,
        boot_id,
        installed,
        loaded,
        of_version,
        read,
        run,
        say,
        services,
        step_done,
        upstream,
        users,
        write,
    )
else:  # they lie beside this file on a host, where there is no package kvhost
    try:
        import report_gpu
        from driver_look import (
            DRIVER,
            ROOT,
            Data,
            Failed,
            boot_id,
            installed,
            loaded,
            of_version,
            read,
            run,
            say,
            services,
            step_done,
            upstream,
            users,
            write,
        )
    except ImportError:
        from kvhost.onhost import report_gpu
        from kvhost.onhost.driver_look import (
            DRIVER,
            ROOT,
            Data,
            Failed,
            boot_id,
            installed,
            loaded,
            of_version,
            read,
            run,
            say,
            services,
            step_done,
            upstream,
            users,
            write,
        )

STEPS = (
    *("source", "update", "pin", "aside", "packages", "build", "hold", "nouveau", "daemon"),
    "load",
)
SOURCE = "etc/apt/sources.list.d/kvhost-driver.sources"
KEY = "etc/apt/keyrings/kvhost-driver.asc"
PIN = "etc/apt/preferences.d/kvhost-driver"
UPGRADES = "etc/apt/apt.conf.d/99kvhost-driver"
NOUVEAU = "etc/modprobe.d/kvhost-nouveau.conf"
BLACKLIST = "# kvhost: the GPU is NVIDIA's driver's\nblacklist nouveau\noptions nouveau modeset=0\n"
#: as patterns of unattended-upgrades, which are matched at the start of a name
NOT_UPGRADED = ("nvidia-", "libnvidia-", "cuda-drivers", "libcuda1", "linux-modules-nvidia-")
PINNED = (
    "nvidia-* libnvidia-* cuda-drivers* libcuda1 libnvcuvid* libnvoptix* libcudadebugger* "
    "xserver-xorg-video-nvidia*"
)
APT = ("apt-get", "-q", "-o", "DPkg::Lock::Timeout=300", "-o", "Acquire::Retries=3")
INSTALL = ("--no-install-recommends", "--allow-downgrades", "--allow-change-held-packages")


class Work:
    """One order, carried out. Methods raise Failed or OSError."""

    def __init__(self, base: str, order: Data) -> None:
        self.base, self.order = base, order
        self.install: Data | None = order["install"]
        self.state = Path(base, "state", "driver.json")
        self.aside = Path(base, "state", "driver-before")
        self.version: str | None = None
        #: packages that kvhost holds
        self.held: list[str] = read_state(self.state).get("held", [])

    def nothing_uses_it(self) -> None:
        busy = [f"kvhost's {name}" for name in services(self.base)] + users()
        if busy:
            raise Failed(
                f"the GPU or kvhost is in use: {', '.join(busy)}. A driver is not changed below "
                "what runs: stop it, and run again"
            )

    def source(self) -> None:
        """The repository, signed, of one key alone; none where the distribution's is used."""
        given = self.install["source"] if self.install else None
        if given is None:
            return
        key = given["key"]
        if key is None:
            key = read(KEY)
            if key is None or "BEGIN PGP PUBLIC KEY" not in key:
                key = fetched(given["key_url"])
        only = f" {given['fingerprint']}" if given["fingerprint"] else ""
        write(KEY, key)
        write(
            SOURCE,
            "# kvhost: the NVIDIA driver (driver_install)\nTypes: deb\n"
            f"URIs: {given['uri']}\nSuites: /\nSigned-By: /{KEY}{only}\n",
        )

    def choose(self) -> None:
        """The version to install: the newest of the branch that is offered, or the one wished."""
        assert self.install is not None
        main, wish = self.install["main"], self.install["version"]
        rows = [line.split("|") for line in run("apt-cache", "madison", main).splitlines()]
        offered = [row[1].strip() for row in rows if len(row) == 3 and row[0].strip() == main]
        fits = [
            one for one in offered
            if (upstream(one) == wish if wish else upstream(one).startswith(f"{self.branch}."))
        ]  # fmt: skip
        if not fits:
            raise Failed(
                f"{main} {wish or f'of branch {self.branch}'} is not offered to this host; "
                f"offered: {', '.join(dict.fromkeys(offered)) or 'none of any version'}"
            )
        best = fits[0]
        for one in fits[1:]:  # dpkg's order, not that of the text
            if subprocess.call(["dpkg", "--compare-versions", one, "gt", best]) == 0:
                best = one
        self.version = upstream(best)
        exact = best.rpartition("-")[0] if "-" in best else best
        # 1001: also where another version is newer, or is installed
        write(
            PIN,
            f"# kvhost: all of the driver of one version\nPackage: {PINNED}\n"
            f"Pin: version {exact}*\nPin-Priority: 1001\n",
        )

    @property
    def branch(self) -> int:
        assert self.install is not None
        return int(self.install["branch"])

    def wanted(self) -> list[str]:
        names = list(self.install["names"]) if self.install else []
        return names + ([self.order["headers"]] if self.order["headers"] else [])

    def try_first(self) -> None:
        """What apt would do. Raises Failed where it cannot, or would remove what others need."""
        said = run(*APT, "-s", "install", *INSTALL, *self.wanted())
        removed = re.findall(r"(?m)^Remv (\S+)", said)
        others = [name for name in removed if not DRIVER.match(name)]
        if others:
            raise Failed(f"apt would remove {', '.join(others)}, which is no part of a driver")
        kernels = [name for name in re.findall(r"(?m)^Inst (\S+)", said) if "linux-image" in name]
        if kernels:
            raise Failed(f"apt would install another kernel ({', '.join(kernels)})")

    def chosen_and_tried(self) -> None:
        """The version, pinned, and what apt would do with it. What fails leaves pin and holds as
        they were. Only holds of kvhost's own are lifted: those of others stand in the way."""
        pin = read(PIN)
        lifted: list[str] = []
        try:
            if self.install is not None:
                self.choose()
                say(f"driver {self.version}")
                step_done("pin")
                old = {
                    n
                    for n, (v, held) in installed().items()
                    if held and upstream(v) != self.version
                }
                lifted = sorted(old & set(self.held))
                if lifted:
                    run("apt-mark", "unhold", *lifted)
            self.try_first()
        except BaseException:
            if lifted:
                run("apt-mark", "hold", *lifted)
            if pin is not None:
                write(PIN, pin)
            elif read(PIN) is not None:
                (ROOT / PIN).unlink()
            raise

    def keep_old(self) -> None:
        """The way back: what is installed now, its packages where they can still be had, and the
        kernel that runs, which must not be removed as no longer needed."""
        kernel = f"linux-image-{self.order['kernel']}"
        if (
            subprocess.run(
                ["dpkg-query", "-W", kernel], capture_output=True, check=False
            ).returncode
            == 0
        ):
            run("apt-mark", "manual", kernel)
        before = {name: row[0] for name, row in installed().items()}
        if (
            not before
            or self.aside.is_dir()
            or set(map(upstream, before.values())) == {self.version}
        ):
            return
        place = self.aside.with_name("driver-before.new")
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(mode=0o755)
        missing = []
        for name, version in sorted(before.items()):
            done = subprocess.run(
                [*APT, "download", f"{name}={version}"], cwd=place, capture_output=True, check=False
            )
            if done.returncode != 0:
                missing.append(name)
        told = {"packages": before, "not_kept": missing, "kernel": self.order["kernel"]}
        (place / "driver.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
        os.rename(place, self.aside)
        if missing:
            say(f"the packages of the old driver are no longer offered: {', '.join(missing)}")

    def built(self) -> None:
        """A module lies ready for the running kernel. Raises Failed."""
        kernel = self.order["kernel"]
        if kernel not in report_gpu.module_kernels():
            if shutil.which("dkms"):
                run("dkms", "autoinstall", "-k", kernel, quiet=False)
            if kernel not in report_gpu.module_kernels():
                raise Failed(
                    f"no module nvidia was built for kernel {kernel}: see "
                    "/var/lib/dkms/nvidia/*/build/make.log"
                )

    def hold(self) -> None:
        names = sorted(of_version(self.version)) if self.version else sorted(installed())
        loose = [name for name in names if not installed()[name][1]]
        if loose:
            run("apt-mark", "hold", *loose)
        self.held = names
        rows = "".join(f'    "{name}";\n' for name in NOT_UPGRADED)
        write(
            UPGRADES,
            f"// kvhost: the driver is held\nUnattended-Upgrade::Package-Blacklist {{\n{rows}}};\n",
        )

    def no_nouveau(self) -> None:
        mark = Path(self.base, "state", "driver-initramfs")
        new = write(NOUVEAU, BLACKLIST)
        if not new and mark.exists():
            return
        if shutil.which("update-initramfs"):
            run("update-initramfs", "-u", "-k", "all")
        mark.write_text(BLACKLIST)

    def daemons(self) -> None:
        names = ["nvidia-persistenced"] + ["nvidia-fabricmanager"] * bool(
            self.order["fabric_manager"]
        )
        for name in names:
            there = subprocess.run(
                ["systemctl", "cat", f"{name}.service"], capture_output=True, check=False
            )
            if there.returncode == 0:
                run("systemctl", "enable", f"{name}.service")
            elif name == "nvidia-fabricmanager":
                raise Failed(
                    "nvidia-fabricmanager.service is not there; behind NVSwitch it is needed"
                )

    def load(self) -> bool:
        """Whether a reboot is needed: the module is loaded now where nothing stands in the way."""
        held = [card for card in report_gpu.cards()[0] if card["driver"] not in (None, "nvidia")]
        if loaded() is None and not held and not Path("/sys/module/nouveau").is_dir():
            done = subprocess.run(["modprobe", "nvidia"], capture_output=True, check=False)
            if done.returncode == 0 and loaded() is not None:
                run("systemctl", "start", "nvidia-persistenced.service")
        return loaded() is None or (self.version is not None and loaded() != self.version)

    def all(self) -> Data:
        if self.begun_and_booted():
            return self.told(False, "the packages are there, and the host was rebooted since")
        self.nothing_uses_it()
        run("dpkg", "--configure", "-a")  # a run that was killed may have left it half done
        self.note(finished=False, reboot=False)
        if self.install is not None:
            self.source()
            step_done("source")
        if self.wanted():
            say("looking for the driver's packages")
            run(*APT, "update")
            step_done("update")
            self.chosen_and_tried()
            self.keep_old()
            step_done("aside")
            self.nothing_uses_it()
            run(*APT, "install", "-y", *INSTALL, "-o", "Dpkg::Options::=--force-confold",
                *self.wanted(), quiet=False)  # fmt: skip
            step_done("packages")
        if self.version is None:
            self.version = report_gpu.library_version()
        if self.install is not None or self.order["build"]:
            self.built()
        step_done("build")
        self.hold()
        step_done("hold")
        self.no_nouveau()
        step_done("nouveau")
        self.daemons()
        step_done("daemon")
        reboot = self.load()
        step_done("load")
        self.note(finished=True, reboot=reboot)
        return self.told(reboot, None)

    def begun_and_booted(self) -> bool:
        """This very order was carried out, and the reboot that it needed has been: what it could
        do is done, and the decision that is made of the host now says whether it helped."""
        now = read_state(self.state)
        same = bool(now.get("finished")) and now.get("order") == self.order
        return same and now["boot"] != boot_id() and self.all_there()

    def all_there(self) -> bool:
        """Whether the packages of the order are installed."""
        argv = ["dpkg-query", "-W", "-f=${db:Status-Status}\n", *self.wanted()]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        return done.returncode == 0 and set(done.stdout.split()) <= {"installed"}

    def note(self, *, finished: bool, reboot: bool) -> None:
        state = {"order": self.order, "version": self.version, "boot": boot_id(),
                 "finished": finished, "reboot": reboot, "held": self.held}  # fmt: skip
        temporary = self.state.with_suffix(".new")
        temporary.write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, self.state)

    def told(self, reboot: bool, why: str | None) -> Data:
        return {"ok": not reboot, "why": why, "reboot": reboot, "version": self.version}


def fetched(url: str) -> str:
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            return str(answer.read(1 << 16).decode("ascii"))
    except (OSError, ValueError) as why:
        raise Failed(f"the repository's key could not be fetched from {url}: {why}") from None


def read_state(path: Path) -> Data:
    try:
        loaded_state = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return loaded_state if isinstance(loaded_state, dict) else {}


def check(base: str) -> Data:
    """Whether an order that was begun was carried out, and what its reboot is waiting for."""
    state = read_state(Path(base, "state", "driver.json"))
    if not state:
        return {"ok": True, "why": None, "reboot": False, "version": None}
    reboot = bool(state["reboot"]) and state["boot"] == boot_id()
    why = None if state["finished"] else "an order that was begun was not finished"
    if reboot:
        why = "the driver is installed, and the reboot that it needs has not been"
    return {"ok": why is None, "why": why, "reboot": reboot, "version": state["version"]}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("command", choices=["check", "apply"])
    parser.add_argument("--base", required=True, help="base_dir of kvhost")
    parser.add_argument("--order", help="JSON file; without it, the order that was begun")
    args = parser.parse_args()
    try:
        if args.command == "check":
            print(json.dumps(check(args.base)))
            return 0
        if args.order:
            order = json.loads(Path(args.order).read_text(encoding="utf-8"))
        else:
            order = read_state(Path(args.base, "state", "driver.json"))["order"]
        print(json.dumps(Work(args.base, order).all()))
    except (Failed, OSError, ValueError, LookupError) as error:
        say(f"driver: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
