"""The pruner on the files of vLLM's own tier, which lie in directories below a namespace."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from kvhost.onhost import pruner, pruner_tier
from tests.pruner_tools import HOUR, KIB, MIB, cli, make_tier, once, root_only, sweep

MODEL = "_srv_models_m_0123456789ab"


@pytest.fixture
def tier(tmp_path: Path) -> Path:
    return make_tier(tmp_path / "tier")


def chunk(
    tier: Path,
    number: int,
    size: int = 64 * KIB,
    age_s: float = HOUR,
    ns: str = "ns-aa",
    suffix: str = "",
) -> Path:
    """A file as vLLM 0.32.0 names it."""
    digest = f"{number:03x}".rjust(3, "0") + f"{number:02x}"[-2:] + "ab" * 29
    folder = tier / ns / f"{MODEL}_r0" / digest[:3] / f"{digest[3:5]}_g0"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{digest}.bin{suffix}"
    path.write_bytes(os.urandom(size))
    when = time.time_ns() - int(age_s * 1e9)
    os.utime(path, ns=(when, when))
    about = tier / ns / MODEL / "config.json"
    about.parent.mkdir(exist_ok=True)
    about.write_text("{}")
    return path


def test_the_least_recently_used_go_first_down_to_the_low_mark(tier: Path) -> None:
    files = [chunk(tier, n, age_s=HOUR * (20 - n)) for n in range(10)]
    status = once(tier, 10 * 64 * KIB, "--high", "0.9", "--low", "0.5")
    assert [path.exists() for path in files] == [False] * 5 + [True] * 5
    assert status["files"] == 5 and status["usage_bytes"] == 5 * 64 * KIB
    assert status["namespaces"]["ns-aa"] == {"files": 5, "bytes": 5 * 64 * KIB}
    assert (tier / "ns-aa" / MODEL / "config.json").exists() and not status["left_alone"]


def test_an_old_namespace_goes_before_the_current_one_whatever_wrote_it(tier: Path) -> None:
    old, new = chunk(tier, 1, age_s=60, ns="ns-bb"), chunk(tier, 2, age_s=HOUR)
    once(tier, 100 * KIB, "--current", "ns-aa")
    assert not old.exists() and new.exists()


def test_a_sweep_removes_what_is_no_whole_chunk_and_empty_directories(tier: Path) -> None:
    good = [chunk(tier, n) for n in range(40)]
    bad = [chunk(tier, 70, 4 * KIB), chunk(tier, 71, 68 * KIB), chunk(tier, 72, 0)]
    temporary = chunk(tier, 73, suffix="_81985529216486895.tmp")
    status = sweep(tier)
    assert all(path.exists() for path in good)
    assert not any(path.parent.parent.exists() for path in [*bad, temporary])
    reasons = {why: row["files"] for why, row in status["removed"].items()}
    assert reasons == {"wrong size": 2, "empty": 1, "temporary": 1}
    assert (tier / "ns-aa" / MODEL / "config.json").exists()


def test_a_size_that_is_declared_counts_from_the_first_file_on(tier: Path) -> None:
    one = chunk(tier, 1, 64 * KIB)
    (tier / "ns-aa" / pruner_tier.METADATA).write_text('{"chunk_bytes": 4096}')
    sweep(tier)
    assert not one.exists()


def test_no_other_directory_is_entered(tier: Path) -> None:
    inside = chunk(tier, 1)
    strangers = [
        tier / "ns-aa" / "mine" / "abc" / "de_g0" / "ff.bin",
        tier / "ns-aa" / f"{MODEL}_r0" / "other" / "de_g0" / "ff.bin",
        tier / "ns-aa" / f"{MODEL}_r0" / "abc" / "other" / "ff.bin",
        inside.with_name("notes.txt"),
        inside.parent / "deeper" / "ff.bin",
        tier / "ns-aa" / f"{MODEL}_r0" / "ff.bin",
    ]
    for path in strangers:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * 64 * KIB)
    status = once(tier, 1, rc=0)
    assert not inside.exists() and all(path.exists() for path in strangers)
    assert sum(status["left_alone"].values()) == len(strangers)


def test_no_link_is_followed_to_a_file_or_a_directory(tier: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    real = chunk(tier, 1)
    (outside / "00_g0").mkdir(parents=True)
    precious = outside / "00_g0" / f"{'00' * 32}.bin"
    precious.write_bytes(b"x" * MIB)
    (real.parents[2] / "000").symlink_to(outside)
    real.with_name(f"{'aa' * 32}.bin").symlink_to(precious)
    status = once(tier, 1)
    assert precious.stat().st_size == MIB and not real.exists()
    assert status["files"] == 0


def test_a_directory_that_is_swapped_for_a_link_after_the_scan_loses_nothing(
    tier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv, outside = chunk(tier, 1), tmp_path / "outside"
    real = pruner.choose

    def swap(*args: object) -> object:
        outside.mkdir()
        (outside / kv.name).write_bytes(kv.read_bytes())
        kv.parent.rename(tmp_path / "moved")
        kv.parent.symlink_to(outside)
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(pruner, "choose", swap)
    pruner.main(["once", "--tier", str(tier), "--limit-bytes", "1"])
    assert (outside / kv.name).exists() and (tmp_path / "moved" / kv.name).exists()


@root_only
def test_another_mount_below_a_namespace_is_left_alone(tier: Path, tmp_path: Path) -> None:
    kv, other = chunk(tier, 1), tmp_path / "other"
    other.mkdir()
    (other / kv.name).write_bytes(b"x" * 64 * KIB)
    subprocess.run(["mount", "--bind", str(other), str(kv.parent)], check=True)
    try:
        status = once(tier, 1)
        assert status["left_alone"] == {"directory on another mount": 1}
        assert (other / kv.name).exists()
    finally:
        subprocess.run(["umount", str(kv.parent)], check=True)


def test_a_run_leaves_empty_directories_to_the_sweep(tier: Path) -> None:
    kv = chunk(tier, 1)
    once(tier, 1)
    assert kv.parent.is_dir() and not kv.exists()
    assert cli("sweep", "--tier", tier, "--dry-run").returncode == 0 and kv.parent.is_dir()
    sweep(tier)
    assert not kv.parents[2].exists() and (tier / "ns-aa").is_dir()


def test_a_chunk_that_was_read_is_used_and_each_further_read_counts(tier: Path) -> None:
    old, new = chunk(tier, 1, age_s=9 * HOUR), chunk(tier, 2, age_s=HOUR)
    for _ in range(2):
        time.sleep(0.05)
        old.read_bytes()
        status = once(tier, MIB)  # nothing goes, times are re-armed
        assert status["files"] == 2
    if status["policy"].startswith("fifo"):
        pytest.skip("access times do not move on this mount")
    for path in (new, old):
        time.sleep(2.1)  # beyond what counts as one prompt
        path.read_bytes()
    once(tier, 100 * KIB)
    assert old.exists() and not new.exists()
