"""The pruner on real directories, real mounts and real processes; no engine."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvhost.onhost import pruner

KIB, MIB = 1 << 10, 1 << 20
HOUR = 3600.0
SCRIPT = str(Path(pruner.__file__))
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="mounts and other users need root")


@pytest.fixture
def tier(tmp_path: Path) -> Path:
    return make_tier(tmp_path / "tier")


def make_tier(path: Path) -> Path:
    path.mkdir(exist_ok=True)
    (path / pruner.MARKER).touch()
    return path


def put(tier: Path, ns: str, name: str, size: int = 64 * KIB, age_s: float = HOUR) -> Path:
    """A file of ``size`` bytes, last written and read ``age_s`` seconds ago."""
    path = tier / ns / (name if "." in name else f"m@0x01000100@0@{name}.data")
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(os.urandom(size))
    when = time.time_ns() - int(age_s * 1e9)
    os.utime(path, ns=(when, when))
    return path


def cli(*argv: str | float | Path, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, SCRIPT, *map(str, argv)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **kwargs)


def once(tier: Path, limit: int, *extra: str, rc: int = 0) -> Any:
    done = cli("once", "--tier", tier, "--limit-bytes", limit, "--json", *extra)
    assert done.returncode == rc, done.stderr
    return json.loads(done.stdout)


def sweep(tier: Path, *extra: str | Path) -> Any:
    done = cli("sweep", "--tier", tier, "--json", *extra)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def usage(tier: Path) -> int:
    total = 0
    for path in tier.glob("ns-*/*"):
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_blocks * 512
    return total


def snapshot(where: Path) -> dict[str, object]:
    """Every name below a directory with its inode, times and content, links not followed."""
    found: dict[str, object] = {}
    for path in sorted(where.rglob("*")):
        st = path.lstat()
        content = path.read_bytes() if path.is_file() and not path.is_symlink() else None
        found[str(path)] = (st.st_ino, st.st_mtime_ns, st.st_ctime_ns, content)
    return found


@contextlib.contextmanager
def mounted(where: Path, *options: str) -> Iterator[Path]:
    where.mkdir(exist_ok=True)
    subprocess.run(["mount", *options, str(where)], check=True)
    try:
        yield where
    finally:
        subprocess.run(["umount", "-l", str(where)], check=True)


@contextlib.contextmanager
def running(tier: Path, limit: int, *extra: str | float | Path) -> Iterator[subprocess.Popen[str]]:
    argv = ["run", "--tier", tier, "--limit-bytes", limit, *extra]
    process = subprocess.Popen(
        [sys.executable, SCRIPT, *map(str, argv)], stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def until(true: Callable[[], bool], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.02)


# --- which files go ---------------------------------------------------------------------------


def test_oldest_files_go_until_the_low_watermark(tier: Path) -> None:
    files = [put(tier, "ns-aa", f"{i:02x}", age_s=HOUR - 10 * i) for i in range(20)]
    status = once(tier, 20 * 64 * KIB, "--high", "0.9", "--low", "0.5")
    assert [f.exists() for f in files] == [False] * 10 + [True] * 10
    assert status["removed"] == {"limit": {"files": 10, "bytes": 10 * 64 * KIB}}
    assert (status["usage_bytes"], status["files"]) == (10 * 64 * KIB, 10)
    assert status["namespaces"] == {"ns-aa": {"files": 10, "bytes": 10 * 64 * KIB}}


def test_at_the_high_watermark_nothing_goes(tier: Path) -> None:
    for i in range(9):
        put(tier, "ns-aa", f"{i:02x}")
    assert once(tier, 10 * 64 * KIB, "--high", "0.9", "--low", "0.1")["removed"] == {}


def test_of_one_prompt_the_last_chunks_go_first(tier: Path) -> None:
    """A chunk serves only with the chunks before it, so a cut prompt keeps its beginning."""
    base = (time.time_ns() // 10**9 - 3600) // 2 * 2
    files = [put(tier, "ns-aa", f"{i:02x}") for i in range(20)]
    for i, path in enumerate(files):
        os.utime(path, ns=((base * 10**9) + i * 50_000_000,) * 2)
    once(tier, 20 * 64 * KIB, "--high", "0.9", "--low", "0.5")
    assert [f.exists() for f in files] == [True] * 10 + [False] * 10


def test_old_namespaces_go_wholly_and_first_the_one_unused_for_longest(tier: Path) -> None:
    current = [put(tier, "ns-cc", f"{i:02x}", age_s=5 * HOUR) for i in range(4)]
    newer = [put(tier, "ns-aa", f"{i:02x}", age_s=HOUR + i) for i in range(4)]
    older = [put(tier, "ns-bb", f"{i:02x}", age_s=2 * HOUR + i) for i in range(4)]
    put(tier, "ns-aa", "ff", age_s=9 * HOUR)  # older than any, in the namespace used last
    limit = 13 * 64 * KIB
    once(tier, limit, "--current", "ns-cc", "--low", "0.65")
    assert [f.exists() for f in (*older, *newer, *current)] == [False] * 4 + [True] * 8
    once(tier, 8 * 64 * KIB, "--current", "ns-cc", "--low", "0.45")
    assert [f.exists() for f in newer] == [False] * 4
    assert [f.exists() for f in current].count(True) == 3


def test_without_current_all_namespaces_are_one(tier: Path) -> None:
    oldest = put(tier, "ns-bb", "00", age_s=3 * HOUR)
    others = [put(tier, "ns-aa", f"{i:02x}", age_s=2 * HOUR) for i in range(9)]
    put(tier, "ns-bb", "01", age_s=HOUR)
    once(tier, 11 * 64 * KIB, "--low", "0.92")
    assert not oldest.exists() and all(f.exists() for f in others)


def test_space_counts_as_allocated_and_the_apparent_size_is_said(tier: Path) -> None:
    sparse = put(tier, "ns-aa", "00", size=4 * KIB)
    with sparse.open("r+b") as f:
        f.truncate(100 * MIB)
    os.utime(sparse, (1, 1))
    status = once(tier, 1 * MIB)
    assert status["usage_bytes"] == 4 * KIB
    assert status["apparent_bytes"] == 100 * MIB
    assert sparse.exists()


def test_temporary_files_being_written_stay_and_count_forgotten_ones_go(tier: Path) -> None:
    young = [put(tier, "ns-aa", n, age_s=60) for n in ("a.tmp", "b.data.tmp.0123")]
    stale = [put(tier, "ns-aa", n, age_s=HOUR) for n in ("c.tmp", "d.data.tmp.4567")]
    kv = put(tier, "ns-aa", "00", age_s=1)
    status = once(tier, 100 * MIB)
    assert status["removed"] == {"temporary": {"files": 2, "bytes": 2 * 64 * KIB}}
    status = once(tier, 3 * 64 * KIB, "--high", "0.9", "--low", "0.8")
    assert all(f.exists() for f in young) and not any(f.exists() for f in stale)
    assert not kv.exists()  # what is being written counts, the rest makes room for it


def test_nothing_left_to_remove_is_said(tier: Path) -> None:
    put(tier, "ns-aa", "a.tmp", age_s=1)
    assert once(tier, 64 * KIB, rc=5)["state"] == "over, and nothing left"


def test_a_file_used_after_the_scan_stays(tier: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [put(tier, "ns-aa", f"{i:02x}", age_s=HOUR - 10 * i) for i in range(3)]
    real = pruner.choose

    def used_meanwhile(*args: Any) -> Any:
        chosen = real(*args)
        os.utime(files[0])
        files[1].unlink()
        put(tier, "ns-aa", "01", age_s=HOUR - 10)  # the same name, another file
        return chosen

    monkeypatch.setattr(pruner, "choose", used_meanwhile)
    assert pruner.main(["once", "--tier", str(tier), "--limit-bytes", "1"]) == 0
    assert [f.exists() for f in files] == [True, True, False]


# --- last use ---------------------------------------------------------------------------------


@root_only
@pytest.mark.parametrize(
    ("option", "policy", "lru"),
    [
        ("strictatime", pruner.STRICT, True),
        ("relatime", pruner.REARMED, True),
        ("noatime", pruner.FIFO, False),
    ],
)
def test_order_follows_reads_where_the_mount_shows_them(
    tmp_path: Path, option: str, policy: str, lru: bool
) -> None:
    """Two reads of one file within a day, with a pass between: relatime shows only the first."""
    with mounted(tmp_path / "t", "-t", "tmpfs", "-o", f"{option},size=64m", "none") as where:
        tier = make_tier(where)
        first, second, third = (put(tier, "ns-aa", n, age_s=HOUR) for n in ("00", "01", "02"))
        os.utime(second, (time.time() - HOUR + 10,) * 2)
        os.utime(third, (time.time() - HOUR + 20,) * 2)
        for path in (first, second, third, first):
            path.read_bytes()
            time.sleep(0.05)
            assert once(tier, 10 * MIB)["policy"] == policy
        os.utime(third, (time.time() - 10, third.stat().st_mtime))  # read 10 s ago
        os.utime(second, (time.time() - 20, second.stat().st_mtime))
        once(tier, 3 * 64 * KIB, "--high", "0.9", "--low", "0.67")
        gone = second if lru else first
        assert {p for p in (first, second, third) if not p.exists()} == {gone}


def test_unknown_access_times_are_said(tier: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    worker = pruner.Pruner(pruner.parse(["once", "--tier", str(tier), "--limit-bytes", "9"]))
    assert worker.one_pass()["policy"] == "fifo (access times unknown: No space left on device)"
    monkeypatch.undo()
    assert worker.one_pass()["policy"].startswith("lru")  # it looks again
    assert [p.name for p in tier.iterdir()] == [pruner.MARKER]


# --- never outside its root -------------------------------------------------------------------


def test_only_files_of_namespaces_are_touched(tier: Path) -> None:
    for ns in ("models", "ns-XYZ", "ns-", "xns-aa", "ns-aa/sub"):
        (tier / "ns-aa").mkdir(exist_ok=True)
        put(tier, ns, "00.data")
    (tier / "00.data").write_text("in the tier itself")
    (tier / "ns-ff").write_text("a file by the name of a namespace")
    (tier / "ns-aa" / pruner.METADATA).write_text('{"chunk_bytes": null}')
    os.mkfifo(tier / "ns-aa" / "fifo.data")
    before = snapshot(tier)
    kv = put(tier, "ns-aa", "00")
    status = once(tier, 1)
    assert not kv.exists()
    after = snapshot(tier)
    assert {k: v for k, v in after.items() if not k.endswith("/ns-aa")} == {
        k: v for k, v in before.items() if not k.endswith("/ns-aa")
    }
    assert status["left_alone"]["not a regular file"] == 2
    assert sum(status["left_alone"].values()) == 3


def test_links_out_of_the_tier_are_not_followed(tier: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    precious = put(outside, "ns-aa", "00", age_s=99 * HOUR)
    kv = put(tier, "ns-aa", "01")
    (tier / "ns-aa" / "link.data").symlink_to(precious)
    (tier / "ns-bb").symlink_to(outside / "ns-aa")
    (tier / "ns-aa" / "sub").symlink_to(outside)
    before = snapshot(outside)
    status = once(tier, 1)
    assert snapshot(outside) == before
    assert (tier / "ns-aa" / "link.data").is_symlink() and (tier / "ns-bb").is_symlink()
    assert not kv.exists() and status["removed"]["limit"]["files"] == 1
    assert sum(status["left_alone"].values()) == 3


def test_a_namespace_swapped_for_a_link_after_the_scan(
    tier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = put(tier, "ns-aa", "00")
    outside = tmp_path / "outside"
    shutil.copytree(tier / "ns-aa", outside)
    real = pruner.choose

    def swap(*args: Any) -> Any:
        (tier / "ns-aa").rename(tmp_path / "moved")
        (tier / "ns-aa").symlink_to(outside)
        return real(*args)

    monkeypatch.setattr(pruner, "choose", swap)
    pruner.main(["once", "--tier", str(tier), "--limit-bytes", "1"])
    assert (outside / kv.name).exists()
    assert not (tmp_path / "moved" / kv.name).exists()


def test_a_hard_link_loses_its_name_here_only_and_frees_nothing(tier: Path, tmp_path: Path) -> None:
    linked = put(tier, "ns-aa", "00", age_s=2 * HOUR)
    (tmp_path / "other-name").hardlink_to(linked)
    alone = put(tier, "ns-aa", "01", age_s=HOUR)
    free = pruner.free_bytes(str(tier))
    status = once(tier, 100 * MIB, "--free-floor-bytes", str(free + MIB), rc=5)
    assert status["removed"]["floor"]["files"] == 2
    assert (tmp_path / "other-name").exists() and not alone.exists()
    assert len((tmp_path / "other-name").read_bytes()) == 64 * KIB

    args = pruner.parse(["once", "--tier", str(tier), "--limit-bytes", "9999999"])
    args.free_floor_bytes, args.headroom_bytes = 100 * KIB, 0
    file = pruner.File("ns-aa", "x.data", 1, 64 * KIB, 64 * KIB, 2, 0, 0)
    scan = pruner.Scan([file, file._replace(links=1, used=5 * 10**9)], {}, Counter(), 90 * KIB)
    assert pruner.choose(scan, args, 0) == ([(f, "floor") for f in scan.files], False)


@root_only
@pytest.mark.parametrize("bind", [False, True], ids=["tmpfs", "bind mount of the same filesystem"])
def test_other_mounts_inside_the_tier_are_left_alone(
    tier: Path, tmp_path: Path, bind: bool
) -> None:
    kv = put(tier, "ns-aa", "00")
    (tmp_path / "source").mkdir()
    options = ["--bind", str(tmp_path / "source")] if bind else ["-t", "tmpfs", "none"]
    with mounted(tier / "ns-bb", *options):
        foreign = put(tier, "ns-bb", "00", age_s=9 * HOUR)
        status = once(tier, 1)
        assert foreign.exists() and not kv.exists()
        assert status["left_alone"] == {"namespace on another mount": 1}


def test_refused_directories(tier: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tier)
    (tmp_path / "bare").mkdir()
    (tmp_path / "linked-marker").mkdir()
    (tmp_path / "linked-marker" / pruner.MARKER).symlink_to(tier / pruner.MARKER)
    (tmp_path / "file").touch()
    for path, why in {
        "/": "root of the filesystem",
        "//": "root of the filesystem",
        f"{tmp_path}/link": "is a link",
        f"{tmp_path}/link/": "is a link",
        f"{tmp_path}/bare": f"its {pruner.MARKER} does not open",
        f"{tmp_path}/linked-marker": f"its {pruner.MARKER} does not open",
        f"{tmp_path}/file": "cannot be opened as a directory",
        f"{tmp_path}/none": "cannot be opened as a directory",
    }.items():
        for command in (["once", "--limit-bytes", "1"], ["run", "--limit-bytes", "1"], ["sweep"]):
            done = cli(*command, "--tier", path)
            assert (done.returncode, done.stdout) == (3, ""), path
            assert why in done.stderr, done.stderr
            assert len(done.stderr.splitlines()) == 1


@root_only
def test_a_tier_of_another_user_is_refused(tmp_path: Path) -> None:
    where = Path(f"/tmp/kvhost-test-{os.getpid()}")
    try:
        make_tier(where)
        shutil.copy(SCRIPT, where / "pruner.py")
        os.chown(where, 12345, 12345)
        put(where, "ns-aa", "00")
        command = ["/usr/bin/python3", str(where / "pruner.py"), "once", "--tier", str(where)]
        done = subprocess.run(
            [*command, "--limit-bytes", "1"], capture_output=True, text=True, user=65534
        )
        assert done.returncode == 3, done.stderr
        assert "belongs to uid 12345; run this as that user" in done.stderr
        done = subprocess.run(
            [*command, "--limit-bytes", "1"], capture_output=True, text=True, user=12345
        )
        assert done.returncode == 1  # root's namespace in its tier: said, not swallowed
        assert (where / "ns-aa").exists() and usage(where) == 64 * KIB
    finally:
        shutil.rmtree(where)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("--tier relative", "--tier relative: not an absolute path"),
        ("--tier /x --low 0.9 --high 0.8", "need 0 < low < high <= 1"),
        ("--tier /x --high 1.5", "need 0 < low < high <= 1"),
        ("--tier /x --limit-bytes 0", "--limit-bytes must be above 0"),
        ("--tier /x --free-floor-bytes -1", "the other bytes not below"),
        ("--tier /x --current ../etc", "--current ../etc: not ns-<hex>"),
        ("--tier x --low 0", "--tier x: not an absolute path; --low 0.0 --high 0.95"),
        ("--tier /x --interval 0", "--interval 0.0: need more than 0 seconds"),
    ],
)
def test_usage_errors_name_what_is_wrong(argv: str, says: str) -> None:
    done = cli("run", "--limit-bytes", "1000", *argv.split())
    assert done.returncode == 2
    assert says in done.stderr


def test_dry_run_changes_nothing(tier: Path) -> None:
    for i in range(4):
        put(tier, "ns-aa", f"{i:02x}").read_bytes()
    put(tier, "ns-aa", "a.tmp")
    time.sleep(0.05)
    before = snapshot(tier)
    status = once(tier, 64 * KIB, "--dry-run")
    assert {(v["name"], v["reason"]) for v in status["would_remove"]} > {("a.tmp", "temporary")}
    assert len(status["would_remove"]) == 5 and status["files"] == 5
    assert len(sweep(tier, "--dry-run")["would_remove"]) == 1
    table = cli("once", "--tier", tier, "--limit-bytes", 64 * KIB, "--dry-run").stdout
    assert table.count("ns-aa/") == 5
    assert "would remove 5 files, 0.3 MiB; nothing was changed" in table
    assert snapshot(tier) == before


# --- a process beside a writer ----------------------------------------------------------------


class Writer(threading.Thread):
    """Writes files as LMCache does (temporary name, rename) and samples the tier meanwhile."""

    def __init__(self, tier: Path, rate: float, seconds: float, size: int = MIB) -> None:
        super().__init__()
        self.tier, self.size, self.rate, self.seconds = tier, size, rate, seconds
        self.written = 0
        self.error: OSError | None = None

    def run(self) -> None:
        began, block = time.monotonic(), os.urandom(self.size)
        try:
            while time.monotonic() - began < self.seconds:
                final = self.tier / "ns-aa" / f"m@0x01000100@0@{self.written:08x}.data"
                final.with_suffix(".tmp").write_bytes(block)
                final.with_suffix(".tmp").rename(final)
                self.written += 1
                time.sleep(
                    max(0.0, began + self.written * self.size / self.rate - time.monotonic())
                )
        except OSError as why:
            self.error = why


def test_above_the_limit_for_at_most_one_interval(tier: Path, tmp_path: Path) -> None:
    """What lay there before counts; 20 MiB/s against a limit of 24 MiB, sampled every 100 ms."""
    interval, limit = 1.0, 24 * MIB
    for i in range(40):
        put(tier, "ns-00", f"{i:02x}", size=MIB)
    with running(tier, limit, "--interval", interval, "--current", "ns-aa") as process:
        until(lambda: usage(tier) < limit)
        (tier / "ns-aa").mkdir()
        writer = Writer(tier, rate=20 * MIB, seconds=5)
        writer.start()
        above, longest = None, 0.0
        while writer.is_alive():
            now = time.monotonic()
            if usage(tier) <= limit:
                above = None
            else:
                above = above or now
                longest = max(longest, now - above)
            time.sleep(0.1)
        assert process.poll() is None
    assert writer.error is None and writer.written > 60
    assert longest <= interval
    assert 0.5 * limit < usage(tier)  # it did not simply remove everything
    assert not list((tier / "ns-00").iterdir())


def test_growth_is_answered_before_the_interval(tier: Path) -> None:
    """The interval is a promise; free space, looked at every 100 ms, usually tells sooner."""
    (tier / "ns-aa").mkdir()
    with running(tier, 8 * MIB, "--interval", "60") as process:
        time.sleep(1)
        for i in range(12):
            put(tier, "ns-aa", f"{i:02x}", size=MIB)
        until(lambda: usage(tier) < 8 * MIB, 5)
        assert process.poll() is None


@root_only
@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_the_free_floor_is_never_crossed(tmp_path: Path, kind: str) -> None:
    """A filesystem of 256 MiB, a limit far above it, a writer of 100 MiB/s: only the floor acts."""
    if kind == "ext4":
        image = tmp_path / "image"
        with image.open("wb") as f:
            f.truncate(256 * MIB)
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True)
        options = ["-o", "loop", str(image)]
    else:
        options = ["-t", "tmpfs", "-o", "size=256m", "none"]
    floor, lowest, removals = 64 * MIB, 1 << 60, 0
    with mounted(tmp_path / "t", *options) as where:
        tier = make_tier(where)
        (tier / "ns-aa").mkdir()
        status = tmp_path / "status.json"
        extra = ("--free-floor-bytes", floor, "--interval", "60", "--status", status)
        with running(tier, 1 << 40, *extra, "--headroom-bytes", str(48 * MIB)) as process:
            until(status.exists)
            writer = Writer(tier, rate=100 * MIB, seconds=6)
            writer.start()
            while writer.is_alive():
                lowest = min(lowest, pruner.free_bytes(str(where)))
                time.sleep(0.01)
            assert process.poll() is None
        removals = json.loads(status.read_text())["removed"]["floor"]["files"]
    assert writer.error is None and writer.written > 300
    assert lowest >= floor
    assert removals > 100


def test_sigterm_ends_it_at_once(tier: Path, tmp_path: Path) -> None:
    status = tmp_path / "status.json"
    with running(tier, MIB, "--interval", "60", "--status", status) as process:
        until(status.exists)
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(5) == 0
        assert time.monotonic() - began < 0.5


def test_killed_in_the_middle_and_run_again(tier: Path) -> None:
    count = 4000
    for i in range(count):
        put(tier, "ns-aa", f"{i:04x}", size=4 * KIB, age_s=HOUR - i / 10)
    files = tier / "ns-aa"
    with running(tier, 4 * KIB * count // 4) as process:
        until(lambda: len(list(files.iterdir())) < count)
        process.kill()
        process.wait()
    left = len(list(files.iterdir()))
    assert count // 5 < left < count  # it was killed in the middle
    status = once(tier, 4 * KIB * count // 4)
    assert status["usage_bytes"] == usage(tier) <= 4 * KIB * count // 4 * 0.85
    assert {p.name for p in tier.iterdir()} <= {
        pruner.MARKER,
        "ns-aa",
        f".kvhost-probe.{process.pid}",
    }


def test_several_pruners_share_a_tier(tier: Path) -> None:
    for i in range(1000):
        put(tier, "ns-aa", f"{i:04x}", size=4 * KIB, age_s=HOUR - i)
    argv = [
        sys.executable,
        SCRIPT,
        "once",
        "--tier",
        str(tier),
        "--limit-bytes",
        "2048000",
        "--json",
    ]
    many = [subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    reports = [json.loads(p.communicate(timeout=60)[0]) for p in many]
    assert [p.returncode for p in many] == [0] * 4
    removed = sum(r["removed"].get("limit", {}).get("files", 0) for r in reports)
    assert (
        removed == 1000 - len(list((tier / "ns-aa").iterdir())) == 575
    )  # no one removes for another


def test_a_lock_held_by_another_is_said(tier: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pruner, "LOCK_WAIT_S", 0.1)
    kv = put(tier, "ns-aa", "00")
    with (tier / pruner.MARKER).open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert pruner.main(["once", "--tier", str(tier), "--limit-bytes", "1"]) == 4
        assert kv.exists()


def test_a_tier_that_goes_away_is_waited_for(tier: Path, tmp_path: Path) -> None:
    status = tmp_path / "status.json"

    def state() -> str:
        return str(json.loads(status.read_text())["state"])

    with running(tier, 8 * 64 * KIB, "--interval", "0.2", "--status", status) as process:
        until(status.exists)
        tier.rename(tmp_path / "away")
        until(lambda: state().startswith("stopped: "))
        tier.mkdir()  # an empty directory where the mount should be
        time.sleep(0.5)
        assert state().startswith("stopped: ")
        tier.rmdir()
        (tmp_path / "away").rename(tier)
        for i in range(9):
            put(tier, "ns-aa", f"{i:02x}")
        until(lambda: state() == "ok" and usage(tier) < 8 * 64 * KIB)
        assert process.poll() is None


def test_a_status_that_cannot_be_written_stops_nothing(tier: Path, tmp_path: Path) -> None:
    with running(tier, MIB, "--interval", "0.2", "--status", tmp_path / "none" / "s") as process:
        for i in range(20):
            put(tier, "ns-aa", f"{i:02x}")
        until(lambda: usage(tier) < MIB)
        assert process.poll() is None


# --- the sweep --------------------------------------------------------------------------------


def names(tier: Path) -> set[str]:
    return {p.name.split("@")[-1] for p in tier.glob("ns-*/*")}


def test_sweep_removes_temporary_and_empty_files_at_any_age(tier: Path) -> None:
    put(tier, "ns-aa", "00")
    put(tier, "ns-aa", "01", size=0)
    put(tier, "ns-aa", "a.tmp", age_s=0)
    put(tier, "ns-bb", "b.data.tmp.01", age_s=0)
    removed = sweep(tier, "--current", "ns-aa")["removed"]
    assert {k: v["files"] for k, v in removed.items()} == {"temporary": 2, "empty": 1}
    assert names(tier) == {"00.data"}


@pytest.mark.parametrize(
    ("declared", "sizes", "left"),
    [
        pytest.param("65536", [65536] * 2 + [65535, 65537], 2, id="declared"),
        pytest.param("65536", [4096] * 20, 0, id="declared, and all differ"),
        pytest.param("null", [65536] * 18 + [100, 70000], 18, id="learned from 90 %"),
        pytest.param("null", [65536] * 17 + [100, 70000], 19, id="fewer agree"),
        pytest.param("null", [65536] * 8 + [100], 9, id="too few files to learn from"),
        pytest.param(None, [65536] * 18 + [100, 70000], 18, id="no metadata"),
        pytest.param("true", [65536] * 18 + [100, 70000], 18, id="metadata that makes no sense"),
    ],
)
def test_sweep_removes_files_of_a_wrong_size(
    tier: Path, declared: str | None, sizes: list[int], left: int
) -> None:
    for i, size in enumerate(sizes):
        put(tier, "ns-aa", f"{i:02x}", size=size)
    if declared:
        (tier / "ns-aa" / pruner.METADATA).write_text(f'{{"chunk_bytes": {declared}}}')
    status = sweep(tier)
    assert status["files"] == left == len(list((tier / "ns-aa").glob("*.data")))
    assert bool(status["left_alone"]) == (declared == "true")


def test_sweep_learns_apart_for_each_namespace_rank_and_group(tier: Path) -> None:
    for i in range(12):
        put(tier, "ns-aa", f"m@0x02000200@0@{i:02x}.data", size=1000)
        put(tier, "ns-aa", f"m@0x02010201@0@{i:02x}.data", size=2000)
        put(tier, "ns-aa", f"m@0x02000200@1@{i:02x}.data", size=3000)
        put(tier, "ns-bb", f"m@0x02000200@0@{i:02x}.data", size=4000)
    assert sweep(tier)["files"] == 48
    put(tier, "ns-aa", "m@0x02000200@0@ff.data", size=2000)
    assert sweep(tier)["removed"] == {"wrong size": {"files": 1, "bytes": 4096}}


OTHER_BOOT = {"boot_id": "00000000-0000-0000-0000-000000000000"}


@pytest.mark.parametrize(
    ("unclean", "record", "removes"),
    [
        ("auto", {**OTHER_BOOT, "clean_stop": False}, True),
        ("auto", {**OTHER_BOOT, "clean_stop": None}, True),
        ("auto", OTHER_BOOT, True),
        ("auto", {**OTHER_BOOT, "clean_stop": True}, False),
        ("auto", {"boot_id": pruner.boot_id(), "clean_stop": False}, False),
        ("auto", {"clean_stop": False}, False),
        ("auto", None, False),
        ("no", {**OTHER_BOOT, "clean_stop": False}, False),
        ("yes", None, True),
        ("yes", {"boot_id": pruner.boot_id(), "clean_stop": True}, True),
    ],
)
def test_sweep_drops_what_may_not_have_been_synced(
    tier: Path, tmp_path: Path, unclean: str, record: dict[str, object] | None, removes: bool
) -> None:
    """Only after the machine, not the process, stopped; reckoned from the newest file."""
    for name, age in (("00", HOUR), ("01", HOUR + 55), ("02", HOUR + 65), ("03", 9 * HOUR)):
        put(tier, "ns-aa", name, age_s=age)
    put(tier, "ns-aa", "04", age_s=-HOUR)  # of the future: the clock was wrong
    extra: list[str | Path] = ["--unclean", unclean, "--unsynced-seconds", "60"]
    if record is not None:
        (tmp_path / "record").write_text(json.dumps(record))
        extra += ["--record", tmp_path / "record"]
    status = sweep(tier, *extra)
    kept = {"02.data", "03.data"} if removes else {f"0{i}.data" for i in range(5)}
    assert names(tier) == kept
    assert status["removed"].get("unsynced", {}).get("files", 0) == (3 if removes else 0)


def test_the_window_of_what_is_unsynced_is_the_kernels(tier: Path) -> None:
    expire = int(Path("/proc/sys/vm/dirty_expire_centisecs").read_text()) / 100
    assert sweep(tier)["unsynced_seconds"] >= expire + 25
