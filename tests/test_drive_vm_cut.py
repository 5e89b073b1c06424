"""The power is cut at every step of formatting and mounting; the next run completes.

The emulator is killed while the script stands still at the step, with all that the guest had not
written yet. Then the machine is switched on again, and a new plan and order are made from what it
reports, as another run of kvhost would.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvhost.claim import claim
from kvhost.drive_order import drive_order
from kvhost.onhost.drive_apply import STEPS
from kvhost.report import parse_drives
from kvhost.settings import Settings
from tests.lab.qemu import SLOTS, Drive, Machine
from tests.lab.recipe import LabError
from tests.lab.vm import Lab, settle

pytestmark = [
    pytest.mark.full,
    pytest.mark.drives,
    pytest.mark.skipif(os.geteuid() != 0, reason="the test hosts need root"),
]
SCRIPTS = sorted((Path(__file__).parents[1] / "kvhost/onhost").glob("*drive*.py"))
MOUNT, STATE = "/srv/drive", "/srv/state"
# a blank drive is not erased; test_drive_apply.py kills the steps of erasing
CUT = [step for step in STEPS if step not in ("erase", "cleared")]


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab() as made:
        yield made


@pytest.fixture(scope="module")
def host(lab: Lab) -> Machine:
    machine = lab.host("cut")
    machine.ssh(f"mkdir -p /srv/onhost {STATE} && useradd -r kvhost")
    for script in SCRIPTS:
        machine.put(script.read_text(), f"/srv/onhost/{script.name}")
    machine.ssh("sync")
    return machine


def planned(machine: Machine, serial: str) -> dict[str, Any]:
    """The order that a plan made now would hand on."""
    code = "import json, sys; sys.path.insert(0, '/srv/onhost'); import report_drives; "
    code += f"print(json.dumps(report_drives.drives('{MOUNT}', '{STATE}')))"
    report = parse_drives(machine.ssh(f'python3 -c "{code}"').stdout)
    settings = Settings(
        drive_serial=serial, drive_mount=MOUNT, cache_limit_gib=0.05, free_floor_gib=0.01
    )
    found = claim(settings, report)
    assert not found.refusals, found.refusals
    return drive_order(settings, found.claimed)


def apply(machine: Machine, order: dict[str, Any], stop: str = "") -> dict[str, Any]:
    """The answer of drive_apply.py; {} when it was stopped at a step instead."""
    machine.put(json.dumps(order), "/srv/order.json")
    line = f"KVHOST_TEST_DRIVE_STOP={stop} python3 /srv/onhost/drive_apply.py apply"
    line += f" --order /srv/order.json --state {STATE}"
    if not stop:
        done = machine.ssh(line, check=False)
        assert done.stdout, done.stderr
        return {**json.loads(done.stdout.splitlines()[-1]), "exit": done.returncode}
    machine.ssh(f"({line} > /srv/answer 2> /srv/said &) ")
    for _ in range(240):
        # it stops itself: T in the third field of its stat
        stopped = machine.ssh("ps -eo stat,args | grep -c '^T.*[d]rive_apply'", check=False)
        if stopped.stdout.strip() == "1":
            return {}
        answer = machine.ssh("cat /srv/answer").stdout
        if answer:
            raise LabError(f"it did not stop at {stop}: {answer}")
        time.sleep(0.25)
    raise LabError(f"it did not come to {stop}: {machine.ssh('cat /srv/said').stdout}")


def release(machine: Machine) -> None:
    """Forgets the drive of the step before, so that the next one is a first one."""
    machine.ssh(
        f"umount {MOUNT}; sed -i '\\#{MOUNT}#d' /etc/fstab; systemctl daemon-reload;"
        f" rm -rf {STATE}; mkdir {STATE}; chattr -i {MOUNT}; rmdir {MOUNT}; sync",
        check=False,
    )


@pytest.mark.parametrize("step", CUT)
def test_the_next_run_completes(lab: Lab, host: Machine, step: str) -> None:
    drive = Drive(f"CUT{step.upper()}", lab.folder / f"cut-{step}.raw", "384M")
    release(host)
    if len(host.slots) < SLOTS:
        host.plug(len(host.slots), drive)  # it saves a boot; those of the steps before stay
    else:
        host.rewire({0: drive.create()})
    settle(host)
    apply(host, planned(host, drive.serial), f"{step}:pause")
    host.kill()
    host.start()
    host.wait()
    settle(host)
    told = apply(host, planned(host, drive.serial))
    assert told["exit"] == 0 and told["status"] == "done", told
    source = host.ssh(f"findmnt -no SOURCE,FSTYPE --mountpoint {MOUNT}").stdout.split()
    assert source == [f"/dev/{host.names()[drive.serial]}p1", "xfs"]
    marker = json.loads(host.ssh(f"cat {MOUNT}/.kvhost-drive.json").stdout)
    assert marker["uuid"] == told["uuid"]
    host.ssh(f"test -d {MOUNT}/tier && grep -c {MOUNT} /etc/fstab | grep -qx 1")
    again = apply(host, planned(host, drive.serial))
    assert (again["exit"], again["changed"]) == (0, []), again
