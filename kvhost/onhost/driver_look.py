#!/usr/bin/env python3
"""What there is of NVIDIA's driver on this host, and who uses it, for driver_apply.py beside this.

By itself it prints {"packages", "loaded", "users"} as JSON, and changes nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvhost.onhost import report_gpu
else:  # it lies beside this file on a host, where there is no package kvhost
    try:
        import report_gpu
    except ImportError:
        from kvhost.onhost import report_gpu

ROOT = Path("/")
#: packages of a driver; the container toolkit is none
DRIVER = re.compile(
    r"(nvidia-|libnvidia-|cuda-drivers|libcuda1$|libnvcuvid|libnvoptix|libcudadebugger"
    r"|linux-(modules|objects|signatures)-nvidia-|xserver-xorg-video-nvidia|firmware-nvidia-)(?!.*container)"
)
#: processes that have the device open and end with it
DAEMONS = ("nvidia-persiste", "nv-fabricmanage", "nv-hostengine")
Data = dict[str, Any]


class Failed(Exception):
    """Why, for people."""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def step_done(name: str) -> None:
    """Tests stop the run dead after any step: KVHOST_TEST_DIE_AFTER=driver:packages."""
    if os.environ.get("KVHOST_TEST_DIE_AFTER") == "driver:" + name:
        os.kill(os.getpid(), signal.SIGKILL)


def run(*argv: str, quiet: bool = True) -> str:
    """Stdout. Raises Failed with what the command said; without ``quiet`` its lines are shown."""
    env = {**os.environ, "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive",
           "NEEDRESTART_SUSPEND": "1"}  # fmt: skip
    try:
        done = subprocess.run(
            argv, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
    except OSError as why:
        raise Failed(f"{argv[0]}: {why.strerror}") from None
    text = done.stdout.decode(errors="replace")
    if not quiet:
        say(text.rstrip())
    if done.returncode != 0:
        last = "\n".join(text.strip().splitlines()[-12:])
        raise Failed(f"{' '.join(argv)} ended with {done.returncode}:\n{last}")
    return text


def read(path: str) -> str | None:
    try:
        return (ROOT / path).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None


def write(path: str, text: str) -> bool:
    """Whether it had to be written; whole or not at all."""
    if read(path) == text:
        return False
    target = ROOT / path
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.new")
    with open(temporary, "w", encoding="utf-8") as handle:
        handle.write(text)
        handle.flush()
        os.fsync(handle.fileno())
    os.chmod(temporary, 0o644)
    os.replace(temporary, target)
    return True


# What is there


def installed() -> dict[str, tuple[str, bool]]:
    """Packages of a driver -> (version, held)."""
    text = run("dpkg-query", "-W", "-f=${Package} ${Version} ${Status}\n")
    found = report_gpu.parse_packages(text)
    return {
        name: (row["version"], row["held"]) for name, row in found.items() if DRIVER.match(name)
    }


def upstream(version: str) -> str:
    """580.95.05 of Debian's 1:580.95.05-1ubuntu2."""
    return re.split(r"[-~+]", version.rpartition(":")[2])[0]


def of_version(version: str) -> dict[str, tuple[str, bool]]:
    """Packages of that driver; Ubuntu's signed modules have the kernel's version."""
    return {
        name: row for name, row in installed().items()
        if upstream(row[0]) == version or name.startswith("linux-modules-nvidia-")
    }  # fmt: skip


def users() -> list[str]:
    """Processes that have a GPU open: "python3 (4711)"."""
    found = []
    for folder in sorted(Path("/proc").glob("[0-9]*")):
        try:
            comm = (folder / "comm").read_text().strip()
            opened = any(
                os.readlink(one).startswith("/dev/nvidia") for one in (folder / "fd").iterdir()
            )
        except OSError:
            continue  # it has just ended
        if opened and not comm.startswith(DAEMONS):
            found.append(f"{comm} ({folder.name})")
    return found


def services(base: str) -> list[str]:
    """Services of kvhost's that run, by their records."""
    found = []
    for path in sorted(Path(base, "run").glob("*.json")):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            pid, ticks = int(record["pid"]), int(record["start_ticks"])
            stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except (OSError, ValueError, LookupError, TypeError):
            continue  # no record of a service, or its process is gone
        if record.get("boot_id", boot_id()) != boot_id():
            continue
        if int(stat[19]) == ticks and stat[0] not in "ZX":
            found.append(path.stem)
    return found


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def loaded() -> str | None:
    """Version of the module that is loaded."""
    told = report_gpu.parse_proc_version(report_gpu.read("proc/driver/nvidia/version") or "")
    return str(told["version"]) if told else None


def main() -> int:
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    print(json.dumps({"packages": installed(), "loaded": loaded(), "users": users()}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
