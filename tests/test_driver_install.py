"""The stage driver on a real host, with doubles of the packages: installed, held, rebooted."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator

import pytest

from tests.driver_site import (
    BASE,
    MODULE,
    VERSION,
    DriverSite,
    driver_debs,
    driver_site,
    versions,
)
from tests.lab.apt_repo import Deb

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
