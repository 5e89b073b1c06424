"""Orders for drive_apply.py on loop devices, and runs of it as a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from kvhost.drives import claim as claims
from kvhost.drives.order import drive_order
from kvhost.onhost import drive_mount, drive_probe, report_drives
from kvhost.report import parse_drives
from kvhost.settings import Settings
from tests.lab.loop import MIB, Loop, Loops

Filesystem = Literal["xfs", "ext4", "btrfs"]
ONHOST = Path(__file__).parents[1] / "kvhost" / "onhost"
APPLY = ONHOST / "drive_apply.py"
SMALL = {"xfs": 320 * MIB, "ext4": 72 * MIB, "btrfs": 272 * MIB}


@dataclass
class Host:
    """A state directory, an fstab and a mount point of a test's own."""

    folder: Path
    loops: Loops
    filesystem: Filesystem = "ext4"
    made: list[Loop] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.state.mkdir()
        self.fstab.write_text("# of this host\n")

    @property
    def state(self) -> Path:
        return self.folder / "state"

    @property
    def fstab(self) -> Path:
        return self.folder / "fstab"

    @property
    def mount(self) -> Path:
        return self.folder / "drive"

    def drive(self, name: str = "blank", size: int | None = None, **how: Any) -> Loop:
        loop = self.loops.make(name, size or SMALL[self.filesystem], partitions=True, **how)
        self.made.append(loop)
        return loop

    def order(self, loop: Loop, action: str = "format", **more: Any) -> dict[str, Any]:
        """What a plan made now would hand on."""
        found = drive_probe.probe(str(loop.node))
        assert found["status"] == "ok", found
        return {
            "schema": 1,
            "drive": found["device"],
            "findings": found["findings"],
            "action": action,
            "filesystem": self.filesystem,
            "mount": str(self.mount),
            "owner": pwd.getpwuid(65534).pw_name,
            "token": None,
            "blank_check": "full",
            **more,
        }

    def claimed(self, loop: Loop, **settings: Any) -> dict[str, Any]:
        """What the plan really hands on: claim() on a report of the drives, and its order."""
        wanted = Settings(
            drive_wwn=drive_probe.probe(str(loop.node))["device"]["wwn"],
            drive_transport="loop",
            drive_filesystem=self.filesystem,
            cache_limit_gib=0.01,
            free_floor_gib=0.001,
            **settings,
        )
        here = {"drive_mount": str(self.mount), "service_user": pwd.getpwuid(65534).pw_name}
        wanted = wanted.model_copy(update=here)  # unchecked: a test's own places
        found = parse_drives(json.dumps(report_drives.drives(str(self.mount), str(self.state))))
        claim = claims.claim(wanted, found)
        assert not claim.refusals, claim.refusals
        return drive_order(wanted, claim.claimed)

    def argv(self, order: dict[str, Any], what: str = "apply", *more: str) -> list[str]:
        path = self.state / "order.json"
        path.write_text(json.dumps(order))
        words = ["--order", str(path), "--fstab", str(self.fstab), *more]
        return [sys.executable, str(APPLY), what, *words]

    def apply(self, order: dict[str, Any], *more: str, stop: str | None = None) -> dict[str, Any]:
        """Its answer with "exit" and "said"; only these two when it was killed."""
        env = {**os.environ, **({"KVHOST_TEST_DRIVE_STOP": stop} if stop else {})}
        argv = self.argv(order, "apply", *more)
        done = subprocess.run(argv, capture_output=True, text=True, env=env, check=False)
        told = json.loads(done.stdout) if done.stdout.strip() else {}
        return {**told, "exit": done.returncode, "said": done.stderr}

    def script(
        self, name: str, *words: str, order: dict[str, Any] | None = None, stop: str | None = None
    ) -> dict[str, Any]:
        """The answer of drive_release.py or drive_grow.py, as apply()."""
        env = {**os.environ, **({"KVHOST_TEST_DRIVE_STOP": stop} if stop else {})}
        argv = [sys.executable, str(ONHOST / name), *words, "--state", str(self.state)]
        if name == "drive_release.py":
            argv += ["--fstab", str(self.fstab)]
        if order is not None:
            path = self.state / "order.json"
            path.write_text(json.dumps(order))
            argv += ["--order", str(path)]
        done = subprocess.run(argv, capture_output=True, text=True, env=env, check=False)
        told = json.loads(done.stdout) if done.stdout.strip() else {}
        return {**told, "exit": done.returncode, "said": done.stderr}

    def check(self, order: dict[str, Any]) -> list[str]:
        """What is not as the order wants it."""
        argv = self.argv(order, "check")
        done = subprocess.run(argv, capture_output=True, text=True, check=True)
        wrong: list[str] = json.loads(done.stdout)["wrong"]
        return wrong

    @contextlib.contextmanager
    def paused(self, order: dict[str, Any], at: str) -> Iterator[dict[str, Any]]:
        """Stops apply at a step, for something to happen; the answer is there afterwards."""
        env = {**os.environ, "KVHOST_TEST_DRIVE_STOP": f"{at}:pause"}
        answer: dict[str, Any] = {}
        with subprocess.Popen(
            self.argv(order), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
        ) as process:
            os.waitpid(process.pid, os.WUNTRACED)
            try:
                yield answer
            finally:
                process.send_signal(18)  # SIGCONT
                out, err = process.communicate(timeout=60)
        answer.update(json.loads(out), exit=process.returncode, said=err)

    def unmount(self) -> None:
        while drive_mount.mounted_at(str(self.mount)):
            subprocess.run(["umount", self.mount], check=True)

    def close(self) -> None:
        self.unmount()
        if self.mount.is_dir():
            drive_mount.change_immutable(str(self.mount), False)
        for loop in self.made:
            if loop.is_ours() and loop.partitions():
                subprocess.run(["partx", "--delete", loop.node], check=False)


@contextlib.contextmanager
def host_with(folder: Path, filesystem: Filesystem = "ext4") -> Iterator[Host]:
    with Loops(folder / "images") as loops:
        host = Host(folder, loops, filesystem)
        try:
            yield host
        finally:
            host.close()
