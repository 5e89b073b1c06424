"""What the pruner removes, in which order, and what it never touches: real files and mounts."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvhost.onhost import pruner, pruner_tier
from tests.pruner_tools import (
    HOUR,
    KIB,
    MIB,
    SCRIPT,
    cli,
    make_tier,
    mounted,
    once,
    put,
    root_only,
    snapshot,
    sweep,
    usage,
)


@pytest.fixture
def tier(tmp_path: Path) -> Path:
    return make_tier(tmp_path / "tier")


# --- which files go ---------------------------------------------------------------------------


def test_oldest_files_go_until_the_low_watermark(tier: Path) -> None:
    files = [put(tier, "ns-aa", f"{i:02x}", age_s=HOUR - 10 * i) for i in range(20)]
    status = once(tier, 20 * 64 * KIB, "--high", "0.9", "--low", "0.5")
    assert [f.exists() for f in files] == [False] * 10 + [True] * 10
    assert status["removed"] == {"limit": {"files": 10, "bytes": 10 * 64 * KIB}}
    assert (status["usage_bytes"], status["files"]) == (10 * 64 * KIB, 10)
    assert status["namespaces"] == {"ns-aa": {"files": 10, "bytes": 10 * 64 * KIB}}


@pytest.mark.parametrize("jump_s", [-400 * HOUR, 400 * HOUR])
def test_a_clock_that_jumped_costs_the_order_and_never_the_limit(tier: Path, jump_s: float) -> None:
    """Times of files are all that a jump moves: here all but two are of another clock."""
    before = [put(tier, "ns-aa", f"{i:02x}", age_s=jump_s + HOUR - 10 * i) for i in range(18)]
    since = [put(tier, "ns-aa", name, age_s=1) for name in ("f0", "f1")]
    status = once(tier, 20 * 64 * KIB, "--high", "0.9", "--low", "0.5")
    assert usage(tier) == status["usage_bytes"] == 10 * 64 * KIB
    if jump_s < 0:  # files of the future count as used last: those of now go first
        assert [f.exists() for f in (*since, *before)] == [False] * 10 + [True] * 10
    else:
        assert [f.exists() for f in (*before, *since)] == [False] * 10 + [True] * 10


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
    young = [put(tier, "ns-aa", n, age_s=60) for n in ("a.tmp", "b.bin.tmp.0123")]
    stale = [put(tier, "ns-aa", n, age_s=HOUR) for n in ("c.tmp", "d.bin.tmp.4567")]
    kv = put(tier, "ns-aa", "00", age_s=1)
    status = once(tier, 100 * MIB)
    assert status["removed"] == {"temporary": {"files": 2, "bytes": 2 * 64 * KIB}}
    status = once(tier, 3 * 64 * KIB, "--high", "0.9", "--low", "0.8")
    assert all(f.exists() for f in young) and not any(f.exists() for f in stale)
    assert not kv.exists()  # what is being written counts, the rest makes room for it


def test_nothing_left_to_remove_is_said(tier: Path) -> None:
    put(tier, "ns-aa", "a.tmp", age_s=1)
    assert once(tier, 64 * KIB, rc=5)["state"] == "over, and nothing left"


def test_a_file_used_or_replaced_after_the_scan_stays(
    tier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [put(tier, "ns-aa", f"{i:02x}", age_s=HOUR - 10 * i) for i in range(4)]
    real = pruner.choose

    def used_meanwhile(*args: Any) -> Any:
        chosen = real(*args)
        os.utime(files[0])
        files[3].unlink()
        times = files[1].stat()
        files[1].rename(tmp_path / "held")  # or the new file might get its inode number
        again = put(tier, "ns-aa", "01")  # the same name and times, another file
        os.utime(again, ns=(times.st_atime_ns, times.st_mtime_ns))
        return chosen

    monkeypatch.setattr(pruner, "choose", used_meanwhile)
    assert pruner.main(["once", "--tier", str(tier), "--limit-bytes", "1"]) == 0
    assert [f.exists() for f in files] == [True, True, False, False]


# --- last use ---------------------------------------------------------------------------------


@root_only
@pytest.mark.parametrize(
    ("option", "policy", "lru"),
    [
        ("strictatime", pruner_tier.STRICT, True),
        ("relatime", pruner_tier.REARMED, True),
        ("noatime", pruner_tier.FIFO, False),
    ],
)
def test_order_follows_reads_where_the_mount_shows_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str, policy: str, lru: bool
) -> None:
    """Of two reads of one file within a day, relatime by itself shows only the first."""
    monkeypatch.setattr(pruner, "ONE_PROMPT_NS", 1)
    with mounted(tmp_path / "t", "-t", "tmpfs", "-o", f"{option},size=64m", "none") as where:
        tier = make_tier(where)
        first, second = (put(tier, "ns-aa", n, age_s=a) for n, a in (("00", HOUR), ("01", 60)))
        argv = ["once", "--tier", str(tier), "--limit-bytes"]
        if not lru:
            os.utime(first, (time.time(), first.stat().st_mtime))  # a copy may have kept it
        for path in (first, second, first):
            path.read_bytes()
            time.sleep(0.05)
            assert once(tier, 10 * MIB)["policy"] == policy
        assert pruner.main([*argv, str(2 * 64 * KIB), "--high", "0.9", "--low", "0.5"]) == 0
        assert (first.exists(), second.exists()) == (lru, not lru)


def test_unknown_access_times_are_said(tier: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    worker = pruner.Pruner(pruner.parse(["once", "--tier", str(tier), "--limit-bytes", "9"]))
    assert worker.one_pass()["policy"] == "fifo (access times unknown: No space left on device)"
    monkeypatch.undo()
    assert worker.one_pass()["policy"].startswith("lru")  # it looks again
    assert [p.name for p in tier.iterdir()] == [pruner_tier.MARKER]


# --- never outside its root -------------------------------------------------------------------


def test_only_files_of_namespaces_are_touched(tier: Path) -> None:
    for ns in ("models", "ns-XYZ", "ns-", "xns-aa", "ns-aa/sub"):
        (tier / "ns-aa").mkdir(exist_ok=True)
        put(tier, ns, "00.data")
    (tier / "00.data").write_text("in the tier itself")
    (tier / "ns-ff").write_text("a file by the name of a namespace")
    (tier / "ns-aa" / pruner_tier.METADATA).write_text('{"chunk_bytes": null}')
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
    free = pruner_tier.free_bytes(str(tier))
    status = once(tier, 100 * MIB, "--free-floor-bytes", str(free + MIB), rc=5)
    assert status["removed"]["floor"]["files"] == 2
    assert (tmp_path / "other-name").exists() and not alone.exists()
    assert len((tmp_path / "other-name").read_bytes()) == 64 * KIB

    args = pruner.parse(["once", "--tier", str(tier), "--limit-bytes", "9999999"])
    args.free_floor_bytes, args.headroom_bytes = 100 * KIB, 0
    file = pruner_tier.File("ns-aa", "x.data", 1, 64 * KIB, 64 * KIB, 2, 0, 0)
    scan = pruner_tier.Scan(
        [file, file._replace(links=1, used=5 * 10**9)], {}, Counter(), 90 * KIB, []
    )
    assert pruner.choose(scan, args, 0) == ([(f, "floor") for f in scan.files], False)


def test_the_probe_writes_into_no_file_that_lies_in_its_place(tier: Path, tmp_path: Path) -> None:
    for kind in ("hardlink_to", "symlink_to"):
        precious = tmp_path / kind
        precious.write_text("precious")
        getattr(tier / f".kvhost-probe.{os.getpid()}", kind)(precious)
        assert pruner.main(["once", "--tier", str(tier), "--limit-bytes", "9999"]) == 0
        assert precious.read_text() == "precious"
        assert [p.name for p in tier.iterdir()] == [pruner_tier.MARKER]


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
    (tmp_path / "linked-marker" / pruner_tier.MARKER).symlink_to(tier / pruner_tier.MARKER)
    (tmp_path / "file").touch()
    for path, why in {
        "/": "root of the filesystem",
        "//": "root of the filesystem",
        f"{tmp_path}/link": "is a link",
        f"{tmp_path}/link/": "is a link",
        f"{tmp_path}/bare": f"its {pruner_tier.MARKER} does not open",
        f"{tmp_path}/linked-marker": f"its {pruner_tier.MARKER} does not open",
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
        for script in (Path(SCRIPT), Path(SCRIPT).with_name("pruner_tier.py")):
            shutil.copy(script, where / script.name)
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


def test_all_is_what_the_filesystem_has_without_the_floor(tmp_path: Path) -> None:
    words = ["once", "--tier", str(tmp_path), "--free-floor-bytes", str(1 << 20)]
    st = os.statvfs(tmp_path)
    whole = st.f_blocks * st.f_frsize - (1 << 20)
    assert pruner.parse([*words, "--limit-bytes", "all"]).limit_bytes == whole
    with pytest.raises(SystemExit):
        pruner.parse([*words, "--limit-bytes", "most"])
