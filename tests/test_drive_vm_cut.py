"""The power is cut at every step of formatting and mounting; the next run completes.

The emulator is killed while the script stands still at the step, with all that the guest had not
written yet; up to the line in fstab several drives stand at a step each in one cut. Then the host
is switched on again, and a new plan and order are made from what it reports, as another run of
kvhost would.
"""

from __future__ import annotations

import base64
import io
import json
import os
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvhost.drives.claim import claim
from kvhost.drives.order import drive_order
from kvhost.onhost.drive_apply import STEPS
from kvhost.report import parse_drives
from kvhost.settings import Settings
from tests.lab.qemu import Drive, Machine
from tests.lab.recipe import LabError
from tests.lab.vm import Lab, settle

pytestmark = [
    pytest.mark.full,
    pytest.mark.drives,
    pytest.mark.skipif(os.geteuid() != 0, reason="the test hosts need root"),
]
SCRIPTS = sorted((Path(__file__).parents[1] / "kvhost/onhost").glob("*drive*.py"))
MOUNT = "/srv/drive"
# a blank drive is not erased; test_drive_apply.py kills the steps of erasing
CUT = [step for step in STEPS if step not in ("erase", "cleared")]
#: before the line in fstab, of which there is one, drives know nothing of each other
EARLY, LATE = CUT[: CUT.index("fstab")], CUT[CUT.index("fstab") :]
TOGETHER = [EARLY[at : at + 5] for at in range(0, len(EARLY), 5)] + [[step] for step in LATE]


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab() as made:
        yield made


def new_host(lab: Lab, steps: list[str]) -> tuple[Machine, dict[str, Drive]]:
    """A host with the scripts and one blank drive for each step."""
    drives = {step: lab.drive(f"CUT{step.upper()}", "384M") for step in steps}
    machine = lab.host(f"cut-{steps[0]}", list(drives.values()))
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for script in SCRIPTS:
            archive.add(script, f"srv/onhost/{script.name}")
    machine.put(base64.b64encode(packed.getvalue()).decode(), "/root/scripts")
    states = " ".join(state_of(step) for step in steps)
    machine.ssh(
        "base64 -d /root/scripts | tar -xz --no-same-owner -C /"
        f" && mkdir -p {states} && useradd -r kvhost && sync"
    )
    return machine, drives


def state_of(step: str) -> str:
    return f"/srv/state/{step}"


def planned(machine: Machine, serial: str, state: str) -> dict[str, Any]:
    """The order that a plan made now would hand on."""
    words = f"/srv/onhost/report_drives.py --mount {MOUNT} --state {state}"
    report = parse_drives(machine.ssh(f"python3 {words}").stdout)
    settings = Settings(
        drive_serial=serial, drive_mount=MOUNT, cache_limit_gib=0.05, free_floor_gib=0.01
    )
    found = claim(settings, report)
    assert not found.refusals, found.refusals
    return drive_order(settings, found.claimed)


def command(machine: Machine, order: dict[str, Any], state: str) -> str:
    machine.put(json.dumps(order), f"{state}/order.json")
    return f"python3 /srv/onhost/drive_apply.py apply --order {state}/order.json --state {state}"


def apply(machine: Machine, order: dict[str, Any], state: str) -> dict[str, Any]:
    """The answer of drive_apply.py, with its exit code."""
    done = machine.ssh(command(machine, order, state), check=False)
    assert done.stdout, done.stderr
    return {**json.loads(done.stdout.splitlines()[-1]), "exit": done.returncode}


def stand_still(machine: Machine, order: dict[str, Any], state: str, step: str) -> None:
    """Runs it until it has stopped itself at the step. Raises LabError if it does not."""
    line = f"KVHOST_TEST_DRIVE_STOP={step}:pause {command(machine, order, state)}"
    machine.ssh(f"({line} > {state}/answer 2> {state}/said &) ")
    deadline = time.monotonic() + 300  # every byte is read, by an emulated processor
    while time.monotonic() < deadline:
        # T in the third field of its stat
        ps = f"ps -eo stat,args | grep -c '^T.*[d]rive_apply.*{state}$'; cat {state}/answer"
        stopped, *answer = machine.ssh(ps).stdout.splitlines()
        if stopped == "1":
            return
        if answer:
            raise LabError(f"it did not stop at {step}: {answer}")
        time.sleep(0.25)
    raise LabError(f"it did not come to {step}: {machine.ssh(f'cat {state}/said').stdout}")


def release(machine: Machine) -> None:
    """Gives the place at MOUNT to the next drive."""
    machine.ssh(
        f"umount {MOUNT}; sed -i '\\#{MOUNT}#d' /etc/fstab; systemctl daemon-reload;"
        f" chattr -i {MOUNT}; rmdir {MOUNT}",
        check=False,
    )


@pytest.mark.parametrize("steps", TOGETHER, ids=",".join)
def test_the_next_run_completes(lab: Lab, steps: list[str]) -> None:
    host, drives = new_host(lab, steps)
    orders = {step: planned(host, drives[step].serial, state_of(step)) for step in steps}
    for step in steps:
        stand_still(host, orders[step], state_of(step), step)
    host.kill()
    host.start()
    host.wait()
    settle(host)
    for step in steps:
        completes(host, drives[step].serial, step)
        release(host)
    host.stop()


def completes(host: Machine, serial: str, step: str) -> None:
    state = state_of(step)
    told = apply(host, planned(host, serial, state), state)
    assert told["exit"] == 0 and told["status"] == "done", (step, told)
    source = host.ssh(f"findmnt -no SOURCE,FSTYPE --mountpoint {MOUNT}").stdout.split()
    assert source == [f"/dev/{host.names()[serial]}p1", "xfs"], step
    marker = json.loads(host.ssh(f"cat {MOUNT}/.kvhost-drive.json").stdout)
    assert marker["uuid"] == told["uuid"], step
    host.ssh(f"test -d {MOUNT}/tier && grep -c {MOUNT} /etc/fstab | grep -qx 1")
    again = apply(host, planned(host, serial, state), state)
    assert (again["exit"], again["changed"]) == (0, []), (step, again)
