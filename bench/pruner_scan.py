"""How long one pass of the pruner takes over many files.

    python -m bench.pruner_scan --files 100000 --dir /var/tmp/scan

Files hold one block each: a pass reads inodes, never contents, so their size does not matter.
Prints a table: a scan with a warm cache of inodes, one with a cold cache (as root only), one that
re-arms every file, and the pass that removes half of them.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from pathlib import Path

from kvhost.onhost import pruner, pruner_tier


def fill(tier: Path, files: int, namespaces: int) -> None:
    (tier / pruner_tier.MARKER).touch()
    for n in range(namespaces):
        directory = tier / f"ns-{n:08x}"
        directory.mkdir()
        for i in range(files // namespaces):
            (directory / f"model@0x01000100@0@{i:064x}.data").write_bytes(b"x" * 4096)


def one_pass(tier: Path, limit: int, *, dry_run: bool) -> tuple[float, pruner.Status]:
    argv = ["once", "--tier", str(tier), "--limit-bytes", str(limit), "--low", "0.5"]
    args = pruner.parse(argv + (["--dry-run"] if dry_run else []))
    began = time.perf_counter()
    status = pruner.Pruner(args).one_pass()
    return time.perf_counter() - began, status


def read_all(tier: Path) -> None:
    for path in tier.glob("ns-*/*"):
        path.read_bytes()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--namespaces", type=int, default=3)
    parser.add_argument("--dir", type=Path, help="where to put them (default: the temp directory)")
    args = parser.parse_args()
    tier = Path(tempfile.mkdtemp(prefix="pruner-scan-", dir=args.dir))
    try:
        fill(tier, args.files, args.namespaces)
        usage = args.files * 4096
        rows = []
        for name, dry in (("scan, warm", True), ("scan, warm, again", True)):
            rows.append((name, *one_pass(tier, 2 * usage, dry_run=dry)))
        read_all(tier)
        rows.append(("scan that re-arms all", *one_pass(tier, 2 * usage, dry_run=False)))
        if os.geteuid() == 0:
            os.sync()
            Path("/proc/sys/vm/drop_caches").write_text("2")
            rows.append(("scan, cold inodes", *one_pass(tier, 2 * usage, dry_run=True)))
        rows.append(("pass that removes half", *one_pass(tier, usage - 4096, dry_run=False)))
        print(f"{'pass':<24}{'files after':>12}{'whole pass s':>14}{'scan s':>9}")
        for name, seconds, status in rows:
            print(
                f"{name:<24}{status['files']:>12}{seconds:>14.3f}{status['last_scan_seconds']:>9}"
            )
        print(rows[-1][2]["policy"])
    finally:
        shutil.rmtree(tier)


if __name__ == "__main__":
    main()
