"""Which drive is claimed, and what stands against it: a table of hosts, settings and answers."""

from __future__ import annotations

from typing import Any

import pytest

from kvhost.drives.claim import Claim
from kvhost.drives.claim_match import sizes, wwn_digits
from kvhost.drives.order import drive_order
from kvhost.drives.types import Drives
from kvhost.onhost import drive_journal
from kvhost.onhost.drive_probe import ERASABLE, NEVER
from kvhost.settings import Settings
from tests.claim_cases import (
    FOREIGN_MOUNT,
    LINK,
    MARKER,
    MOUNT,
    NOTHING,
    OWN_FINDINGS,
    OWN_MOUNTED,
    SERIAL,
    claimed,
    device,
    drive,
    drives,
    ok,
    other,
    own,
    place,
    token_for,
)

pytestmark = pytest.mark.drives
BLANK = drives(drive(), other())
TWIN = drive(name="nvme1n1", path="/dev/nvme1n1", serial="S7KHNJ0W999999B",
             wwn="eui.0025385b71b00002", by_id=None, by_ids=[])  # fmt: skip
MATCHES: list[tuple[str, dict[str, Any]]] = [
    ("by_id", {"drive_by_id": LINK}),
    ("by_id, its name alone", {"drive_by_id": LINK.rpartition("/")[2]}),
    ("by_id, another link", {"drive_by_id": "nvme-eui.0025385b71b00001"}),
    ("serial", {"drive_serial": SERIAL}),
    ("wwn", {"drive_wwn": "eui.0025385b71b00001"}),
    ("wwn in digits", {"drive_wwn": "0x0025385B71B00001"}),
    ("wwn as udev names it", {"drive_wwn": "nvme-eui.0025385b71b00001"}),
    ("model", {"drive_model": "Samsung SSD 990 PRO*"}),
    ("model with ?", {"drive_model": "Samsung SSD 9?0 PRO 2TB"}),
    ("transport", {"drive_transport": "nvme"}),
    ("at least 2TB", {"drive_min_size": "2TB"}),
    ("at least 1.8TiB", {"drive_min_size": "1.8TiB"}),
    ("between", {"drive_min_size": "1.9TB", "drive_max_size": "2.1TB"}),
    ("all together", {"drive_by_id": LINK, "drive_serial": SERIAL, "drive_model": "Samsung*",
                      "drive_min_size": "2TB", "drive_max_size": "2.1TB",
                      "drive_transport": "nvme", "drive_wwn": "eui.0025385b71b00001"}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "settings"), MATCHES, ids=[row[0] for row in MATCHES])
def test_a_blank_drive_that_fits_is_formatted(name: str, settings: dict[str, Any]) -> None:
    found = claimed(BLANK, **settings)
    assert not found.refusals
    (one,) = found.claimed
    assert (one.device.serial, one.action, one.token) == (SERIAL, "format", None)


MISSES: list[tuple[str, dict[str, Any], str]] = [
    ("another serial", {"drive_serial": "XYZ"}, "drive_serial: is S7KHNJ0W123456A"),
    ("a digit wrong", {"drive_serial": "S7KHNJ0W123457A"},
     "near: /dev/nvme0n1: drive_serial is S7KHNJ0W123456A, and S7KHNJ0W123457A is asked for"),
    ("small letters", {"drive_serial": SERIAL.lower()}, "near: /dev/nvme0n1"),
    ("a link that is near", {"drive_by_id": LINK[:-1] + "B"}, f"{SERIAL}, and nvme-Samsung"),
    ("a wwn that is near", {"drive_wwn": "eui.0025385b71b00003"}, "near: /dev/nvme0n1: drive_wwn"),
    ("another wwn", {"drive_wwn": "naa.1111111111111111"}, "drive_wwn: is eui.0025385b71b00001"),
    ("the model in small letters", {"drive_model": "samsung*"}, "drive_model = 'Samsung SSD"),
    ("the model without its end", {"drive_model": "Samsung SSD 990"}, "drive_model = 'Samsung SSD"),
    ("2TB is not 2TiB", {"drive_min_size": "2TiB"},
     "it has 2.000 TB (1.819 TiB): drive_min_size = '2TB' would be true of it"),
    ("500 GB are not 470 GiB", {"drive_transport": "sata", "drive_min_size": "470GiB"},
     "it has 0.500 TB (0.455 TiB): drive_min_size = '470GB' would be true of it"),
    ("too large", {"drive_min_size": "4TB"}, "less than 4TB"),
    ("another transport", {"drive_transport": "sas"}, "drive_transport: is sata"),
    ("one of two is wrong", {"drive_serial": SERIAL, "drive_transport": "sata"}, "FITS"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "settings", "said"), MISSES, ids=[row[0] for row in MISSES])
def test_nothing_fits(name: str, settings: dict[str, Any], said: str) -> None:
    (refusal,) = claimed(BLANK, **settings).refusals
    assert refusal.code == "drive_not_found"
    if said != "FITS":
        assert said in refusal.found
    assert "FITS" not in refusal.found
    for word in ("/dev/nvme0n1", SERIAL, LINK, "/dev/sda", "2.000 TB (1.819 TiB)", "CT500MX500SSD1",
                 "the running system lies on it", "not claimed: "):  # fmt: skip
        assert word in refusal.found, "all drives are listed with all that is known of them"


def refused(found: Claim) -> dict[str, str]:
    """Code -> all that its refusal says."""
    assert found.refusals and not found.claimed, "never half of a claim"
    assert "all drives here:\n- " in found.refusals[0].found
    return {r.code: f"{r.what} | {r.found} | {r.fix}" for r in found.refusals}


BY_SERIAL: dict[str, Any] = {"drive_serial": SERIAL}
LOOP: dict[str, Any] = {
        "name": "loop3", "path": "/dev/loop3", "transport": "loop", "model": "loop device",
        "serial": "/srv/a.img", "wwn": "loop.1-2", "by_id": None, "by_ids": [],
        "backing": {"path": "/srv/a.img", "dev": 1, "inode": 2}, "health": NOTHING}  # fmt: skip
Case = tuple[str, Drives, dict[str, Any], str, str]
REFUSED: list[Case] = [
    # which drive
    ("no drive at all", drives(), BY_SERIAL, "drive_not_found", "none: the kernel shows no drive"),
    ("two fit", drives(drive(), TWIN), {"drive_model": "Samsung*"}, "drive_ambiguous", "2 drives"),
    ("the system's fits too", BLANK, {"drive_min_size": "100GB"}, "drive_ambiguous", "/dev/sda"),
    ("three, two wanted", drives(drive(), TWIN, other()), {"drive_min_size": "1GB",
     "drive_count": 2}, "drive_ambiguous", "3 drives fit"),
    ("one, two wanted", BLANK, {"drive_transport": "nvme", "drive_count": 2}, "drive_too_few",
     "drive_count = 1"),
    ("one serial twice", drives(drive(), drive(name="nvme1n1", path="/dev/nvme1n1", wwn=None)),
     BY_SERIAL, "drive_ambiguous", "/dev/nvme1n1"),
    ("one wwn twice", drives(drive(), drive(name="sdb", path="/dev/sdb", serial="other")),
     BY_SERIAL, "drive_not_unique", "both: WWN eui.0025385b71b00001"),
    ("one serial twice, no wwn", drives(drive(wwn=None), drive(wwn=None, name="sdb",
     path="/dev/sdb", transport="usb")), {**BY_SERIAL, "drive_transport": "nvme"},
     "drive_not_unique", f"serial {SERIAL}"),
    ("a loop device not asked for", drives(drive(**LOOP)), {"drive_serial": "/srv/a.img"},
     "drive_not_found", "a loop device is taken only with drive_transport = 'loop'"),
    ("a disk of the system", BLANK, {"drive_transport": "sata"}, "drive_in_use",
     "the running system lies on it"),
    # what is in use
    *[(kind, drives(drive((kind, f"detail of {kind}"))), BY_SERIAL, code, f"detail of {kind}")
      for kind, code in (
          *((kind, "drive_in_use") for kind in ("system", "mounted", "holder", "swap", "busy",
                                                "in_use", "fstab")),
          *((kind, "drive_not_usable") for kind in ("read_only", "health", "no_identity", "fabric",
                                                    "multipath", "hidden", "zoned",
                                                    "not_a_drive")))],
    ("a kind that nobody knows", drives(drive(("new", "?"))), BY_SERIAL, "drive_not_usable", "new"),
    ("mounted, with its right token",
     drives(drive(("mounted", "nvme0n1 at /data (ext4)"), ("signature", "ext4 at 1080"))),
     {**BY_SERIAL, "drive_erase": token_for(drive(("mounted", "nvme0n1 at /data (ext4)"),
                                                  ("signature", "ext4 at 1080")))},
     "drive_in_use", "umount"),
    ("not readable", drives(drive(why="wipefs is not installed")), BY_SERIAL, "unreadable",
     "wipefs is not installed"),
    # what holds something
    *[(f"{kind} without a token", drives(drive((kind, "something"))), BY_SERIAL,
       "drive_not_blank", token_for(drive((kind, "something")))) for kind in sorted(ERASABLE)],
    ("a token of another finding", drives(drive(("signature", "ext4 B at 1080"))),
     {**BY_SERIAL, "drive_erase": token_for(drive(("signature", "ext4 A at 1080")))},
     "drive_not_blank", "of another drive, machine or state"),
    ("a token of one finding of two", drives(drive(("signature", "a"), ("signature", "b"))),
     {**BY_SERIAL, "drive_erase": token_for(drive(("signature", "a")))}, "drive_not_blank", "b"),
    ("a token of another drive", drives(drive(("signature", "a"))),
     {**BY_SERIAL, "drive_erase": token_for(drive(("signature", "a"), serial="X"))},
     "drive_not_blank", "another drive"),
    ("a token of another machine", drives(drive(("signature", "a"))),
     {**BY_SERIAL, "drive_erase": token_for(drive(("signature", "a")), "f" * 32)},
     "drive_not_blank", "machine"),
    ("no machine-id", drives(drive(("signature", "a")), machine_id=None), BY_SERIAL,
     "drive_not_blank", "without /etc/machine-id"),
    ("a journal that cannot be read", drives(drive(), journal={"status": "unreadable",
     "why": "torn", "data": None}), BY_SERIAL, "unreadable", "torn"),
    # sizes
    ("too small for the limit", drives(drive(size_bytes=10**11)), {**BY_SERIAL,
     "cache_limit_gib": 100.0}, "drive_too_small", "cache_limit_gib = 86"),
    ("too small for anything", drives(drive(size_bytes=10**9)), BY_SERIAL, "drive_too_small",
     "1.00 GB"),
    ("too small for XFS", drives(drive(size_bytes=200 << 20)), {**BY_SERIAL,
     "cache_limit_gib": 0.05, "free_floor_gib": 0.01}, "drive_too_small", "claim a larger"),
    # the mount point
    ("files in it", drives(drive(), mount_point=place(kind="directory", entries=["a", "b"])),
     BY_SERIAL, "mount_point_taken", "a, b"),
    ("another mount", drives(drive(), mount_point=place(kind="directory", drives=["sdb"],
     mounts=["/dev/sdb1 (xfs)"], filesystem="xfs")), BY_SERIAL,
     "mount_point_taken", "/dev/sdb1 (xfs)"),
    ("a network mount", drives(drive(), mount_point=place(kind="directory", mounts=["nas:/x (nfs)"],
     filesystem="nfs")), BY_SERIAL, "mount_point_taken", "nas:/x (nfs)"),
    ("a file", drives(drive(), mount_point=place(kind="other")), BY_SERIAL, "mount_point_taken",
     "no directory"),
    ("behind a link", drives(drive(), mount_point=place(real_path="/mnt/x")), BY_SERIAL,
     "mount_point_taken", "drive_mount = '/mnt/x'"),
    ("a foreign line in fstab", drives(drive(), mount_point=place(fstab=["LABEL=old"])), BY_SERIAL,
     "mount_point_taken", "LABEL=old"),
    ("not known", drives(drive(), mount_point={"status": "unreadable", "why": "I/O error",
     "data": None}), BY_SERIAL, "unreadable", "I/O error"),
    # kvhost's own
    ("own, another filesystem", drives(drive(*OWN_FINDINGS, kvhost=own(filesystem="ext4"))),
     BY_SERIAL, "drive_filesystem_differs", "drive_filesystem = 'ext4'"),
    ("own, encrypted", drives(drive(*OWN_FINDINGS, kvhost=own(encrypted=True,
     filesystem="crypto_LUKS"))), BY_SERIAL, "drive_filesystem_differs", "drive_encrypt = True"),
    ("own, not encrypted", drives(drive(*OWN_FINDINGS, kvhost=own())),
     {**BY_SERIAL, "drive_encrypt": True}, "drive_filesystem_differs", "drive_encrypt = False"),
    ("own, mounted elsewhere", drives(drive(*OWN_MOUNTED, kvhost=own(mounted_at=["/srv/x"]))),
     BY_SERIAL, "drive_in_use", "drive_mount = '/srv/x'"),
    ("own, marker not readable", drives(drive(*OWN_MOUNTED, kvhost=own(mounted_at=[MOUNT],
     marker={"status": "unreadable", "why": "I/O error", "data": None}))), BY_SERIAL, "unreadable",
     "I/O error"),
    ("own, and swap", drives(drive(*OWN_FINDINGS, ("swap", "x"), kvhost=own())), BY_SERIAL,
     "drive_in_use", "swap"),
    ("own, the mount point is taken", drives(drive(*OWN_FINDINGS, kvhost=own()),
     mount_point=place(kind="directory", entries=["a"])), BY_SERIAL, "mount_point_taken", "a"),
    # adopted
    ("mounted there, not adopted", drives(drive(*FOREIGN_MOUNT), mount_point=place(
     kind="directory", mounts=["/dev/nvme0n1 (xfs)"], filesystem="xfs", drives=["nvme0n1"])),
     BY_SERIAL, "drive_not_adoptable", "drive_adopt = True"),
    ("adopted, another filesystem", drives(drive(*FOREIGN_MOUNT), mount_point=place(
     kind="directory", mounts=["/dev/nvme0n1 (zfs)"], filesystem="zfs", drives=["nvme0n1"])),
     {**BY_SERIAL, "drive_adopt": True}, "drive_not_adoptable", "zfs"),
    ("adopted, not empty", drives(drive(*FOREIGN_MOUNT), mount_point=place(kind="directory",
     mounts=["/dev/nvme0n1 (xfs)"], filesystem="xfs", drives=["nvme0n1"], entries=["photos"])),
     {**BY_SERIAL, "drive_adopt": True}, "drive_not_adoptable", "photos"),
    ("adopted, over two drives", drives(drive(*FOREIGN_MOUNT), mount_point=place(kind="directory",
     mounts=["pool (btrfs)"], filesystem="btrfs", drives=["nvme0n1", "sda"])),
     {**BY_SERIAL, "drive_adopt": True}, "drive_in_use", "mounted"),
    ("adopted, mounted twice", drives(drive(*FOREIGN_MOUNT, ("mounted", "nvme0n1 at /data (xfs)")),
     mount_point=place(kind="directory", mounts=["/dev/nvme0n1 (xfs)"], filesystem="xfs",
     drives=["nvme0n1"])), {**BY_SERIAL, "drive_adopt": True}, "drive_in_use", "/data"),
    ("adopted, on LVM", drives(drive(*FOREIGN_MOUNT, ("holder", "dm-0 (lvm) is built on it")),
     mount_point=place(kind="directory", mounts=["/dev/dm-0 (xfs)"], filesystem="xfs",
     drives=["nvme0n1"])), {**BY_SERIAL, "drive_adopt": True}, "drive_in_use", "lvm"),
    ("adopt, not mounted", drives(drive(("signature", "xfs"))), {**BY_SERIAL, "drive_adopt": True},
     "drive_not_blank", "xfs"),
    # ephemeral
    ("a lasting disk of a cloud", drives(drive(model="Amazon Elastic Block Store")),
     {"drive_model": "Amazon*", "drive_ephemeral": True}, "drive_not_ephemeral", "Block Store"),
    ("a lasting disk of another", drives(drive(model="nvme_card-pd")),
     {"drive_model": "nvme*", "drive_ephemeral": True}, "drive_not_ephemeral", "nvme_card-pd"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "found", "settings", "code", "said"), REFUSED, ids=[row[0] for row in REFUSED]
)
def test_refused(
    name: str, found: Drives, settings: dict[str, Any], code: str, said: str
) -> None:  # fmt: skip
    codes = refused(claimed(found, **settings))
    assert code in codes
    assert said in codes[code]
    if code != "drive_not_blank":
        assert "erase-" not in "".join(codes.values()), "no token is offered for what none allows"


def test_there_are_enough_cases() -> None:
    assert len(MATCHES) + len(MISSES) + len(REFUSED) >= 90
    kinds = {f.kind for _, found, *_ in REFUSED for d in found.drives for f in d.findings}
    assert kinds >= ERASABLE | NEVER, "each kind of finding has a case"


TAKEN: list[tuple[str, Drives, dict[str, Any], str]] = [
    ("own, mounted", drives(drive(*OWN_MOUNTED, kvhost=own(mounted_at=[MOUNT], marker=MARKER))),
     {}, "keep"),
    ("own, mounted, two findings of nobody", drives(drive(*OWN_MOUNTED, ("in_use", "udevd"),
     kvhost=own(mounted_at=[MOUNT, "/bind"], marker=MARKER))), {}, "keep"),
    ("own, failing", drives(drive(*OWN_MOUNTED, ("health", "x"), kvhost=own(mounted_at=[MOUNT],
     marker=MARKER))), {}, "keep"),
    ("own, not mounted", drives(drive(*OWN_FINDINGS, kvhost=own())), {}, "mount"),
    ("own, marker not written yet", drives(drive(*OWN_MOUNTED, kvhost=own(mounted_at=[MOUNT]))),
     {}, "mount"),
    ("own, encrypted and closed", drives(drive(*OWN_FINDINGS, kvhost=own(encrypted=True,
     filesystem="crypto_LUKS"))), {"drive_encrypt": True}, "mount"),
    ("own, with a token for it", drives(drive(*OWN_FINDINGS, kvhost=own())),
     {"drive_erase": token_for(drive(*OWN_FINDINGS))}, "mount"),
    ("adopted", drives(drive(*FOREIGN_MOUNT), mount_point=place(kind="directory",
     mounts=["/dev/nvme0n1 (xfs)"], filesystem="xfs", drives=["nvme0n1"], entries=["lost+found"])),
     {"drive_adopt": True}, "adopt"),
    ("adopted, with its line in fstab", drives(drive(*FOREIGN_MOUNT, ("fstab", MOUNT)),
     mount_point=place(kind="directory", mounts=["/dev/nvme0n1 (xfs)"], filesystem="xfs",
     drives=["nvme0n1"], fstab=["UUID=1"])), {"drive_adopt": True}, "adopt"),
    ("adopted before", drives(drive(*FOREIGN_MOUNT), mount_point=place(kind="directory",
     mounts=["/dev/nvme0n1 (xfs)"], filesystem="xfs", drives=["nvme0n1"], marker=MARKER,
     entries=[".kvhost-drive.json", "tier"])), {"drive_adopt": True}, "adopt"),
    ("blank, an empty mount point", drives(drive(), mount_point=place(kind="directory")), {},
     "format"),
    ("shareable, with its token", drives(drive(("shareable", "x"))),
     {"drive_erase": token_for(drive(("shareable", "x")))}, "format"),
    ("the right token", drives(drive(("signature", "ext4 at 1080"), ("partition_table", "gpt"))),
     {"drive_erase": token_for(drive(("partition_table", "gpt"), ("signature", "ext4 at 1080")))},
     "format"),
    ("an instance store", drives(drive(model="Amazon EC2 NVMe Instance Storage")),
     {"drive_serial": None, "drive_transport": "nvme", "drive_ephemeral": True}, "format"),
    ("a loop device asked for", drives(drive(**LOOP)), {"drive_serial": "/srv/a.img",
     "drive_transport": "loop"}, "format"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "found", "settings", "action"), TAKEN, ids=[row[0] for row in TAKEN]
)
def test_taken(name: str, found: Drives, settings: dict[str, Any], action: str) -> None:
    answer = claimed(found, **{**BY_SERIAL, **settings})
    assert not answer.refusals
    assert [one.action for one in answer.claimed] == [action]


def test_several_drives_are_all_judged() -> None:
    wanted: dict[str, Any] = {"drive_model": "Samsung*", "drive_count": 2}
    both = claimed(drives(drive(), TWIN), **wanted)
    assert [one.device.name for one in both.claimed] == ["nvme0n1", "nvme1n1"]
    held = drive(
        ("signature", "a"), name="nvme1n1", path="/dev/nvme1n1", serial="B", wwn="eui.2222"
    )
    half = refused(claimed(drives(drive(), held), **wanted))
    assert set(half) == {"drive_not_blank"} and token_for(held) in half["drive_not_blank"]
    allowed = claimed(drives(drive(), held), **wanted, drive_erase=token_for(held))
    assert [one.token for one in allowed.claimed] == [token_for(held), token_for(held)]
    tokens = f"{token_for(held)},{'erase-' + '0' * 32}"
    assert claimed(drives(drive(), held), **wanted, drive_erase=tokens).claimed[1].token == (
        token_for(held)
    )


def test_an_array_that_lost_a_drive_is_not_made_anew() -> None:
    wanted: dict[str, Any] = {"drive_model": "Samsung*", "drive_count": 2}
    member = drive(*OWN_FINDINGS, kvhost=own(filesystem="linux_raid_member", encrypted=None))
    codes = refused(claimed(drives(member, TWIN), **wanted))
    assert set(codes) == {"drive_set_differs"} and "/dev/nvme1n1" in codes["drive_set_differs"]
    both = drive(*OWN_FINDINGS, name="nvme1n1", path="/dev/nvme1n1", serial="B", wwn="eui.2222",
                 kvhost=own(filesystem="linux_raid_member", encrypted=None))  # fmt: skip
    whole = claimed(drives(member, both), **wanted)
    assert [one.action for one in whole.claimed] == ["mount", "mount"]


def test_nothing_is_claimed_where_nothing_is_asked_for() -> None:
    assert claimed(BLANK) == Claim((), ())


def test_a_run_that_was_cut_off_is_gone_on_with_on_its_own_drive_alone() -> None:
    half = drive(("partition_table", "gpt"))
    journal = drive_journal.new([drive_journal.new_drive(device(), None)], "xfs")
    (one,) = claimed(drives(half, journal=ok(journal)), **BY_SERIAL).claimed
    assert one.resumes and one.action == "format"
    others = drive_journal.new([drive_journal.new_drive(device(serial="X"), None)], "xfs")
    assert "drive_not_blank" in refused(claimed(drives(half, journal=ok(others)), **BY_SERIAL))


def test_a_token_for_data_that_only_a_full_reading_finds_is_handed_on() -> None:
    given = f"erase-{'a' * 32}"
    (one,) = claimed(BLANK, **BY_SERIAL, drive_erase=given).claimed
    assert one.token == given


@pytest.mark.parametrize("key", ["by_id", "wwn", "serial", "model", "size_bytes"])
def test_a_token_is_of_one_drive(key: str) -> None:
    mine = drive(("signature", "a"))
    assert token_for(mine) != token_for(drive(("signature", "a"), **{key: "x"}))


def test_a_token_is_of_one_machine_and_one_state_whatever_the_order_and_the_name() -> None:
    mine = drive(("signature", "a"), ("partition_table", "b"))
    assert token_for(mine) != token_for(mine, "f" * 32)
    assert token_for(mine) != token_for(drive(("signature", "a")))
    more = drive(("signature", "a"), ("partition_table", "b "))
    assert token_for(mine) != token_for(more)
    moved = drive(("partition_table", "b"), ("signature", "a"), name="nvme7n1", path="/dev/nvme7n1",
                  maj_min="259:9", diskseq=77)  # fmt: skip
    assert token_for(mine) == token_for(moved), "a reboot gives other names"
    loop = drive(**LOOP)
    swapped = drive(**{**LOOP, "backing": {"path": "/srv/a.img", "dev": 1, "inode": 3}})
    assert token_for(loop) != token_for(swapped)


def test_the_order_says_what_the_plan_saw() -> None:
    row = drive(("signature", "a"))
    settings = Settings(drive_serial=SERIAL, drive_erase=token_for(row), drive_mount="/srv/d",
                        drive_filesystem="btrfs", drive_blank_check="sampled")  # fmt: skip
    found = claimed(drives(row, mount_point=place(real_path="/srv/d")),
                    **settings.model_dump(exclude_unset=True))  # fmt: skip
    order = drive_order(settings, found.claimed)
    picked = {key: device()[key] for key in order["drive"]}
    assert order == {
        "schema": 1, "drive": picked, "findings": row["findings"], "action": "format",
        "token": token_for(row), "filesystem": "btrfs", "mount": "/srv/d", "owner": "kvhost",
        "blank_check": "sampled", "encrypt": False, "ephemeral": False,
    }  # fmt: skip
    assert set(order["drive"]) >= {"path", "by_id", "wwn", "serial", "model", "size_bytes",
                                   "maj_min", "diskseq", "backing"}  # fmt: skip


def test_wwns_are_compared_by_their_digits() -> None:
    same = ("naa.5000c500a1b2c3d4", "0x5000C500A1B2C3D4", "wwn-0x5000c500a1b2c3d4",
            "50:00:c5:00:a1:b2:c3:d4", "5000c500-a1b2c3d4")  # fmt: skip
    assert {wwn_digits(word) for word in same} == {"5000c500a1b2c3d4"}
    assert wwn_digits("eui.0025385b71b00001") == "0025385b71b00001"


def test_sizes_are_said_as_makers_and_systems_say_them() -> None:
    assert sizes(2_000_398_934_016) == "2.000 TB (1.819 TiB)"
    assert sizes(64 << 20) == "0.067 GB (0.062 GiB)"
