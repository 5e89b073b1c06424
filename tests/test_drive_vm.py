"""Claimed NVMe drives on hosts with a kernel, udev and systemd of their own.

The tests of one class are one story on the same hosts, told in order.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.drive_vm_tools import MOUNT, full_drive, mounted_from, storage
from tests.lab.qemu import Drive, Machine
from tests.lab.vm import Lab, settle

pytestmark = [
    pytest.mark.full,
    pytest.mark.drives,
    pytest.mark.skipif(os.geteuid() != 0, reason="the test hosts need root"),
]
CLAIM = {"drive_serial": "KVBLANK"}


@dataclass
class Story:
    lab: Lab
    folder: Path
    blank: Drive
    others: list[Drive]
    host: Machine
    digests: dict[str, str] = field(default_factory=dict)

    def untouched(self) -> bool:
        return {drive.serial: drive.digest() for drive in self.others} == self.digests


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    with Lab() as lab:
        blank, letters = lab.drive("KVBLANK", "1G"), full_drive(lab, "KVLETTERS")
        others = [letters, full_drive(lab, "KVOTHER")]
        digests = {drive.serial: drive.digest() for drive in others}
        host = lab.host("a", [letters, blank])
        yield Story(lab, tmp_path_factory.mktemp("vm"), blank, others, host, digests)


class TestOneDriveForLong:
    def test_two_hosts_of_which_one_is_refused(self, story: Story) -> None:
        other = story.lab.host("b", [story.others[1]])
        ran = storage(story.folder, {story.host: CLAIM, other: {"drive_serial": "KVOTHER"}})
        assert ran.code != 0
        assert "drive_not_blank" in ran.refusals("b"), ran.text
        assert not ran.refusals("a"), ran.text
        other.kill()
        assert mounted_from(story.host) == "KVBLANK", ran.text
        assert story.untouched()

    def test_names_swapped_across_a_power_cut_and_a_second_run(self, story: Story) -> None:
        story.host.ssh(f"echo kept > {MOUNT}/kept && sync")
        before, fstab = story.host.names(), story.host.ssh("cat /etc/fstab").stdout
        for _ in range(4):  # a name is given to whichever drive answers first
            slots = story.host.slots
            story.host.rewire({0: slots[1], 1: slots[0]})
            if story.host.names() != before:
                break
        assert story.host.names() != before
        assert mounted_from(story.host) == "KVBLANK"
        assert story.host.ssh(f"cat {MOUNT}/kept").stdout == "kept\n"
        ran = storage(story.folder, {story.host: CLAIM})
        assert ran.code == 0 and ran.operations(), ran.text
        assert ran.changed() == [], ran.text
        assert story.host.ssh("cat /etc/fstab").stdout == fstab
        assert story.untouched()

    def test_the_drive_is_pulled(self, story: Story) -> None:
        letters = story.others[0]
        story.host.rewire({0: letters})
        assert mounted_from(story.host) == ""
        # nothing can fill the root disk in the drive's place, not even root
        assert story.host.ssh(f"touch {MOUNT}/x", check=False).returncode != 0
        assert story.host.ssh(f"mkdir -p {MOUNT}/tier", check=False).returncode != 0
        assert story.host.ssh(f"ls -A {MOUNT}").stdout == ""
        ran = storage(story.folder, {story.host: CLAIM})
        assert ran.code != 0
        said = ran.refusals("a")
        assert "KVLETTERS" in said.get("drive_not_found", ""), ran.text
        assert story.host.ssh(f"ls -A {MOUNT}").stdout == ""
        assert story.untouched()

    def test_the_drive_is_back(self, story: Story) -> None:
        story.host.plug(1, story.blank)
        settle(story.host)
        ran = storage(story.folder, {story.host: CLAIM})
        assert ran.code == 0, ran.text
        assert story.host.ssh(f"cat {MOUNT}/kept").stdout == "kept\n"
        assert story.untouched()
