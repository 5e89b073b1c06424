"""Runs of kvhost over many hosts at once: test hosts over SSH, or this machine many times.

pyinfra's @local is one host. The inventory written here gives it many names, each with settings of
its own; every command runs for real, on this machine.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.lab.qemu import Machine

REPO = Path(__file__).resolve().parents[1]

_INVENTORY = """\
from pyinfra.connectors.local import LocalConnector

LocalConnector.make_names_data = staticmethod(lambda name=None: iter([(name, {{}}, [])]))
hosts = {hosts!r}
"""


@dataclass(frozen=True)
class Ran:
    """A finished run: its exit code and all that it printed."""

    code: int
    text: str

    def plan(self, host: str) -> str:
        """The block of the printed plans that is about one host; empty if there is none."""
        block: list[str] = []
        for line in self.text.splitlines():
            if re.match(r"\S+: (refused, |\d+ to change|no change)", line):
                if block:
                    break
                if line.startswith(f"{host}: "):
                    block.append(line.rstrip())
            elif block and re.match(r"(\d+ hosts, | *\[|-->)", line):
                break
            elif block:
                block.append(line.rstrip())
        return "\n".join(block)

    def refusals(self, host: str) -> dict[str, str]:
        """Code -> what is said with it, of the reasons against one host."""
        parts = re.split(r"^ *refused: ", self.plan(host), flags=re.M)[1:]
        found = {}
        for part in parts:
            code = re.search(r"\(\w+, (\w+)\)", part.split("\n")[0])
            found[code[1] if code else part.split("\n")[0]] = part.split("\n note ")[0]
        return found

    def operations(self) -> dict[str, tuple[int, int, int]]:
        """Operation -> hosts on which it (changed, failed, was as it should be)."""
        rows = re.findall(r"^ {4}(\w+: .*?) {2,}\d+ +(\d+|-) +(\d+|-) +(\d+|-) *$", self.text, re.M)
        plain = [[name, *(cell.replace("-", "0") for cell in cells)] for name, *cells in rows]
        return {name: (int(a), int(b), int(c)) for name, a, b, c in plain}

    def changed(self) -> list[str]:
        return [name for name, (changed, _, _) in self.operations().items() if changed]


def here(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A host that is this machine."""
    return {"@local": True, **settings}


def on(machine: Machine, settings: Mapping[str, Any], user: str = "root") -> dict[str, Any]:
    """A host that is a virtual one."""
    return {
        "ssh_hostname": machine.address,
        "ssh_user": user,
        "ssh_key": str(machine.image / "key"),
        "ssh_known_hosts_file": "/dev/null",
        "ssh_strict_host_key_checking": "no",
        **({} if user == "root" else {"_sudo": True}),
        **settings,
    }


def run(
    folder: Path,
    deploy: str,
    hosts: Mapping[str, Mapping[str, Any]],
    env: Mapping[str, str] | None = None,
    timeout_s: int = 900,
) -> Ran:
    """One pyinfra run of ``deploy`` (deploy.py, storage.py, …) over hosts of here() and on()."""
    named = []
    for name, data in hosts.items():
        rest = {key: value for key, value in data.items() if key != "@local"}
        named.append((f"@local/{name}" if "@local" in data else name, rest))
    inventory = folder / "inventory.py"
    inventory.write_text(_INVENTORY.format(hosts=named))
    keep = {k: v for k, v in os.environ.items() if not k.startswith(("KVHOST_", "PYTEST"))}
    given = {"COLUMNS": "250", "KVHOST_API_KEY": "sk-d7a1e5c0b9f2", **(env or {})}
    done = subprocess.run(
        [Path(sys.executable).with_name("pyinfra"), "-y", inventory, REPO / deploy],
        cwd=REPO,
        env={**keep, **given},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    return Ran(done.returncode, done.stdout)
