"""What a sweep removes before the cache server starts."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from kvhost.onhost import pruner, pruner_tier
from tests.pruner_tools import (
    HOUR,
    make_tier,
    put,
    sweep,
)


@pytest.fixture
def tier(tmp_path: Path) -> Path:
    return make_tier(tmp_path / "tier")


def names(tier: Path) -> set[str]:
    return {p.name.split("@")[-1] for p in tier.glob("ns-*/*")}


def test_sweep_removes_temporary_and_empty_files_at_any_age(tier: Path) -> None:
    put(tier, "ns-aa", "00")
    put(tier, "ns-aa", "01", size=0)
    put(tier, "ns-aa", "a.tmp", age_s=0)
    put(tier, "ns-bb", "b.bin.tmp.01", age_s=0)
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
        pytest.param("null", [65536] * 8 + [100], 9, id="eight of nine are too few"),
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
        (tier / "ns-aa" / pruner_tier.METADATA).write_text(f'{{"chunk_bytes": {declared}}}')
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
        (False, {**OTHER_BOOT, "clean_stop": False}, True),
        (False, {**OTHER_BOOT, "clean_stop": None}, True),
        (False, OTHER_BOOT, True),
        (False, {**OTHER_BOOT, "clean_stop": True}, False),
        (False, {"boot_id": pruner.boot_id(), "clean_stop": False}, False),
        (False, {}, False),
        (False, None, False),
        (False, "{broken", True),
        (False, "[]", True),
        (True, {**OTHER_BOOT, "clean_stop": True}, True),
        (True, {"boot_id": pruner.boot_id(), "clean_stop": False}, False),
        (True, None, True),
    ],
)
def test_sweep_drops_what_may_not_have_been_synced(
    tier: Path, tmp_path: Path, unclean: bool, record: dict[str, object] | str | None, removes: bool
) -> None:
    """Only after the machine, not the process, stopped; reckoned from the newest file."""
    for name, age in (("00", HOUR), ("01", HOUR + 55), ("02", HOUR + 65), ("03", 9 * HOUR)):
        put(tier, "ns-aa", name, age_s=age)
    put(tier, "ns-aa", "04", age_s=-HOUR)  # of the future: the clock was wrong
    extra: list[str | Path] = ["--unsynced-seconds", "60", "--record", tmp_path / "record"]
    if unclean:
        extra.append("--unclean")
    if record is not None:
        text = record if isinstance(record, str) else json.dumps(record)
        (tmp_path / "record").write_text(text)
    status = sweep(tier, *extra)
    kept = {"02.data", "03.data"} if removes else {f"0{i}.data" for i in range(5)}
    assert names(tier) == kept
    assert status["removed"].get("unsynced", {}).get("files", 0) == (3 if removes else 0)


@pytest.mark.parametrize(
    ("sign", "kept"),
    [
        ({"boot_id": "other", "time_unix": -HOUR + 65}, "0123"),  # it still ran long after 00
        ({"boot_id": "other", "time_unix": -HOUR + 10}, "123"),
        ({"boot_id": "other", "time_unix": -9 * HOUR}, "23"),  # before the newest file
        ({"boot_id": "other", "time_unix": HOUR}, "23"),  # of the future
        ({"boot_id": "yet another", "time_unix": -10}, "23"),
        (
            {"boot_id": pruner.boot_id(), "time_unix": -10},
            "23",
        ),  # already at work
        ({"boot_id": "other"}, "23"),
        ([], "23"),
        (None, "23"),
    ],
)
def test_a_machine_that_ran_on_after_its_last_write_keeps_it(
    tier: Path, tmp_path: Path, sign: Any, kept: str
) -> None:
    for name, age in (("00", HOUR), ("01", HOUR + 55), ("02", HOUR + 65), ("03", 9 * HOUR)):
        put(tier, "ns-aa", name, age_s=age)
    (tmp_path / "record").write_text(json.dumps({"boot_id": "other", "clean_stop": None}))
    if isinstance(sign, dict) and "time_unix" in sign:
        sign = {**sign, "time_unix": time.time() + sign["time_unix"]}
    if sign is not None:
        (tmp_path / "status").write_text(json.dumps(sign))
    where = ("--record", tmp_path / "record", "--status", tmp_path / "status")
    sweep(tier, "--unsynced-seconds", "60", *where)
    assert names(tier) == {f"0{n}.data" for n in kept}


def test_the_window_of_what_is_unsynced_is_the_kernels(tier: Path) -> None:
    expire = int(Path("/proc/sys/vm/dirty_expire_centisecs").read_text()) / 100
    assert sweep(tier)["unsynced_seconds"] >= expire + 25


@pytest.mark.parametrize("kind", ["deep", "fifo", "large", "link"])
@pytest.mark.parametrize("which", ["record", "status", "metadata"])
def test_a_sweep_ends_whatever_its_files_are(
    tier: Path, tmp_path: Path, which: str, kind: str
) -> None:
    """It goes before the service: one that hung or failed would let nothing start."""
    put(tier, "ns-aa", "00", age_s=0)
    (tmp_path / "record").write_text(json.dumps({"boot_id": "other", "clean_stop": None}))
    (tmp_path / "status").write_text("{}")
    metadata = tier / "ns-aa" / pruner_tier.METADATA
    path = metadata if which == "metadata" else tmp_path / which
    path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to("/dev/zero")
    elif kind == "large":
        with path.open("wb") as file:
            file.truncate(pruner_tier.MOST_BYTES + 1)
    else:
        path.write_text("[" * 200_000)
    where = ("--record", tmp_path / "record", "--status", tmp_path / "status")
    status = sweep(tier, *where, "--unsynced-seconds", "60")
    assert status["state"] == "ok"
    # of a stop that was not in order: what was written last goes
    assert "00.data" not in names(tier)
