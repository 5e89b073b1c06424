"""Is the drive worth it: fio for real on small filesystems, one of them slow; wear; the command."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pwd
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from kvhost import cli
from kvhost.commands import measure as cli_measure
from kvhost.drives.smart import counters, wear_of
from kvhost.drives.types import Health
from kvhost.drives.worth import Counted, Judged, Measured, Rate, fallen, judge_drive, parse_measured
from kvhost.llama.evidence import parse_llama
from kvhost.llama.verdict import judge_llama
from kvhost.onhost import drive_health, drive_measure
from kvhost.onhost.drive_health import read_smartctl
from kvhost.records import receipts
from kvhost.reports.kept import make_report, write_report
from tests.claim_cases import device, drive, drives, other
from tests.report_cases import NOON, PASSING, keep
from tests.sizing_tools import FIXTURES

pytestmark = pytest.mark.runners

SCRIPT = Path(__file__).parents[1] / "kvhost" / "onhost" / "drive_measure.py"
FOLDER = ".kvhost-measure"
MIB = 1 << 20
BLKIO = Path("/sys/fs/cgroup/blkio")
SMART: dict[str, Any] = json.loads((FIXTURES / "smartctl.json").read_text())
RECORDED: dict[str, Any] = json.loads((FIXTURES / "measured.json").read_text())
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="mounts and other users need root")


@pytest.fixture(scope="session")
def fio() -> str:
    if shutil.which("fio") is None:
        apt = ("apt-get", "-qq", "-o", "DPkg::Lock::Timeout=300")
        subprocess.run([*apt, "update"], check=True)
        subprocess.run([*apt, "install", "-y", "--no-install-recommends", "fio"], check=True)
    found = shutil.which("fio")
    assert found
    return found


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that every user can reach."""
    folder = Path("/run") / f"kvhost-measure-{os.getpid()}"
    folder.mkdir(mode=0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def tier(tmp_path: Path, place: Path) -> Iterator[Path]:
    """A tier of nobody's on an ext4 of its own."""
    image, point = tmp_path / "image", place / "mnt"
    with image.open("wb") as handle:
        handle.truncate(400 * MIB)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    point.mkdir()
    subprocess.run(["mount", "-o", "loop", str(image), str(point)], check=True)
    try:
        folder = point / "tier"
        folder.mkdir(mode=0o700)
        account = pwd.getpwnam("nobody")
        os.chown(folder, account.pw_uid, account.pw_gid)
        yield folder
    finally:
        for _ in range(50):
            if not subprocess.run(["umount", str(point)], check=False).returncode:
                break
            time.sleep(0.1)


@pytest.fixture
def plain(place: Path) -> Iterator[Path]:
    """A tier of nobody's in a directory of the filesystem that this machine has, as it is."""
    folder = Path("/var/tmp") / place.name
    folder.mkdir(mode=0o700)
    account = pwd.getpwnam("nobody")
    os.chown(folder, account.pw_uid, account.pw_gid)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def script(place: Path) -> Path:
    """The script beside those that it imports, as on a host."""
    for one in (*SCRIPT.parent.glob("drive_*.py"), SCRIPT.with_name("bounded.py")):
        shutil.copy(one, place)
    return place / SCRIPT.name


def argv(script: Path, tier: Path, write: int = 64 * MIB, **more: int | str) -> list[str]:
    memory = str(script.parent / "memory.json")
    given = {
        "memory": memory,
        "write-bytes": write,
        "file-bytes": 4 * MIB,
        "keep-bytes": 0,
        "seconds": 3,
        **more,
    }
    words = [f"--{key}={value}" for key, value in given.items()]
    return ["/usr/bin/python3", str(script), f"--tier={tier}", "--user=nobody", *words]


def run(words: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)


@root_only
def test_a_tier_is_measured_and_nothing_stays(fio: str, script: Path, tier: Path) -> None:
    ours = tier / "ns-aa"
    ours.mkdir()
    (ours / "chunk").write_text("kept")
    done = run(argv(script, tier))
    assert done.returncode == 0, done.stderr
    found = parse_measured(json.loads(done.stdout))
    assert found.write.bytes == found.read_files.bytes == found.read.bytes == 64 * MIB
    assert found.filesystem == "ext4" and not found.network
    assert found.disks[0].startswith("loop")
    assert min(rate.bytes_per_s for rate in (found.write, found.read_files, found.read)) > 1e6
    assert json.loads((script.parent / "memory.json").read_text())["time"] == found.time
    assert sorted(one.name for one in tier.iterdir()) == ["ns-aa"]
    assert (ours / "chunk").read_text() == "kept"


@root_only
@pytest.mark.parametrize(
    ("size", "files"),
    [(4096, 1000), (84 << 10, 30), (512 << 10, 12), (1031 * 4096, 5), (14 * MIB, 2), (MIB, 1)],
)
def test_many_files_and_files_of_any_size_are_measured(
    fio: str, script: Path, plain: Path, size: int, files: int
) -> None:
    """As many as a small model has; sizes of few and of no round number of pages."""
    done = run(argv(script, plain, size * files + (1 << 19), **{"file-bytes": size}))
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(done.stderr) < 1000, "nobody wants the names of the files"
    found = parse_measured(json.loads(done.stdout))
    assert size <= found.file_bytes < 1.02 * size
    whole = (size * files + (1 << 19)) // found.file_bytes
    assert whole >= files
    for rate in (found.write, found.read_files, found.read):
        assert rate.bytes == whole * found.file_bytes
    assert not list(plain.iterdir())


@pytest.mark.parametrize("pages", [1, 2, 21, 128, 256, 257, 1021, 1024, 1031, 4392, 65536, 99991])
def test_a_block_is_large_and_a_whole_number_of_them_makes_a_file(pages: int) -> None:
    asked = pages * 4096
    block, part = drive_measure.blocks_of(asked)
    size = drive_measure.whole_size(asked)
    assert asked <= size < 1.02 * asked
    assert size % block == block % part == part % 4096 == 0
    assert min(asked, 2 * MIB) <= block <= 4 * MIB and min(asked, MIB // 4) <= part <= MIB
    assert drive_measure.blocks_of(size) == (block, part)


def test_files_that_were_not_written_to_their_end_are_not_read(tmp_path: Path) -> None:
    for number, size in enumerate((8192, 8192, 4096, 8192)):
        (tmp_path / f"f.{number}").write_bytes(b"x" * size)
    with (tmp_path / "f.4").open("wb") as sparse:
        sparse.truncate(8192)
    assert drive_measure.whole_files(tmp_path, 8192) == 2
    assert sorted(one.name for one in tmp_path.iterdir()) == ["f.0", "f.1"]


@pytest.fixture
def slow(tier: Path) -> Iterator[Callable[[list[str]], list[str]]]:
    """Makes a command one for which the tier reads and writes 20 MB/s, by the kernel's limit."""
    if not (BLKIO / "blkio.throttle.read_bps_device").exists():
        pytest.skip("no blkio controller of cgroups v1 here to make a drive slow with")
    dev = tier.stat().st_dev
    group = BLKIO / f"kvhost-test-{os.getpid()}"
    group.mkdir()
    for way in ("read", "write"):
        limit = f"{os.major(dev)}:{os.minor(dev)} 20000000"
        (group / f"blkio.throttle.{way}_bps_device").write_text(limit)
    inside = f"echo $$ > {group}/cgroup.procs; exec "
    yield lambda words: ["sh", "-c", inside + shlex.join(words)]
    deadline = time.monotonic() + 20
    while (group / "cgroup.procs").read_text() and time.monotonic() < deadline:
        time.sleep(0.1)
    group.rmdir()


Slow = Callable[[list[str]], list[str]]


@root_only
def test_a_slow_drive_is_not_worth_it(fio: str, script: Path, tier: Path, slow: Slow) -> None:
    done = run(slow(argv(script, tier, 32 * MIB, seconds=2)))
    assert done.returncode == 0, done.stderr
    found = parse_measured(json.loads(done.stdout))
    assert 15e6 < found.read_files.bytes_per_s < 25e6
    slow_one = judge(found)
    assert slow_one.worth is False and slow_one.words.endswith(": not worth it")
    # the same figures would be worth it for an engine that is slower still
    assert judge(found, prefill=50.0).worth is True


def judge(found: Measured, **how: Any) -> Judged:
    """Of a model of 128 KiB a token, an engine of 7000 tokens/s, a prefix of 64k tokens."""
    asked: dict[str, Any] = {"bytes_per_token": 131072, "prefill": 7000.0, "tokens": 65536}
    return judge_drive(found, **{**asked, **how})


@root_only
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_killed_it_leaves_nothing_behind(
    fio: str, script: Path, tier: Path, slow: Slow, number: signal.Signals
) -> None:
    """It would have written for 12 seconds more."""
    words = slow(argv(script, tier, 256 * MIB, seconds=60))
    work = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    data = tier / FOLDER / "data"
    deadline = time.monotonic() + 30
    while not (data.exists() and any(data.iterdir())):
        assert work.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    assert {one.stat().st_uid for one in (data, *data.iterdir())} == {pwd.getpwnam("nobody").pw_uid}
    work.send_signal(number)
    work.wait(10)
    deadline = time.monotonic() + 5
    while list(tier.iterdir()):
        assert time.monotonic() < deadline, list(tier.iterdir())
        time.sleep(0.05)
    assert f"--directory={data}" not in run(["ps", "-eo", "args"]).stdout


@root_only
def test_what_a_killed_run_left_is_emptied_and_another_run_waits(
    fio: str, script: Path, tier: Path
) -> None:
    left = tier / FOLDER / "data"
    left.mkdir(parents=True)
    (left / "f.0").write_bytes(b"x")
    account = pwd.getpwnam("nobody")
    for one in (left.parent, left, left / "f.0"):
        os.chown(one, account.pw_uid, account.pw_gid)
    fd = os.open(left.parent, os.O_RDONLY | os.O_CLOEXEC)
    fcntl.flock(fd, fcntl.LOCK_SH)
    assert "another measurement runs" in run(argv(script, tier)).stderr
    assert (left / "f.0").exists()
    os.close(fd)
    done = run(argv(script, tier, 8 * MIB))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["write"]["bytes"] == 8 * MIB


@root_only
@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"write-bytes": 1000}, "4194304 bytes here: --write-gib 0.004 or more"),
        ({"file-bytes": 4097}, "multiple of 4096"),
        ({"write-bytes": 1 << 44, "file-bytes": 1 << 20}, "than 65536: --write-gib 64 at most"),
        ({"keep-bytes": 1 << 50}, "to stay free"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_a_write(
    fio: str, script: Path, plain: Path, more: dict[str, int | str], words: str
) -> None:
    done = run(argv(script, plain, **{"write": 64 * MIB, **more}))  # type: ignore[arg-type]
    assert done.returncode == 1 and words in done.stderr and not done.stdout
    assert not list(plain.iterdir())


@root_only
def test_memory_and_directories_of_others_are_refused(
    fio: str, script: Path, tmp_path: Path
) -> None:
    shm = Path("/dev/shm") / f"kvhost-measure-{os.getpid()}"
    shm.mkdir()
    try:
        assert "is no tier" in run(argv(script, shm)).stderr  # root's
        os.chown(shm, pwd.getpwnam("nobody").pw_uid, -1)
        assert "lies in memory (tmpfs)" in run(argv(script, shm)).stderr
    finally:
        shm.rmdir()
    assert "no tier" in run(argv(script, tmp_path / "absent")).stderr


# --- the judgement, on recorded measurements ---------------------------------------------------


def changed(**edits: Any) -> Measured:
    """The recorded measurement with edits: `disk` of its disk after, `before` of it before."""
    data = json.loads(json.dumps(RECORDED["nvme"]))
    for key in ("before", "after"):
        data[key][0].update(edits.pop("disk" if key == "after" else key, {}))
    return parse_measured({**data, **edits})


def codes(found: Measured, **how: Any) -> list[str]:
    return [one.code for one in judge(found, **how).findings]


def test_a_good_drive_in_plain_words() -> None:
    good = judge(changed())
    assert good.worth is True and good.findings == ()
    assert good.words == (
        "restores 65,536 tokens in 2.86 s; recomputing takes about 9.36 s: worth it"
    )
    assert judge(changed(), prefill=None).worth is None
    assert "give --prefill" in judge(changed(), prefill=None).words
    assert judge(changed(), bytes_per_token=None).worth is None


LINK = {"address": "0000:01:00.0", "speed_gts": 8.0, "max_speed_gts": 16.0, "width": 2,
        "max_width": 4}  # fmt: skip
SPINS = {"transport": "scsi", "rotational": True}
COOL = {"warning_min": 0, "critical_min": 0, "throttled": 3, "throttled_s": 4}


@pytest.mark.parametrize(
    ("edits", "code"),
    [
        ({"network": True, "filesystem": "nfs4"}, "network_volume"),
        ({"direct": False}, "not_direct"),
        ({"disk": {"link": LINK}}, "link_slower"),
        ({"disk": {"transport": "sata", "health": None}}, "sata"),
        ({"disk": {"transport": "usb", "health": None}}, "usb"),
        ({"disk": {"transport": "nvme-tcp"}}, "network_drive"),
        ({"disk": {"model": "Amazon Elastic Block Store"}}, "network_volume"),
        ({"disk": {"model": "MSFT NVMe Accelerator v1.0"}}, "network_volume"),
        ({"disk": {"model": "nvme_card-pd"}}, "network_volume"),
        ({"disk": {"model": "PersistentDisk", **SPINS}}, "network_volume"),
        ({"disk": {"model": "Volume", "transport": "scsi"}}, "network_volume"),
        ({"disk": {"model": None, "transport": "virtio", "rotational": True}}, "virtual_drive"),
        ({"disk": {"model": "Virtual Disk", **SPINS}}, "virtual_drive"),
        ({"disk": {"transport": "sas", "rotational": True, "health": None}}, "rotational"),
        ({"before": {"thermal": COOL}, "disk": {"thermal": {**COOL, "throttled": 4}}}, "throttled"),
        (
            {"before": {"thermal": COOL}, "disk": {"thermal": {**COOL, "throttled_s": 9}}},
            "throttled",
        ),
        ({"before": {"thermal": COOL}, "disk": {"thermal": {**COOL, "warning_min": 2}}}, "too_hot"),
        (
            {"before": {"thermal": COOL}, "disk": {"thermal": {**COOL, "critical_min": 1}}},
            "too_hot",
        ),
        ({"disk": {"why": "permission denied"}}, "health_unknown"),
    ],
)
def test_each_weakness_is_found_and_no_other(edits: dict[str, Any], code: str) -> None:
    assert codes(changed(**edits)) == [code]


def test_what_is_no_weakness_is_not_called_one() -> None:
    full = {**LINK, "speed_gts": 16.0, "width": 4}
    assert codes(changed(disk={"link": full})) == []
    for local in ("nvme_card", "nvme_card7", "Amazon EC2 NVMe Instance Storage", "VOLUMEX 1T"):
        assert codes(changed(disk={"model": local})) == []
    assert codes(changed(before={"thermal": COOL}, disk={"thermal": COOL})) == []


def test_heat_is_told_as_far_as_the_drive_counts_it() -> None:
    """Not every drive counts how often it slowed itself: 0 times would be no news."""
    for more, words in (
        ({"throttled": 5, "warning_min": 3}, "slowed itself 2 times because of heat, 41 °C"),
        ({"throttled_s": 90}, "slowed itself for 86 s because of heat, 41 °C"),
        ({"warning_min": 3, "critical_min": 1}, "was too hot for 3 min, 41 °C, and counts no slow"),
    ):
        found = judge(changed(before={"thermal": COOL}, disk={"thermal": {**COOL, **more}}))
        assert words in found.findings[0].words


@pytest.mark.parametrize(
    ("edits", "tbw", "since", "words"),
    [
        ({}, 600e12, None,
         "10.0 TB written in 2400 hours, 100 GB a day; of 600 TB (given) that lasts 16 years more"),
        ({}, 12e12, (10**12, 10.0),
         "100 GB a day in the last 10 days; of 12 TB (given) that lasts 0.1 years more"),
        ({}, None, None, "how much it is rated for is not known (--tbw)"),
        ({}, 600e12, (0, 10.0), "0 GB a day in the last 10 days; how long 600 TB (given) "
         "last is not known: nothing was written"),
        ({"power_on_hours": 0}, 600e12, None, "10.0 TB written in 0 hours; how long 600 TB (given) "
         "last is not known: in how many hours is not known"),
        ({"percentage_used": 4}, None, (0, 2.0),
         "how long 200 TB (percentage used) last is not known: nothing was written"),
    ],
)  # fmt: skip
def test_what_is_not_known_of_wear_is_named_and_nothing_else(
    edits: dict[str, int], tbw: float | None, since: tuple[int, float] | None, words: str
) -> None:
    told = cli_measure.wear_words(wear_of(Health(**{**HEALTH, **edits}), None, tbw, since))
    assert words in told
    assert ("--tbw" in told) == (tbw is None and not edits)


@pytest.mark.parametrize("text", [
    "", "{", "[]", "[" * 100_000, "\xff", '{"schema": 1}', '{"schema": 1, "written": {}}',
    '{"schema": 2, "time": 1, "written": {}}', '{"schema": 1, "time": true, "written": {}}',
    '{"schema": 1, "time": 1, "written": {"S": "many"}}', '{"schema": 1, "time": 1, "written": []}',
], ids=lambda text: text[-20:])  # fmt: skip
def test_a_damaged_memory_is_said_and_taken_as_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    memory = tmp_path / "drive-measured.json"
    assert drive_measure.remembered(memory) is None and not capsys.readouterr().err
    memory.write_text(text, encoding="latin-1")
    assert drive_measure.remembered(memory) is None
    assert f"{memory} is damaged (" in capsys.readouterr().err
    disk = {"serial": "S", "health": {"bytes_written": 7}}
    drive_measure.remember(memory, [disk], 5, None)
    kept = drive_measure.remembered(memory)
    assert kept == {"schema": 1, "time": 5, "written": {"S": 7}}
    parse_measured({**RECORDED["nvme"], "previous": kept})
    memory.unlink()
    os.mkfifo(memory)  # nobody waits for its writer
    assert drive_measure.remembered(memory) is None


def series(*speeds: float) -> Rate:
    rows = tuple((0.5 * i, speed) for i, speed in enumerate(speeds))
    return Rate(bytes=int(sum(speeds) / 2), seconds=1, bytes_per_s=1, p99_s=None, series=rows)


def test_a_fall_of_writes_is_told_from_noise() -> None:
    fall = fallen(series(*[3e9] * 12, *[4e8] * 12))
    assert fall is not None
    first, last, after = fall
    assert (first, last) == (3e9, 4e8) and after == pytest.approx(18e9, rel=0.1)
    assert fallen(series(*[3e9] * 11, 1e8, *[3e9] * 12)) is None
    assert fallen(series(*[3e9, 2e9] * 12)) is None
    assert fallen(series(3e9, 1e8)) is None


HEALTH = {
    "critical_warning": 0, "temperature_c": 40, "available_spare_percent": 100,
    "spare_threshold_percent": 10, "percentage_used": 0, "bytes_written": 10**13,
    "power_on_hours": 2400, "unsafe_shutdowns": 0, "media_errors": 0,
}  # fmt: skip


def test_wear_and_the_years_that_are_left() -> None:
    """100 days, 100 GB a day; a drive rated for 600 TB lasts another 16 years."""
    wear = wear_of(Health(**HEALTH), None, tbw=600e12)
    assert wear.per_day == 1e11 and wear.rated_from == "given" and not wear.warnings
    assert wear.years_left == pytest.approx((600e12 - 1e13) / 1e11 / 365.25)
    unknown = wear_of(Health(**HEALTH), None)
    assert unknown.rated is None and unknown.years_left is None
    used = wear_of(Health(**{**HEALTH, "percentage_used": 4}), None)
    assert used.rated == 2e14 and used.rated_from == "percentage used"


def test_writes_a_day_are_those_since_the_last_measurement() -> None:
    """A drive that was idle for years and is busy now: 40 TB in 10 days, besides our own."""
    now, then = RECORDED["nvme"]["time"], RECORDED["nvme"]["time"] - 10 * 86400
    written = RECORDED["nvme"]["before"][0]["health"]["bytes_written"] - 4 * 10**12
    last = {"schema": 1, "time": then, "written": {"SERIAL": written}}
    own = {"health": {**HEALTH, "bytes_written": written + 5 * 10**12}}
    wear = judge(changed(previous=last, disk=own), tbw=600e12).wear[0][1]
    assert wear.recent and wear.per_day == pytest.approx(4e11)
    for memory in (None, {**last, "time": now - 3600}, {**last, "written": {"OTHER": 1}}):
        wear = judge(changed(previous=memory), tbw=600e12).wear[0][1]
        assert not wear.recent and wear.per_day != pytest.approx(4e11)


def sata(written: int) -> dict[str, Any]:
    """As look_at() finds it: five years old, read with smartctl."""
    statistic = {"name": "Logical Sectors Written", "value": written // 512}
    told = {"power_on_time": {"hours": 43800}, "smart_status": {"passed": True},
            "ata_device_statistics": {"pages": [{"table": [statistic]}]}}  # fmt: skip
    disk = RECORDED["nvme"]["before"][0]
    return {**disk, "transport": "sata", "health": None, "thermal": None, "smartctl": told}


def test_writes_a_day_of_a_drive_that_smartctl_reads_are_the_recent_ones_too(
    tmp_path: Path,
) -> None:
    """Idle for years, and 5 TB in the last 10 days: 150 TB last less than a year, not 70 years."""
    memory, now = tmp_path / "memory.json", RECORDED["nvme"]["time"]
    begun = 5 * 10**12
    drive_measure.remember(memory, [sata(begun)], now - 10 * 86400, None)
    disk = sata(begun + 5 * 10**12)
    found = {**RECORDED["nvme"], "before": [disk], "after": [disk],
             "previous": drive_measure.remembered(memory)}  # fmt: skip
    judged = judge(parse_measured(found), tbw=150e12)
    wear = judged.wear[0][1]
    assert wear.recent and wear.per_day == pytest.approx(5e11, rel=1e-6)
    assert wear.years_left == pytest.approx(0.767, rel=0.01)
    assert {one.code for one in judged.findings} == {"sata", "few_years"}


def test_writes_a_day_are_those_of_a_month_if_so_much_is_known() -> None:
    """By what was counted at runs before, beside what the last measurement left."""
    now = RECORDED["nvme"]["time"]
    end = RECORDED["nvme"]["before"][0]["health"]["bytes_written"]

    def day(ago: float, less: int, serial: str = "SERIAL") -> Counted:
        return Counted(time=now - int(ago * 86400), written={serial: end - less * 10**9})

    for earlier, per_day, days in (
        ((day(200, 2000), day(30, 900), day(10, 100)), 30e9, 30),
        ((day(200, 2000), day(50, 500)), 10e9, 50),
        ((day(10, 100), day(0.5, 50), day(20, -1), day(25, 1, "OTHER")), 10e9, 10),
    ):
        wear = judge(changed(), earlier=earlier).wear[0][1]
        assert wear.recent and (wear.per_day, wear.days) == (per_day, days)
    last = {"schema": 1, "time": now - 20 * 86400, "written": {"SERIAL": end - 400 * 10**9}}
    for more in ((), (day(3, 9), day(60, 1))):
        wear = judge(changed(previous=last), earlier=more).wear[0][1]
        assert (wear.per_day, wear.days) == (20e9, 20)
    assert judge(changed(), earlier=(day(0.9, 9),)).wear[0][1].days is None


def test_what_runs_counted_lies_beside_the_receipt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once a day; and two receipts differ in nothing by it."""
    monkeypatch.setenv("KVHOST_RECEIPTS", str(tmp_path))
    assert cli_measure.earlier_of("a") == ()
    receipts.keep(tmp_path, "a", {"settings": "s"}, None)
    assert "written" not in json.loads(receipts.path_of(tmp_path, "a").read_text())
    moments = iter((0, 3600, 86400, 86400 * 3, 86400 * 2, 86400 * 9))

    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime.fromtimestamp(next(moments), tz)

    monkeypatch.setattr(receipts, "datetime", Clock)
    for count in range(5):
        receipts.keep(tmp_path, "a", {"settings": "s"}, None, {"S": count})
    receipts.keep(tmp_path, "a", {"settings": "s"}, None)  # a run that saw no counter
    kept = [(one.time // 86400, one.written["S"]) for one in cli_measure.earlier_of("a")]
    assert kept == [(0, 0), (1, 2), (3, 3), (2, 4)]
    assert receipts.load(tmp_path, "a").receipt == {"settings": "s"}
    receipts.path_of(tmp_path, "a").write_text('{"written": [{"time": 1, "written": {"S": "x"}}]}')
    assert cli_measure.earlier_of("a") == ()


def test_a_run_counts_the_drives_that_tell() -> None:
    found = drives(drive(), other(), drive(serial=None))
    serial, counted = device()["serial"], device()["health"]["data"]["bytes_written"]
    assert counters(found) == {serial: counted} and counters(None) == {}


def test_measured_twice_on_a_day_the_first_of_them_stays(tmp_path: Path) -> None:
    memory = tmp_path / "memory.json"
    for written, hours, time_kept in (
        (10, 0, 0),
        (20, 5, 0),
        (30, 23, 0),
        (40, 24, 24),
        (50, 23, 23),
    ):
        previous = drive_measure.remembered(memory)
        disk = {"serial": "S", "health": {"bytes_written": written}}
        drive_measure.remember(memory, [disk], hours * 3600, previous)
        kept = drive_measure.remembered(memory)
        assert kept is not None and kept["time"] == time_kept * 3600, (written, kept)
    other = {"serial": "T", "health": {"bytes_written": 1}}
    drive_measure.remember(memory, [other], 23 * 3600 + 1, kept)
    assert drive_measure.remembered(memory) == {
        "schema": 1, "time": 23 * 3600 + 1, "written": {"T": 1}
    }  # fmt: skip


@pytest.mark.parametrize(
    ("edits", "code"),
    [
        ({"critical_warning": 4}, "failing"),
        ({"media_errors": 2}, "media_errors"),
        ({"percentage_used": 85, "power_on_hours": 10**6}, "worn"),
        ({"bytes_written": 59 * 10**13}, "few_years"),
    ],
)
def test_each_sign_of_wear_is_warned_of(edits: dict[str, int], code: str) -> None:
    wear = wear_of(Health(**{**HEALTH, **edits}), None, tbw=600e12)
    assert [one for one, _ in wear.warnings] == [code]


def test_a_smartctl_that_hangs_or_prints_nonsense_is_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "smartctl"
    monkeypatch.setattr("shutil.which", lambda name, path: str(program))
    monkeypatch.setattr(drive_health, "SMARTCTL_S", 0.3)
    for words, why in (
        ("sleep 60", "smartctl: it has not ended within 0.3 s"),
        ("echo x", "did not print a JSON object"),
        ("""head -c 100000 /dev/zero | tr '\\0' '['""", "did not print a JSON object"),
    ):
        program.write_text(f"#!/bin/sh\n{words}\n")
        program.chmod(0o755)
        found = drive_health.look_at("sdzz")
        assert why in found["why"] and found["transport"] == "scsi"
        parse_measured({**RECORDED["nvme"], "after": [found]})


@root_only
def test_what_cannot_be_kept_loses_no_measurement(
    fio: str, script: Path, plain: Path, tmp_path: Path
) -> None:
    done = run(argv(script, plain, 8 * MIB, memory=str(tmp_path / "none" / "memory.json")))
    assert done.returncode == 0 and "not kept for the next measurement" in done.stderr
    assert parse_measured(json.loads(done.stdout)).write.bytes == 8 * MIB


def test_smartctl_of_real_drives() -> None:
    assert read_smartctl(SMART["nvme"]) == (7773431 * 512000, 2401, 0)
    assert read_smartctl(SMART["ata"]) == (64777770148 * 512, 14551, None)
    bare = {k: v for k, v in SMART["ata"].items() if k != "ata_device_statistics"}
    assert read_smartctl(bare)[0] == 64777770148 * 512  # attribute 241 says the same
    bare["ata_smart_attributes"] = {"table": [{"id": 241, "name": "Host_Writes_32MiB",
                                               "raw": {"value": 5}}]}  # fmt: skip
    assert read_smartctl(bare)[0] is None
    assert read_smartctl({}) == (None, None, None)
    failing = {**SMART["ata"], "smart_status": {"passed": False}}
    assert [code for code, _ in wear_of(None, failing).warnings] == ["failing"]


# --- the command ------------------------------------------------------------------------------


def command(
    monkeypatch: pytest.MonkeyPatch, answers: list[dict[str, Any]], *words: str, code: int = 0
) -> tuple[int, str, list[Any]]:
    asked: list[Any] = []

    def ask(run: Any, inventory: str, deploy: str, args: Any, question: Any) -> Any:
        asked.append((deploy, question))
        return code, answers, {"away": "it could not be reached"} if code else {}

    monkeypatch.setattr(cli_measure, "ask_all", ask)
    monkeypatch.setattr(cli_measure, "prefill_of", lambda host: None)
    done = CliRunner().invoke(cli.main, ["drives", "--measure", *words])
    return done.exit_code, done.output, asked


HOST = {"host": "a", "bytes_per_token": 131072, "context": 65536, "measured": RECORDED["nvme"]}


def test_nothing_is_written_without_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    code, text, asked = command(monkeypatch, [HOST])
    assert code == 2 and "--write-gib" in text and not asked


def test_a_host_that_is_not_reached_is_in_the_json(monkeypatch: pytest.MonkeyPatch) -> None:
    code, text, _ = command(monkeypatch, [], "--json", "--write-gib", "1", "--yes", code=1)
    assert (code, json.loads(text)) == (1, {"away": {"unreadable": ["it could not be reached"]}})


@pytest.mark.parametrize("says", ["y", "n"])
def test_a_person_is_asked_and_told_how_much(monkeypatch: pytest.MonkeyPatch, says: str) -> None:
    asked: list[str] = []
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)

    def confirm(text: str, *, abort: bool) -> None:
        asked.append(text)
        if says == "n" and abort:
            raise click.Abort

    monkeypatch.setattr(click, "confirm", confirm)
    cli_measure.how_much(7.0, yes=True)
    assert not asked
    with contextlib.nullcontext() if says == "y" else pytest.raises(click.Abort):
        assert cli_measure.how_much(7.0, yes=False) == 7.0
    assert "7 GiB are written to every tier" in asked[0]


@pytest.mark.parametrize(
    ("prefill", "wanted", "worth"),
    [(("--prefill", "7000"), 0, "yes"), (("--prefill", "70000"), 1, "no"), ((), 2, "unknown")],
)
def test_the_exit_code_is_the_judgement(
    monkeypatch: pytest.MonkeyPatch, prefill: tuple[str, ...], wanted: int, worth: str
) -> None:
    words = ("--write-gib", "0.5", "--json", *prefill)
    code, text, asked = command(monkeypatch, [HOST], *words)
    assert code == wanted and json.loads(text)["a"]["worth_it"] == worth
    question = {"write_gib": 0.5, "seconds": 60, "install": False}
    assert asked == [("deploys/measure.py", question)]


def test_a_host_that_failed_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("--write-gib", "1", "--prefill", "7000")
    assert command(monkeypatch, [HOST], *words, code=1)[0] == 1
    assert command(monkeypatch, [], *words)[0] == 1
    code, text, _ = command(monkeypatch, [HOST], *words)
    assert code == 0 and "worth it" in text and "read, whole files" in text


def test_what_the_engine_computes_is_taken_from_the_last_restart_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVHOST_REPORTS", str(tmp_path))
    assert cli_measure.prefill_of("web-1") is None
    cold: Any = vars(keep(tmp_path, PASSING).results[0].evidence)["requests"]["cold"]
    assert cli_measure.prefill_of("web-1") == cold.usage_prompt_tokens / cold.ttft_s
    recorded = FIXTURES.parent / "llama" / "both_and_kill.json"
    events = [(judge_llama(one), one) for one in parse_llama(recorded.read_text())]
    write_report(tmp_path, make_report("llama-1", events, NOON, None))
    assert cli_measure.prefill_of("llama-1") == 2000 / 6.2905
    # of an event that ended before it asked, the next tells
    cut = events[0][1].model_copy(update={"requests": {}})
    write_report(tmp_path, make_report("llama-2", [(judge_llama(cut), cut), events[1]], NOON, None))
    assert cli_measure.prefill_of("llama-2") == 2000 / 9.0172


@root_only
def test_the_command_measures_a_provisioned_host(fio: str, tmp_path: Path) -> None:
    """Through pyinfra, on this machine: what lies in its base directory is as a run leaves it."""
    base = Path("/var/lib") / f"kvhost-measure-{os.getpid()}"
    try:
        for name in ("bin", "state", "tier"):
            (base / name).mkdir(parents=True)
        for one in SCRIPT.parent.glob("*.py"):
            shutil.copy(one, base / "bin")
        account = pwd.getpwnam("daemon")
        os.chown(base / "tier", account.pw_uid, account.pw_gid)
        words = ["drives", "--measure", "--write-gib", "0.05", "--yes", "--install", "--json"]
        words += ["--prefill", "2000", "--seconds", "3", "--data", f"base_dir={base}"]
        words += ["--data", "service_user=daemon", "--data", "free_floor_gib=1"]
        done = run([sys.executable, "-m", "kvhost.cli", *words])
        assert done.returncode in (0, 1), done.stderr[-3000:]
        (told,) = json.loads(done.stdout[done.stdout.index("{") :]).values()
        assert told["worth_it"] == ("yes" if done.returncode == 0 else "no"), told
        assert told["measured"]["write"]["bytes"] >= 48 * MIB
        assert told["measured"]["file_bytes"] == 256 * 16384  # a chunk of the built-in model
        assert not list((base / "tier").iterdir())
    finally:
        shutil.rmtree(base, ignore_errors=True)
