"""Each guard of a drive is taken out in turn: at least one of the tests must see it.

A guard is a piece of text of a file and what stands there without it. The tests named run in a copy
of the repository; they must fail there, and pass in the copy without a change.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]
pytestmark = [
    pytest.mark.full,
    pytest.mark.drives,
    pytest.mark.skipif(os.geteuid() != 0, reason="loop devices and mounts need root"),
]
ONHOST = "kvhost/onhost/"
STATES, BETWEEN, APPLY = (f"tests/test_drive_{name}.py" for name in ("states", "between", "apply"))
CLAIM, PROBE = "tests/test_claim.py", "tests/test_drive_probe.py"


@dataclass(frozen=True)
class Guard:
    """``cut``: (file, text, text without the guard); several where one makes up for another."""

    name: str
    cut: tuple[tuple[str, str, str], ...]
    tests: str
    select: str = ""


def guard(name: str, file: str, text: str, without: str, tests: str, select: str = "") -> Guard:
    return Guard(name, ((file, text, without),), tests, select)


def finding(kind: str, text: str, state: str, file: str = ONHOST + "drive_probe.py") -> Guard:
    """A look of the report that finds nothing any more."""
    return guard(f"the report's {kind}", file, text, "if False:", STATES, state)


GUARDS = (
    # what a plan is made of
    finding("read_only", 'if device["read_only"]:', "read-only"),
    finding("swap", "if one in context.swaps:", "swap-on"),
    finding("in_use", "if who := context.lasting_users(dev):", "open-to-read"),
    finding("busy", "if _is_held(one):", "mounted-elsewhere"),
    finding("holder", 'if one != name and one not in device["partitions"]:', "loop-on-top"),
    finding("partition_table", 'if found.get("PTTYPE"):', "gpt-unused",
            ONHOST + "drive_content.py"),
    guard("the report's mounted", ONHOST + "drive_probe.py",
          "for mount in context.mounted.get(one, ()):", "for mount in ():", STATES, "mounted-xfs"),
    guard("the report's signature", ONHOST + "drive_content.py", "for row in rows:",
          "for row in ():", STATES, "gpt-backup"),
    guard("the report's leftover", ONHOST + "drive_content.py",
          'for found in drive_magic.leftovers(fd, device["size_bytes"]):', "for found in ():",
          STATES, "ext4-wiped"),
    guard("the report's system", ONHOST + "drive_probe.py", "if name in context.system:",
          "if False:", PROBE, "running_system"),
    guard("the report's fabric", ONHOST + "drive_probe.py",
          'if device["transport"] not in LOCAL:', "if False:", PROBE, "stands_against"),
    guard("the report's health", ONHOST + "drive_probe.py", 'if log["critical_warning"]:',
          "if False:", PROBE, "critical"),
    guard("the report's fstab", ONHOST + "drive_probe.py", "        if hit:", "        if False:",
          PROBE, "fstab"),
    guard("the report's identity", ONHOST + "drive_probe.py",
          'if not any(device[key] for key in ("wwn", "serial", "by_id")):', "if False:", PROBE,
          "stands_against"),
    # the claim
    guard("all criteria count", "kvhost/drives/claim.py",
          "if d.device and not mismatches(settings, d.device)", "if d.device", CLAIM),
    guard("exactly one drive", "kvhost/drives/claim.py",
          "elif len(matching) > count:", "elif False:", CLAIM),
    guard("an identity is of one drive", "kvhost/drives/claim.py",
          "found = list(_same_identity(drive, drives)) or ", "found = ", CLAIM),
    guard("unreadable is not blank", "kvhost/drives/claim.py",
          'if drive.status != "ok":', "if False:", CLAIM),
    guard("what no token allows", "kvhost/drives/claim_reasons.py",
          "yield from foreign(drive, ERASABLE)", "yield from ()", CLAIM),
    guard("the token fits", "kvhost/drives/claim_reasons.py",
          'if right is not None and right in (settings.drive_erase or "").split(","):',
          "if settings.drive_erase:", CLAIM),
    guard("not blank is refused", "kvhost/drives/claim_reasons.py", "if not held or resumes or",
          "if True or", CLAIM),
    guard("large enough", "kvhost/drives/claim_reasons.py", "if have >= least:", "if True:", CLAIM),
    guard("a free mount point", "kvhost/drives/claim_reasons.py",
          "elif place.entries:", "elif False:", CLAIM),
    guard("a loop device is asked for", "kvhost/drives/claim_match.py",
          'elif d.transport == "loop" and s.drive_transport != "loop":', "elif False:", CLAIM),
    # the step that writes
    Guard("the disk is the plan's", (
        (ONHOST + "drive_disk.py", "if diskseq is not None and now != diskseq:", "if False:"),
        (ONHOST + "drive_volume.py", 'for key in (*drive_probe.IDENTITY, "maj_min", "diskseq"):',
         "for key in ():"),
    ), BETWEEN, "another"),
    guard("the name is the plan's", ONHOST + "drive_disk.py",
          "if maj_min(st.st_rdev) != self.numbers:", "if False:", APPLY, "same_numbers"),
    guard("the exclusive hold", ONHOST + "drive_disk.py", "os.O_EXCL | os.O_CLOEXEC",
          "os.O_CLOEXEC", BETWEEN, "nobody_else"),
    guard("the findings are the plan's", ONHOST + "drive_volume.py",
          'not same_findings(found["findings"], member["findings"])', "False", APPLY,
          "found_something"),
    guard("no token for what is in use", ONHOST + "drive_write.py",
          'never = [f for f in findings if f["kind"] not in drive_probe.ERASABLE]', "never = []",
          STATES, "open-to-write or mounted-ext4"),
    guard("every byte is read", ONHOST + "drive_write.py", "if not findings:", "if False:", STATES,
          "one-byte-middle"),
    guard("the last byte is read", ONHOST + "drive_blank.py", "while at < end:",
          "while at < end - STEP:", STATES, "one-byte-last"),
    guard("the token", ONHOST + "drive_write.py",
          'if token and token not in str(self.order.get("token")).split(","):',
          "if False:", STATES, "ext4-4k"),
    guard("the counter of writes", ONHOST + "drive_write.py", "if disk.written() != written:",
          "if False:", APPLY, "written_to_between"),
    guard("the last look", ONHOST + "drive_write.py",
          'if again["status"] != "ok" or mine != self.found["findings"]:', "if False:", BETWEEN,
          "opens and counter"),
    guard("another's filesystem at the mount point", ONHOST + "drive_apply.py",
          "elif {disk.numbers for disk in disks} != drive_mount.disks_below(now.numbers):",
          "elif False:", APPLY, "foreign_filesystem"),
    guard("an empty mount point", ONHOST + "drive_mount.py", "    if names:\n        what",
          "    if False:\n        what", APPLY, "mount_point_with"),
    guard("the marker", ONHOST + "drive_volume.py",
          'if journal is None or there["UUID"] != journal["fs_uuid"]:', "if False:", STATES,
          "kvhost-names"),
    guard("a cut-off run goes on only where it wrote", ONHOST + "drive_write.py",
          "if got != ours and (whole or got != bytes(disk.sector)):", "if False:", APPLY,
          "journal_makes_nothing"),
)  # fmt: skip


def copy_of_repository(folder: Path) -> Path:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPO, capture_output=True, check=True,
    ).stdout.decode()  # fmt: skip
    for name in filter(None, listed.split("\0")):
        source = REPO / name
        if source.is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, folder / name)
    return folder


def passes(repo: Path, tests: str, select: str) -> bool:
    argv = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", tests]
    # no deploy.py over many hosts: what it would say is the report's and the claim's
    env = {**os.environ, "KVHOST_TEST_ORDERS_ONLY": "1"}
    done = subprocess.run(
        [*argv, "-k", select] if select else argv,
        cwd=repo, env=env, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stdout[-3000:] + done.stderr[-1000:]
    return done.returncode == 0


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy without a change, in which the same tests pass."""
    return copy_of_repository(tmp_path_factory.mktemp("whole"))


def test_the_tests_pass_with_every_guard_in_place(whole: Path) -> None:
    wanted: dict[str, set[str]] = {}
    for one in GUARDS:
        wanted.setdefault(one.tests, set()).add(one.select)
    for tests, selected in wanted.items():
        assert passes(whole, tests, "" if "" in selected else " or ".join(sorted(selected))), tests


@pytest.mark.parametrize("one", GUARDS, ids=lambda one: one.name)
def test_a_guard_is_missed(one: Guard, whole: Path) -> None:
    before = {file: (whole / file).read_text() for file, _, _ in one.cut}
    try:
        for file, text, without in one.cut:
            assert before[file].count(text) == 1, f"{file} holds {text!r} not once: name it anew"
            (whole / file).write_text(before[file].replace(text, without))
        assert not passes(whole, one.tests, one.select), "taken out, and no test missed it"
    finally:
        for file, text in before.items():
            (whole / file).write_text(text)
