"""Hosts of the lab with an engine's double, provisioned over SSH by a user with sudo."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tests.fleet_tools import SMALL, Fleet, plant
from tests.lab.nspawn import USER, Host, Lab, until

BASE = "/var/lib/kvhost"
#: the step at which a host can be held
RESOLVE = "cache: what the engine makes of the configuration"


class Site:
    def __init__(self, lab: Lab, folder: Path, names: Sequence[str]) -> None:
        self.lab = lab
        self.fleet = Fleet(folder, prefix=tuple(lab.argv()))
        self.hosts: dict[str, Host] = {}
        for name in names:
            self.hosts[name] = host = lab.host(name, boot=False)
            plant(host.tree, BASE)
            self.fleet.hosts[name] = {
                "ssh_hostname": host.address, "ssh_user": USER, "ssh_key": str(lab.key),
                "ssh_known_hosts_file": str(lab.known_hosts),
                "ssh_strict_host_key_checking": "yes", "_sudo": True, **SMALL,
            }  # fmt: skip

    def well(self, name: str) -> bool:
        words = ("python3", f"{BASE}/bin/services.py", "--base", BASE, "--user", "kvhost")
        rows = self.hosts[name].root(*words, "--json", "status", ok=False).splitlines()
        if not rows:
            return False
        told = json.loads(rows[-1])
        return bool(told["supervisor_fresh"]) and all(
            row["state"] == "RUNNING" and row["alive"] and row["current"]
            for row in told["services"].values()
        )

    def hold(self, *names: str) -> None:
        """At the next run these hosts stay at the step that asks the engine."""
        for name in names:
            self.hosts[name].root("sh", "-c", f"rm -f {BASE}/state/resolved-*; "
                                              f"touch {BASE}/slow-resolve")  # fmt: skip

    def let_go(self, *names: str) -> None:
        for name in names:
            self.hosts[name].root("rm", "-f", f"{BASE}/slow-resolve")

    def held(self, *names: str) -> None:
        """Until the run stands there."""
        self.fleet.until(
            lambda told: all(
                name in told.rows and told.rows[name].step == RESOLVE for name in names
            )
        )
        until(lambda: all(map(self.at_work, names)), 60, f"{names} are asked")

    def lock(self, name: str) -> bool:
        return bool(self.hosts[name].root("sh", "-c", f"ls {BASE}/state/run.lock", ok=False))

    def at_work(self, name: str) -> str:
        return self.hosts[name].root(
            "pgrep", "-f", "^/bin/sh [^ ]*/python [^ ]*/resolve.py", ok=False
        )

    def boot(self, *names: str) -> None:
        for name in names:
            self.hosts[name].boot(wait=False)
        for name in names:
            self.hosts[name].wait()
