"""The nspawn hosts of the lab: a real systemd, a network of their own, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab import cgroups, nspawn, nspawn_image
from tests.lab.nspawn import Host, Lab
from tests.lab.nspawn_image import LabError

pytestmark = [
    pytest.mark.systemd,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: namespaces, mounts, containers"),
]


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab() as made:
        yield made


@pytest.fixture(scope="module")
def host(lab: Lab) -> Host:
    return lab.host("one")


def test_systemd_is_pid_1_and_has_come_up(host: Host) -> None:
    assert host.read("/proc/1/comm").strip() == "systemd"
    assert host.root("systemctl", "is-system-running", "--wait", ok=False).strip() == "running"
    assert host.root("hostname").strip() == "one"


def test_the_way_in_is_ssh_as_an_unprivileged_user_with_sudo(host: Host) -> None:
    assert host.ssh("id", "-un").stdout.strip() == "deploy"
    assert host.ssh("cat", "/etc/shadow").returncode != 0
    assert host.ssh("sudo", "-n", "id", "-un").stdout.strip() == "root"


def test_words_reach_the_host_as_they_are(host: Host) -> None:
    odd = "a b 'c' \"d\" $HOME ;|\n*"
    assert host.ssh("printf", "%s", odd).stdout == odd
    host.write("/root/odd file", odd)
    assert host.read("/root/odd file") == odd


def test_no_way_out_of_the_network_of_the_lab(host: Host) -> None:
    own = f"10.77.0.0/24 dev host0 proto kernel scope link src {host.address}"
    assert host.root("ip", "route").split() == own.split()
    assert host.ssh("timeout", "5", "curl", "-s", "http://192.0.2.1/").returncode != 0


def test_a_second_host_is_another_machine_in_the_same_network(lab: Lab, host: Host) -> None:
    other = lab.host("two")
    ids = {h.read("/etc/machine-id") for h in (host, other)}
    assert len(ids) == 2
    host.root("touch", "/root/only-here")
    assert not (other.tree / "root/only-here").exists()
    assert not (lab.image / "root/only-here").exists()
    assert "1 received" in host.root("python3", "-c", ping(other.address))


def test_the_services_of_two_hosts_are_kept_apart(lab: Lab, host: Host) -> None:
    """Two systemds in one control group stop and remove each other's services."""
    other = next((one for one in lab.hosts if one is not host), None) or lab.host("two")
    for one in (host, other):
        one.root("systemd-run", "-q", "--unit", "same", "sleep", "infinity")
    host.root("systemctl", "stop", "same")
    assert other.root("systemctl", "is-active", "same").strip() == "active"
    pid = other.root("systemctl", "show", "-P", "MainPID", "same").strip()
    for top in cgroups.tops():
        seen = (top / other.netns / "payload/system.slice/same.service/cgroup.procs").read_text()
        # of another PID namespace: there is one, and its number here is not its number there
        assert len(seen.split()) == 1 and pid not in seen.split()
        assert not (top / host.netns / "payload/system.slice/same.service").exists()


def ping(address: str) -> str:
    """There is no ping in the image: a connection to sshd says the same."""
    return f"import socket; socket.create_connection(({address!r}, 22), 5); print('1 received')"


def test_a_reboot_keeps_files_and_stops_services_in_order(host: Host) -> None:
    host.write("/etc/systemd/system/told.service",
               "[Service]\nExecStart=sleep infinity\nExecStop=touch /root/was-stopped\n"
               "[Install]\nWantedBy=multi-user.target\n")  # fmt: skip
    host.root("systemctl", "enable", "--now", "told.service")
    first, boots = host.leader, host.boots
    host.reboot()
    assert (host.boots, host.leader != first) == (boots + 1, True)
    host.read("/root/was-stopped")
    assert host.root("systemctl", "is-active", "told.service").strip() == "active"
    # the journal of the boot before is kept
    assert "told.service" in host.root("journalctl", "-b", "-1", "-u", "told.service")


def test_a_reboot_that_the_host_asks_for_comes_back_by_itself(host: Host) -> None:
    boots = host.boots
    host.ssh("sudo", "systemctl", "reboot")
    nspawn.until(lambda: host.boots > boots, 60, "the reboot")
    host.wait()
    assert host.ssh("id", "-un").stdout.strip() == "deploy"


def test_a_power_cut_stops_nothing_in_order(host: Host) -> None:
    host.root("rm", "-f", "/root/was-stopped")
    host.power_cut()
    with pytest.raises(LabError, match="no PID 1"):
        host.root("true")
    host.boot()
    assert host.root("sh", "-c", "ls /root").split() == ["odd", "file", "only-here"]


def test_stop_is_in_order(host: Host) -> None:
    host.stop()
    assert (host.tree / "root/was-stopped").exists()
    host.boot()


def test_what_fails_says_so(host: Host) -> None:
    with pytest.raises(LabError, match="No such file"):
        host.read("/nowhere")
    with pytest.raises(LabError, match="no name for a host"):
        host.lab.host("../up")


def test_the_inventory_reaches_the_host_with_pyinfra(lab: Lab, host: Host, tmp_path: Path) -> None:
    inventory = lab.inventory(tmp_path / "inventory.py")
    pyinfra = Path(sys.executable).with_name("pyinfra")
    done = subprocess.run(
        lab.argv(str(pyinfra), str(inventory), "--limit", "one", "exec", "--", "id", "-un"),
        capture_output=True, text=True, check=False, timeout=60, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "root" in done.stdout + done.stderr


def test_a_lab_whose_process_was_killed_is_removed_by_the_next(lab: Lab) -> None:
    script = (
        "import os, signal\nfrom tests.lab.nspawn import Lab\n"
        "lab = Lab().__enter__()\nhost = lab.host('gone')\n"
        "print(lab.name, host.leader, flush=True)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    repo = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=repo,
                          check=False)  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr
    name, leader = done.stdout.split()
    nspawn.until(lambda: not nspawn.ticks(int(leader)), 20, "the host ends with its lab")
    left = nspawn_image.lab_dir() / "labs" / name
    assert left.exists()
    nspawn.sweep()
    assert not left.exists()
    assert not list(Path("/run/netns").glob(f"{name}*"))
    assert name not in Path("/proc/mounts").read_text()
    assert not [group for top in cgroups.tops() for group in top.glob(f"{name}*")]
    # the one that is in use was left alone
    assert lab.hosts[0].alive()
    assert lab.hosts[0].root("id", "-u").strip() == "0"
