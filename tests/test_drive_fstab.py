"""kvhost's line in fstab: every text that a host may have, and nothing of others is changed."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from kvhost.onhost import drive_fstab
from kvhost.onhost.drive_disk import Refused

pytestmark = pytest.mark.drives
UUID = "622ee0a4-bf91-400a-ba23-7c1e66a2c2a5"
OTHER = "0b1f2e6c-7d5f-4a53-9a0f-0d7d6d3c1b11"
HERE = "/var/lib/kvhost/drive"
LINE = drive_fstab.entry_for(UUID, HERE, "xfs", "rw,nodev")
OLD = drive_fstab.entry_for(OTHER, HERE, "xfs", "rw")
ROOT = "UUID=1111-2222 / ext4 errors=remount-ro 0 1\n"

KEPT = {
    "no file, or an empty one": ("", f"{LINE}\n"),
    "a comment": ("# /etc/fstab\n", f"# /etc/fstab\n{LINE}\n"),
    "no newline at the end": ("# x", f"# x\n{LINE}\n"),
    "others before": (ROOT, f"{ROOT}{LINE}\n"),
    "tabs and blanks": ("tmpfs\t/tmp  tmpfs\trw\n", f"tmpfs\t/tmp  tmpfs\trw\n{LINE}\n"),
    "Windows line ends": ("# a\r\n" + ROOT, f"# a\r\n{ROOT}{LINE}\n"),
    "ours already": (f"{ROOT}{LINE}\n# end\n", f"{ROOT}{LINE}\n# end\n"),
    "ours of another drive": (f"{OLD}\n{ROOT}", f"{LINE}\n{ROOT}"),
    "ours at another place": (
        f"{LINE.replace(HERE, '/srv/kv')}\n{ROOT}", f"{LINE}\n{ROOT}",
    ),
    "ours twice": (f"{LINE}\n{ROOT}{OLD}\n", f"{LINE}\n{ROOT}"),
    "ours in a comment": (f"#{LINE}\n", f"#{LINE}\n{LINE}\n"),
    "a place below": (f"/dev/sdb1 {HERE}/x ext4\n", f"/dev/sdb1 {HERE}/x ext4\n{LINE}\n"),
    "a place with the same beginning": (
        f"/dev/sdb1 {HERE}2 ext4 rw\n", f"/dev/sdb1 {HERE}2 ext4 rw\n{LINE}\n",
    ),
    "a line of one word": ("garbage\n" + ROOT, f"garbage\n{ROOT}{LINE}\n"),
    "swap": (f"UUID={OTHER} none swap sw\n", f"UUID={OTHER} none swap sw\n{LINE}\n"),
    "bytes that are no UTF-8": ("# \udcff\n", f"# \udcff\n{LINE}\n"),
}  # fmt: skip
TAKEN = {
    "another filesystem here": f"/dev/sdb1 {HERE} ext4 rw\n",
    "with a slash behind": f"/dev/sdb1 {HERE}/ ext4 rw\n",
    "with two slashes": f"/dev/sdb1 {HERE.replace('/lib', '//lib')} ext4\n",
    "written in octal": f"/dev/sdb1 {HERE.replace('kv', chr(92) + '153v')} ext4 rw\n",
    "ours by UUID elsewhere": f"UUID={UUID} /mnt xfs rw\n",
    "the same in capitals": f"UUID={UUID.upper()} /mnt xfs rw\n",
    "the same in quotes": f'UUID="{UUID}" /mnt xfs rw\n',
    "the same by udev's link": f"/dev/disk/by-uuid/{UUID} /mnt xfs rw\n",
    "noauto": f"UUID={UUID} {HERE} xfs noauto\n",
    "a bind mount": f"/srv {HERE} none bind\n",
}


@pytest.mark.parametrize("case", KEPT)
def test_the_line_is_put_in_and_all_else_stays(case: str) -> None:
    before, after = KEPT[case]
    assert drive_fstab.with_entry(before, LINE) == after
    assert drive_fstab.with_entry(after, LINE) == after


@pytest.mark.parametrize("case", TAKEN)
def test_a_line_of_others_for_it_is_a_refusal(case: str) -> None:
    with pytest.raises(Refused) as refused:
        drive_fstab.with_entry(ROOT + TAKEN[case], LINE)
    assert refused.value.code == "fstab_taken" and "line 2" in refused.value.why


def test_an_adopted_filesystem_keeps_its_line() -> None:
    theirs = f"{ROOT}UUID={UUID} {HERE} xfs rw\n"
    assert drive_fstab.with_entry(theirs, LINE, adopted=True) == theirs
    with pytest.raises(Refused):
        drive_fstab.with_entry(f"UUID={OTHER} {HERE} xfs rw\n", LINE, adopted=True)


@pytest.mark.parametrize("case", KEPT)
def test_taken_out_again_nothing_of_others_is_missing(case: str) -> None:
    before, after = KEPT[case]
    rest = drive_fstab.without_ours(after)
    assert drive_fstab.without_ours(rest) == rest
    theirs = [line for line in before.splitlines() if "x-kvhost" not in line or line[0] == "#"]
    assert rest.splitlines() == theirs


def test_a_place_with_blanks_is_written_so_that_it_is_read_back() -> None:
    line = drive_fstab.entry_for(UUID, "/srv/my #1 drive", "xfs", "rw")
    assert len(line.split()) == 6
    assert drive_fstab.entries(line)[0].target == "/srv/my #1 drive"


def test_installed_whole_with_its_mode_through_a_link(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "fstab"
    real.write_bytes(b"# \xff\r\n")
    real.chmod(0o640)
    link.symlink_to(real)
    text = drive_fstab.read(str(link)) + "tmpfs /run tmpfs rw 0 0\n"
    assert drive_fstab.install(str(link), text)
    assert real.read_bytes() == b"# \xff\r\ntmpfs /run tmpfs rw 0 0\n"
    assert stat.S_IMODE(real.stat().st_mode) == 0o640 and link.is_symlink()
    assert not drive_fstab.install(str(link), text), "no change the second time"
    assert sorted(tmp_path.iterdir()) == [link, real]


def test_a_fstab_with_more_faults_does_not_take_the_place(tmp_path: Path) -> None:
    fstab = tmp_path / "fstab"
    fstab.write_text("tmpfs /run tmpfs rw 0 0\n")
    with pytest.raises(RuntimeError, match="would have faults"):
        drive_fstab.install(str(fstab), fstab.read_text() + "tmpfs /nowhere/at/all tmpfs rw 0 0\n")
    assert fstab.read_text() == "tmpfs /run tmpfs rw 0 0\n"
    # the faults of others are no reason
    fstab.write_text("tmpfs /nowhere/at/all tmpfs rw 0 0\n")
    assert drive_fstab.install(str(fstab), fstab.read_text() + "tmpfs /run tmpfs rw 0 0\n")
