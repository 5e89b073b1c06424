"""The stage driver on a real host, with doubles of the packages: installed, held, rebooted."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from kvhost.onhost import driver_apply
from tests.driver_site import (
    BASE,
    KERNEL,
    MODULE,
    OLDER,
    VERSION,
    DriverSite,
    driver_debs,
    driver_site,
    versions,
)
from tests.e2e_tools import REPO
from tests.lab.apt_repo import Deb, Repo
from tests.lab.nspawn import Host, until

pytestmark = [
    pytest.mark.systemd,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: namespaces, mounts, containers"),
]
STAGE = "driver: installed, held and loaded"
WANTED = {"nvidia-driver-cuda", "libcuda1", "libnvidia-ml1", "nvidia-smi", "nvidia-persistenced",
          "nvidia-kernel-open-dkms"}  # fmt: skip


def plain(text: str) -> str:
    """Without the lines and breaks of a table."""
    return " ".join(re.sub("[│┃|]", " ", text).split())


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DriverSite]:
    with driver_site(tmp_path_factory.mktemp("driver")) as made:
        yield made


def test_without_the_setting_nothing_is_installed_and_the_way_is_told(site: DriverSite) -> None:
    done = site.pyinfra()
    assert done.code != 0
    assert "the GPU is held by nouveau" in plain(done.text), done.text
    assert "driver_install = true lets kvhost do it" in plain(done.text)
    assert versions(site.host) == {}


def test_the_branch_that_was_decided_is_installed_and_held(site: DriverSite) -> None:
    done = site.pyinfra(**site.data)
    assert done.code != 0  # it may not reboot the host
    assert "this host has to be rebooted for it" in done.text, done.text
    host = site.host
    assert host.boots == 1
    # of the branch, neither the newest of all nor the older one
    assert versions(host) == dict.fromkeys(WANTED, (f"{VERSION}-1", True))
    assert host.read(MODULE).strip() == VERSION
    source = host.read("/etc/apt/sources.list.d/kvhost-driver.sources")
    assert f"URIs: {site.address}vendor/files/" in source
    assert "Signed-By: /etc/apt/keyrings/kvhost-driver.asc" in source
    assert "trusted" not in source.lower()
    assert "blacklist nouveau" in host.read("/etc/modprobe.d/kvhost-nouveau.conf")
    assert '"nvidia-";' in host.root("apt-config", "dump", "Unattended-Upgrade::Package-Blacklist")
    enabled = host.root("systemctl", "is-enabled", "nvidia-persistenced.service")
    assert enabled.strip() == "enabled"


def test_an_upgrade_leaves_the_driver_and_takes_the_rest(site: DriverSite) -> None:
    site.vendor.add(*driver_debs("580.105.08"))
    site.distribution.add(Deb("bystander", "2.0"))
    host = site.host
    host.root("apt-get", "-q", "update")
    host.root("apt-get", "-q", "install", "-y", "bystander=1.0")
    host.root("env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-q", "-y", "dist-upgrade")
    after = versions(host)
    assert after.pop("bystander") == ("2.0", False)
    assert after == dict.fromkeys(WANTED, (f"{VERSION}-1", True))


def test_with_consent_it_reboots_and_goes_on(site: DriverSite) -> None:
    done = site.pyinfra(driver_reboot="true", **site.data)
    assert done.code == 0, done.text
    assert site.host.boots == 2
    assert STAGE in done.changed()
    assert versions(site.host)["nvidia-driver-cuda"] == (f"{VERSION}-1", True)
    kept = json.loads(site.host.read(f"{BASE}/state/driver.json"))
    assert (kept["finished"], kept["version"]) == (True, VERSION)


def test_the_second_run_changes_nothing(site: DriverSite) -> None:
    done = site.pyinfra(driver_reboot="true", **site.data)
    assert (done.code, done.changed()) == (0, []), done.text
    assert f"driver {VERSION} as it is" in plain(done.text), done.text
    assert site.host.boots == 2


# The script alone, on a second host, where nouveau does not hold the card: what stands in its way


@pytest.fixture(scope="module")
def bare(site: DriverSite) -> Bare:
    return Bare(site, site.new_host("bare", nouveau=False))


def order(site: DriverSite, repo: Repo, **install: Any) -> dict[str, Any]:
    names = ["nvidia-driver-cuda", "nvidia-kernel-open-dkms", "nvidia-persistenced"]
    folder = repo.folder.relative_to(site.folder / "served")
    source = {"uri": f"{site.address}{folder}/", "key": repo.key, "key_url": None,
              "fingerprint": None}  # fmt: skip
    wanted = {"branch": 580, "version": OLDER, "main": "nvidia-driver-cuda", "names": names,
              "source": source, **install}  # fmt: skip
    return {"code": "driver_missing", "kernel": KERNEL, "headers": f"linux-headers-{KERNEL}",
            "build": False, "fabric_manager": False, "install": wanted}  # fmt: skip


#: in the place of kmod's: what lies ready is loaded
MODPROBE = f"""#!/bin/sh
[ -s {MODULE} ] || exit 1
cd /proc/driver && mkdir -p nvidia
echo "NVRM version: NVIDIA UNIX Open Kernel Module  $(cat {MODULE})  x" > nvidia/version
"""


class Bare:
    """A host with the script and what it reads beside it; no deploy was here."""

    def __init__(self, site: DriverSite, host: Host) -> None:
        self.site, self.host = site, host
        for folder in ("bin", "state", "run"):
            host.root("mkdir", "-p", f"{BASE}/{folder}")
        for name in ("driver_apply", "driver_look", "report_gpu"):
            host.write(f"{BASE}/bin/{name}.py", (REPO / f"kvhost/onhost/{name}.py").read_text())
        host.root("rm", "/usr/sbin/modprobe")
        host.write("/usr/sbin/modprobe", MODPROBE)
        host.root("chmod", "755", "/usr/sbin/modprobe")

    def apply(self, order: dict[str, Any], die_after: str = "", code: int = 0) -> str:
        self.host.write(f"{BASE}/state/driver-order.json", json.dumps(order))
        words = ("python3", f"{BASE}/bin/driver_apply.py", "apply", "--base", BASE,
                 "--order", f"{BASE}/state/driver-order.json")  # fmt: skip
        argv = self.host.root_argv("env", f"KVHOST_TEST_DIE_AFTER=driver:{die_after}", *words)
        done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr
        return done.stdout if code == 0 else done.stderr

    @contextlib.contextmanager
    def process(self, script: str) -> Iterator[int]:
        """A shell's commands on the host, while they are wanted; its PID there."""
        self.host.root("touch", "/dev/nvidia0")
        told = f"echo $$ > /run/test.pid; {script}"
        child = subprocess.Popen(self.host.root_argv("sh", "-c", told))
        try:
            until(lambda: self.host.root("cat", "/run/test.pid", ok=False).strip(), 10, "it runs")
            until(lambda: "sleep" in self.host.root(
                "sh", "-c", "cat /proc/$(cat /run/test.pid)/comm"), 10, "it sleeps")  # fmt: skip
            yield int(self.host.read("/run/test.pid"))
        finally:
            child.kill()
            child.wait()
            self.host.root("sh", "-c", "kill -9 $(cat /run/test.pid)", ok=False)
            self.host.root("rm", "/run/test.pid")

    def files(self) -> str:
        """Of what the script writes: digests and times."""
        places = "/etc/apt /etc/modprobe.d /lib/modules"
        return self.host.root("sh", "-c", f"find {places} -type f -printf '%p %T@ %s\\n' | sort")

    def untouched(self) -> bool:
        return versions(self.host) == {} and not self.host.root("ls", "/etc/apt/preferences.d")


def test_what_runs_is_not_pulled_away(site: DriverSite, bare: Bare) -> None:
    wanted = order(site, site.vendor)
    with bare.process("exec 3<>/dev/nvidia0; exec sleep 60"):
        assert "in use: sleep (" in bare.apply(wanted, code=1)
    with bare.process("exec sleep 60") as pid:
        stat = bare.host.read(f"/proc/{pid}/stat").rpartition(")")[2].split()
        bare.host.write(f"{BASE}/run/runner.json",
                        json.dumps({"pid": pid, "start_ticks": int(stat[19])}))  # fmt: skip
        assert "in use: kvhost's runner" in bare.apply(wanted, code=1)
    assert bare.untouched()
    assert not bare.host.root("ls", "/etc/apt/keyrings").count("kvhost")


def test_what_is_not_signed_with_the_key_is_not_installed(site: DriverSite, bare: Bare) -> None:
    wanted = order(site, site.other, version=VERSION)
    wanted["install"]["source"]["key"] = site.vendor.key
    said = bare.apply(wanted, code=1)
    assert "apt-get" in said and ("NO_PUBKEY" in said or "not signed" in said), said
    other = order(site, site.vendor)
    other["install"]["source"]["fingerprint"] = "0" * 40  # another key than the one that is pinned
    assert "update ended with" in bare.apply(other, code=1)
    assert bare.untouched()


def test_a_version_that_is_not_offered_is_told(site: DriverSite, bare: Bare) -> None:
    said = bare.apply(order(site, site.vendor, version="580.11.11"), code=1)
    assert "nvidia-driver-cuda 580.11.11 is not offered to this host; offered: " in said
    assert f"{VERSION}-1" in said
    assert bare.untouched()


def test_cut_off_at_every_step_it_is_completed(site: DriverSite, bare: Bare) -> None:
    wanted = order(site, site.vendor)
    for step in driver_apply.STEPS:
        bare.apply(wanted, die_after=step, code=-signal.SIGKILL)
    told = json.loads(bare.apply(wanted))
    assert told == {"ok": True, "why": None, "reboot": False, "version": OLDER}
    assert versions(bare.host) == dict.fromkeys(WANTED, (f"{OLDER}-1", True))
    assert bare.host.root("systemctl", "is-active", "nvidia-persistenced.service") == "active\n"
    before = bare.files()
    bare.apply(wanted)
    assert bare.files() == before


@pytest.mark.full
def test_another_version_takes_its_place_and_the_old_one_is_kept(
    site: DriverSite, bare: Bare
) -> None:
    told = json.loads(bare.apply(order(site, site.vendor, version=VERSION)))
    assert (told["reboot"], told["version"]) == (True, VERSION)  # the old one is loaded
    assert versions(bare.host) == dict.fromkeys(WANTED, (f"{VERSION}-1", True))
    kept = bare.host.root("ls", f"{BASE}/state/driver-before").split()
    assert f"nvidia-driver-cuda_{OLDER}-1_amd64.deb" in kept
    said = json.loads(bare.host.read(f"{BASE}/state/driver-before/driver.json"))
    assert (said["not_kept"], said["kernel"]) == ([], KERNEL)
    # as docs/hazards.md has it
    bare.host.root(
        "sh", "-c",
        "apt-mark unhold $(apt-mark showhold) && rm /etc/apt/preferences.d/kvhost-driver && "
        f"apt-get -y install --allow-downgrades {BASE}/state/driver-before/*.deb",
    )  # fmt: skip
    assert versions(bare.host)["nvidia-smi"] == (f"{OLDER}-1", False)


@pytest.mark.full
def test_what_others_need_is_not_removed(site: DriverSite, bare: Bare) -> None:
    """A program of somebody else's that needs the driver of before."""
    site.distribution.add(Deb("renderfarm", "1.0", f"nvidia-smi (= {OLDER}-1)"))
    bare.host.root("apt-get", "-q", "update")
    bare.host.root("apt-get", "-q", "-y", "install", "renderfarm")
    bare.apply(order(site, site.vendor))  # held again
    said = bare.apply(order(site, site.vendor, version=VERSION), code=1)
    assert "apt would remove renderfarm, which is no part of a driver" in said
    assert versions(bare.host)["nvidia-smi"] == (f"{OLDER}-1", True)
    assert OLDER in bare.host.read("/etc/apt/preferences.d/kvhost-driver")
    # a hold of somebody else's is respected
    bare.host.root("apt-get", "-q", "-y", "purge", "renderfarm")
    state = json.loads(bare.host.read(f"{BASE}/state/driver.json"))
    bare.host.write(f"{BASE}/state/driver.json", json.dumps({**state, "held": []}))
    said = bare.apply(order(site, site.vendor, version=VERSION), code=1)
    assert "held broken packages" in said


@pytest.mark.full
def test_the_whole_run_goes_on_after_the_reboot(site: DriverSite) -> None:
    """Packages, reboot and the stages behind it in one run; the engine itself has no index here."""
    host = site.new_host("whole")
    site.lab.inventory(site.inventory)  # with this host
    data = {"driver_reboot": "true", **site.data}
    done = site.pyinfra("--limit", "whole", script="deploy.py", **data)
    assert host.boots == 2, done.text
    after = done.text.partition(f"Starting operation: {STAGE}")[2]
    assert "after that" not in after  # no refusal
    assert "Starting operation: engine: tools" in after, done.text
    assert done.code != 0
