"""RAID 0 and LUKS2 on a virtual machine with NVMe drives: this needs a kernel with md and dm."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest

from kvhost.drives import claim as claims
from kvhost.drives.order import drive_order
from kvhost.report import parse_drives
from kvhost.settings import Settings
from tests.drive_tools import ONHOST
from tests.lab.qemu import Machine
from tests.lab.vm import Lab

pytestmark = [
    pytest.mark.drives,
    pytest.mark.full,
    pytest.mark.skipif(os.geteuid() != 0, reason="the image of the test hosts needs root"),
]
BASE = "/var/lib/kvhost"
MOUNT = f"{BASE}/drive"


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    with Lab() as lab:
        drives = [lab.drive(serial, "400M") for serial in ("KVONE", "KVTWO", "KVTHREE")]
        host = lab.host("layers", drives)
        host.ssh(f"mkdir -p {BASE}/bin {BASE}/state && useradd -r kvhost")
        for path in sorted(ONHOST.glob("*drive*.py")):
            host.put(path.read_text(), f"{BASE}/bin/{path.name}")
        yield host


def script(machine: Machine, words: str, *, stop: str = "") -> dict[str, Any]:
    """The answer of a script, with its exit code and what it said."""
    env = f"KVHOST_TEST_DRIVE_STOP={stop} " if stop else ""
    done = machine.ssh(f"cd {BASE}/bin && {env}python3 {words}; exit $?", check=False)
    told = json.loads(done.stdout) if done.stdout.strip() else {}
    return {**told, "exit": done.returncode, "said": done.stderr}


def order(machine: Machine, **settings: Any) -> dict[str, Any]:
    """What the plan would hand on now, written to the host."""
    words = f"report_drives.py --mount {MOUNT} --state {BASE}/state"
    done = machine.ssh(f"cd {BASE}/bin && python3 {words}")
    wanted = Settings(cache_limit_gib=0.1, free_floor_gib=0.01, **settings)
    found = claims.claim(wanted, parse_drives(done.stdout))
    assert not found.refusals, found.refusals
    made = drive_order(wanted, found.claimed)
    machine.put(json.dumps(made), f"{BASE}/state/order.json")
    return made


def apply(machine: Machine, *, stop: str = "") -> dict[str, Any]:
    return script(machine, f"drive_apply.py apply --order {BASE}/state/order.json", stop=stop)


def wrong(machine: Machine) -> Any:
    return script(machine, f"drive_apply.py check --order {BASE}/state/order.json")["wrong"]


def reboot(machine: Machine) -> None:
    """sshd answers before a drive with nofail is mounted: for that it is waited."""
    machine.reboot()
    waiting = f"timeout 200 sh -c 'until mountpoint -q {MOUNT}; do sleep 1; done'"
    if machine.ssh(waiting, check=False).returncode:
        state = machine.ssh("cat /proc/mdstat /etc/fstab /etc/crypttab; lsblk -f; journalctl -b "
                            "--no-pager -p warning | tail -30", check=False)  # fmt: skip
        pytest.fail(f"not mounted at boot:\n{state.stdout}")


ENCRYPTED: dict[str, Any] = {"drive_serial": "KVONE", "drive_encrypt": True}
STRIPED: dict[str, Any] = {
    "drive_model": "QEMU*",
    "drive_count": 2,
    "drive_encrypt": True,
    "drive_filesystem": "ext4",
}


def test_encrypted_cut_off_rebooted_and_erased(machine: Machine) -> None:
    order(machine, **ENCRYPTED)
    for step in ("luks", "made", "crypttab"):
        told = apply(machine, stop=f"{step}:kill")
        assert told["exit"] == 137, (step, told)
        order(machine, **ENCRYPTED)
    told = apply(machine)
    assert told["exit"] == 0, told
    assert wrong(machine) == []
    machine.ssh(f"echo secret-of-a-prompt > {MOUNT}/tier/file; sync")
    assert order(machine, **ENCRYPTED)["action"] == "keep"
    assert apply(machine)["changed"] == []
    mode = machine.ssh(f"stat -c '%a %U' {BASE}/secrets/drive.key").stdout.split()
    assert mode == ["600", "root"]
    reboot(machine)
    assert order(machine, **ENCRYPTED)["action"] == "keep", "mounted at boot"
    assert wrong(machine) == []
    assert machine.ssh(f"cat {MOUNT}/tier/file").stdout == "secret-of-a-prompt\n"
    disk = f"/dev/{machine.names()['KVONE']}"
    assert machine.ssh(f"grep -c secret-of-a-prompt {disk}", check=False).stdout.strip() == "0"
    told = script(machine, f"drive_release.py release --state {BASE}/state")
    assert told["exit"] == 0, told
    assert machine.ssh("ls /dev/mapper").stdout.split() == ["control"]
    assert machine.ssh("cat /etc/crypttab").stdout.strip() == ""
    made = {**order(machine, **ENCRYPTED), "token": told["tokens"][disk]}
    machine.put(json.dumps(made), f"{BASE}/state/order.json")
    words = f"--state {BASE}/state --order {BASE}/state/order.json"
    told = script(machine, f"drive_release.py wipe {words}")
    assert (told["exit"], told["erased"]) == (0, True), told
    machine.ssh(f"test ! -e {BASE}/secrets/drive.key")


def test_two_drives_become_one_array_that_comes_back(machine: Machine) -> None:
    first = machine.names()["KVONE"]
    striped = {**STRIPED, "drive_count": 3}
    machine.ssh(f"blkdiscard -z /dev/{first}")
    order(machine, **striped)
    for step in ("array", "luks", "mkfs-running-1"):
        told = apply(machine, stop=f"{step}:kill")
        assert told["exit"] == 137, (step, told)
        order(machine, **striped)
    told = apply(machine)
    assert told["exit"] == 0, told
    assert wrong(machine) == []
    total = int(machine.ssh(f"df --output=size -B1 {MOUNT} | tail -1").stdout)
    assert total > 3 * 370 << 20
    machine.ssh(f"echo KV > {MOUNT}/tier/file; sync")
    reboot(machine)
    assert [m["action"] for m in order(machine, **striped)["members"]] == ["keep"] * 3
    assert wrong(machine) == []
    assert machine.ssh(f"cat {MOUNT}/tier/file").stdout == "KV\n"
    told = script(machine, f"drive_release.py release --state {BASE}/state")
    assert told["exit"] == 0, told
    assert machine.ssh("cat /proc/mdstat").stdout.count("active") == 0
    again = order(machine, **striped)
    assert {m["action"] for m in again["members"]} == {"mount"}
    assert apply(machine)["exit"] == 0
    assert machine.ssh(f"cat {MOUNT}/tier/file").stdout == "KV\n"
    told = script(machine, f"drive_release.py release --state {BASE}/state")
    made = {**order(machine, **striped), "token": ",".join(told["tokens"].values())}
    half = {**made, "token": next(iter(told["tokens"].values()))}
    words = f"--state {BASE}/state --order {BASE}/state/order.json"
    for given, code in ((half, 3), (made, 0)):
        machine.put(json.dumps(given), f"{BASE}/state/order.json")
        done = script(machine, f"drive_release.py wipe {words}")
        assert done["exit"] == code, done
    assert done["erased"] is True
