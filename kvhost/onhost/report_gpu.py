#!/usr/bin/env python3
"""Facts about NVIDIA GPUs and their driver, for report.py, which this lies beside; or as JSON.

Read only: no module is loaded, nothing is installed. What cards there are is read from /sys, so
that it is known without any driver or tool. What is decided of it: kvhost/driver/decide.py.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

ROOT = Path("/")  # tests put a directory with its own proc and sys here
Data = dict[str, Any]
NVIDIA = "0x10de"
#: kernel log lines that say why a module does not load or a card does not come up
TELLING = re.compile(
    r"NVRM|nouveau.*probe|(?:module|key).*(?:reject|unavailable|verification failed)", re.I
)
SECURE_BOOT = "SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
#: where distributions and NVIDIA put libnvidia-ml; Debian's own packages below nvidia/current
LIBRARIES = (
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib64",
    "usr/lib/wsl/lib",
    "usr/lib/x86_64-linux-gnu/nvidia/current",
    "usr/lib/aarch64-linux-gnu/nvidia/current",
)
#: names of the module: NVIDIA's and Ubuntu's, then Debian's
MODULES = ("nvidia", "nvidia-current", "nvidia-current-open")
SMI_LIMIT_S = 20  # with persistence off every card is started first


def read(*parts: str) -> str | None:
    try:
        return ROOT.joinpath(*parts).read_text(errors="replace")
    except (OSError, ValueError):
        return None


def run(argv: list[str], limit_s: float = 10) -> tuple[int | None, str]:
    """Exit code (None when it could not run) and what it said on stdout and stderr."""
    program = shutil.which(argv[0])
    if program is None:
        return None, ""
    try:
        done = subprocess.run(
            [program, *argv[1:]], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, timeout=limit_s, check=False,
            env={**os.environ, "LC_ALL": "C"},
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as why:
        return None, f"{type(why).__name__}: {why}"
    return done.returncode, done.stdout.decode(errors="replace")


# What programs and files of the driver say


def parse_proc_version(text: str) -> Data | None:
    """/proc/driver/nvidia/version: {"version", "open"} of the loaded module."""
    line = next((row for row in text.splitlines() if row.startswith("NVRM version:")), "")
    found = re.search(r"\b(\d{2,4}\.\d+(?:\.\d+)?)\b", line)
    return {"version": found.group(1), "open": "Open Kernel Module" in line} if found else None


def parse_modinfo(text: str) -> Data | None:
    """modinfo nvidia: {"version", "open", "signer"} of the module for the running kernel."""
    pairs = dict(re.findall(r"(?m)^(\w+):\s+(.*)$", text))
    if not re.match(r"\d", pairs.get("version", "")):
        return None
    # the open flavour is "Dual MIT/GPL", the other one "NVIDIA"
    return {
        "version": pairs["version"].strip(),
        "open": "GPL" in pairs.get("license", ""),
        "signer": pairs.get("signer", "").strip() or None,
    }


def parse_smi(text: str) -> Data | None:
    """nvidia-smi -q -x, of schemas v11 to v13; None where it is no such document.

    Memory in MiB; "N/A" and what a schema lacks are None. Serial numbers, UUIDs and processes are
    left out.
    """
    start = text.find("<?xml")
    try:
        top = ElementTree.fromstring(text[start:])
    except ElementTree.ParseError:
        return None

    def word(node: ElementTree.Element, path: str) -> str | None:
        value = (node.findtext(path) or "").strip()
        return value if value and value not in ("N/A", "Not Found") else None

    gpus = []
    for gpu in top.findall("gpu"):
        memory = re.match(r"(\d+) MiB", word(gpu, "fb_memory_usage/total") or "")
        device = word(gpu, "pci/pci_device_id")  # device and vendor: 20B210DE
        gpus.append({
            "address": (gpu.get("id") or "").lower(),
            "name": word(gpu, "product_name"),
            "architecture": word(gpu, "product_architecture"),
            "device": f"0x{device[-8:-4].lower()}" if device else None,
            "memory_mib": int(memory.group(1)) if memory else None,
            "mig": word(gpu, "mig_mode/current_mig") == "Enabled",
            "persistence": word(gpu, "persistence_mode") == "Enabled",
            "fabric": word(gpu, "fabric/state"),
            "uuid": word(gpu, "uuid"),
        })  # fmt: skip
    return {"driver": word(top, "driver_version"), "cuda": word(top, "cuda_version"), "gpus": gpus}


def parse_packages(text: str) -> Data:
    """dpkg-query's "name version status": {"name": {"version", "held"}} of installed ones."""
    found = {}
    for line in text.splitlines():
        cells = line.split()
        if len(cells) == 5 and cells[4] == "installed":
            found[cells[0].split(":")[0]] = {"version": cells[1], "held": cells[2] == "hold"}
    return found


# What lies on the host


def cards() -> tuple[list[Data], int]:
    """(GPUs with the kernel driver that each is bound to, number of NVSwitches)."""
    gpus, switches = [], 0
    devices = ROOT / "sys/bus/pci/devices"
    for device in sorted(devices.iterdir()) if devices.is_dir() else []:
        vendor, kind = read(str(device), "vendor"), read(str(device), "class")
        if (vendor or "").strip() != NVIDIA:
            continue
        bound = device / "driver"
        if (kind or "").startswith(("0x03", "0x12")):
            gpus.append({
                "address": device.name,
                "device": (read(str(device), "device") or "").strip(),
                "driver": os.path.basename(os.path.realpath(bound)) if bound.exists() else None,
            })  # fmt: skip
        elif (kind or "").startswith("0x0680"):
            switches += 1
    return gpus, switches


def secure_boot() -> bool | None:
    """The firmware's word; None where it cannot be read."""
    if not (ROOT / "sys/firmware/efi").is_dir():
        return False
    try:
        value = (ROOT / "sys/firmware/efi/efivars" / SECURE_BOOT).read_bytes()
    except FileNotFoundError:
        mounted = (ROOT / "sys/firmware/efi/efivars").is_dir()
        return False if mounted and any((ROOT / "sys/firmware/efi/efivars").iterdir()) else None
    except OSError:
        return None
    return bool(value[-1]) if value else None  # four bytes of attributes, then the value


def module_on_disk() -> Data | None:
    """The module that the running kernel would load."""
    told = (parse_modinfo(run(["modinfo", name])[1]) for name in MODULES)
    return next((found for found in told if found), None)


def module_kernels() -> list[str]:
    """Kernels in /lib/modules that an nvidia module was built or installed for."""
    found = []
    modules = ROOT / "lib/modules"
    for kernel in sorted(modules.iterdir()) if modules.is_dir() else []:
        for _, below, names in os.walk(kernel):
            # the kernel's own tree has thousands of files elsewhere
            below[:] = [b for b in below if b not in ("build", "source", "fs", "net", "sound")]
            if any(re.fullmatch(r"nvidia(-current(-open)?)?\.ko(\.\w+)?", name) for name in names):
                found.append(kernel.name)
                break
    return found


def library_version() -> str | None:
    """Version in the file name of the driver's own library, None when it is not installed."""
    for place in LIBRARIES:
        folder = ROOT / place
        names = [p.name for p in folder.glob("libnvidia-ml.so.*")] if folder.is_dir() else []
        for name in sorted(names, reverse=True):
            version = name.split(".so.")[1]
            if "." in version:
                return version
    return None


def running(*comms: str) -> bool:
    """Whether a process of that name runs (the kernel keeps 15 letters of it)."""
    for comm in ROOT.glob("proc/[0-9]*/comm"):
        try:
            if comm.read_text().strip() in {name[:15] for name in comms}:
                return True
        except OSError:
            continue  # it has just ended
    return False


def kernel_log() -> list[str]:
    """The last lines of the kernel log that tell of the driver; empty when it may not be read."""
    lines = run(["dmesg"])[1].splitlines()
    return [line.strip()[:200] for line in lines if TELLING.search(line)][-12:]


def smi() -> Data | None:
    code, text = run(["nvidia-smi", "-q", "-x"], SMI_LIMIT_S)
    if code is None and not text:
        return None
    parsed = parse_smi(text) if code == 0 else None
    said = [] if parsed else [line.strip()[:200] for line in text.splitlines() if line.strip()]
    return {"exit": code, "said": said[:4], "log": parsed}


def driver() -> Data:
    """All facts. Nothing raises: what is not there is None or empty."""
    kernel = os.uname().release
    gpus, switches = cards()
    reboot = read("run/reboot-required.pkgs")
    query = ["dpkg-query", "-W", "-f=${Package} ${Version} ${Status}\\n"]
    names = ["nvidia-*", "libnvidia-*", "cuda-drivers*", "linux-modules-nvidia-*"]
    held = run([*query, *names])[1] if gpus else ""
    return {
        "kernel": kernel,
        "gpus": gpus,
        "nvswitches": switches,
        "nodes": sorted(path.name for path in ROOT.glob("dev/nvidia[0-9]*")),
        "loaded": parse_proc_version(read("proc/driver/nvidia/version") or ""),
        "on_disk": module_on_disk() if gpus else None,
        "module_kernels": module_kernels() if gpus else [],
        "headers": (ROOT / "lib/modules" / kernel / "build").exists(),
        "nouveau": (ROOT / "sys/module/nouveau").is_dir(),
        "library": library_version(),
        "smi": smi(),
        "packages": parse_packages(held),
        "secure_boot": secure_boot(),
        "reboot_for": sorted(set((reboot or "").split())),
        "fabric_manager": running("nv-fabricmanager"),
        "unattended_upgrades": (ROOT / "usr/bin/unattended-upgrade").exists(),
        "kernel_log": kernel_log() if gpus else [],
    }


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    print(json.dumps(driver()))  # one line: what came before it is not the answer
    return 0


if __name__ == "__main__":
    sys.exit(main())
