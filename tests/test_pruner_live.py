"""The pruner as a process: beside a writer, near the floor, killed, in company."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kvhost.onhost import pruner, pruner_tier
from tests.pruner_tools import (
    HOUR,
    KIB,
    MIB,
    SCRIPT,
    make_tier,
    mounted,
    once,
    put,
    root_only,
    running,
    until,
    usage,
)


@pytest.fixture
def tier(tmp_path: Path) -> Path:
    return make_tier(tmp_path / "tier")


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
        until(lambda: usage(tier) < 8 * MIB, 30)
        assert process.poll() is None


@pytest.mark.parametrize(
    ("change", "since", "close"),
    [
        ({}, 1.0, False),
        ({"usage_bytes": 96}, 1.0, True),
        ({"free_bytes": 10**18}, 1.0, True),  # it fell since, perhaps into the tier
        ({"free_floor_bytes": 10**18}, 1.0, True),
        ({"headroom_bytes": 10**18}, 1.0, True),
        ({"usage_bytes": 96}, 0.4, False),  # a pass of 0.5 s: at most half of the time is passes
        ({"usage_bytes": 96, "state": "over, and nothing left"}, 9.0, False),
        ({"usage_bytes": 96, "tier": "/none"}, 1.0, True),
    ],
)
def test_when_not_to_wait_for_the_interval(
    tmp_path: Path, change: dict[str, object], since: float, close: bool
) -> None:
    status: pruner.Status = {"tier": str(tmp_path), "state": "ok", "limit_bytes": 100, "high": 0.95}
    # free space as it is, with room for what others write to the disk meanwhile
    status |= {"usage_bytes": -(1 << 30), "free_bytes": pruner_tier.free_bytes(str(tmp_path))}
    status |= {"free_floor_bytes": 0, "headroom_bytes": 0, **change}
    if "usage_bytes" in change:
        status["free_bytes"] += 1 << 30
    assert pruner.close_to_a_limit(status, 0.5, since) is close


def test_a_pass_at_every_interval_where_free_space_tells_nothing(
    tier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began: list[float] = []
    real = pruner.Pruner.one_pass

    def timed(self: pruner.Pruner) -> pruner.Status:
        began.append(time.monotonic())
        if len(began) == 5:
            raise KeyboardInterrupt
        time.sleep(0.1)  # a pass takes its time, and the interval counts from its start
        return real(self)

    monkeypatch.setattr(pruner.Pruner, "one_pass", timed)
    monkeypatch.setattr(pruner, "close_to_a_limit", lambda *_: False)
    argv = ["run", "--tier", str(tier), "--limit-bytes", "9999", "--interval", "0.5"]
    with pytest.raises(KeyboardInterrupt):
        pruner.run(pruner.parse(argv))
    gaps = [b - a for a, b in itertools.pairwise(began)]
    assert min(gaps) >= 0.5 and sorted(gaps)[1] < 0.75, gaps


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
                lowest = min(lowest, pruner_tier.free_bytes(str(where)))
                time.sleep(0.01)
            assert process.poll() is None
        removals = json.loads(status.read_text())["removed"]["floor"]["files"]
    assert writer.error is None and writer.written > 150
    assert lowest >= floor
    assert removals > 50


def test_sigterm_ends_it_at_once(tier: Path, tmp_path: Path) -> None:
    status = tmp_path / "status.json"
    with running(tier, MIB, "--interval", "60", "--status", status) as process:
        until(status.exists)
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(5) == 0
        assert time.monotonic() - began < 1


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
        pruner_tier.MARKER,
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
    monkeypatch.setattr(pruner_tier, "LOCK_WAIT_S", 0.1)
    kv = put(tier, "ns-aa", "00")
    with (tier / pruner_tier.MARKER).open() as held:
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
        for _ in range(3):
            for i in range(20):
                put(tier, "ns-aa", f"{i:02x}")
            until(lambda: usage(tier) < MIB)
        assert process.poll() is None
