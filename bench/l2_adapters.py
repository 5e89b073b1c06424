"""Compare LMCache's file L2 adapters on the real engine: what survives, how fast, what breaks.

    python -m bench.l2_adapters --env-bin ENV/bin --model MODEL_DIR --dir SCRATCH [--full-disk DIR]

Starts `lmcache server` and `vllm serve` for each adapter, stops what it started, prints a table and
writes the figures as JSON (--out). --full-disk is a directory on a small filesystem of its own
(about 96 MiB, smaller than one prompt's KV). `nixl_store_dynamic` needs nixl: give
`--pythonpath DIR` where that lies outside the environment. Times are of this machine only.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.engine_tools import Engine, Reply

PRUNER = Path(__file__).parents[1] / "kvhost" / "onhost" / "pruner.py"
ADAPTERS = ("fs", "fs_native", "nixl_store_dynamic")
Row = dict[str, Any]


def kv_files(directory: Path) -> list[Path]:
    """X.data of fs and fs_native, X.bin of nixl_store_dynamic."""
    return sorted(p for p in directory.rglob("*") if p.suffix in (".data", ".bin"))


def allocated(path: Path) -> int:
    try:
        return path.stat().st_blocks * 512
    except FileNotFoundError:
        return 0


def remove(files: list[Path]) -> None:
    for path in files:
        path.unlink(missing_ok=True)


def settle(directory: Path) -> None:
    """Wait until nothing has been written for a second."""
    last, since = -1, time.monotonic()
    while time.monotonic() - since < 1:
        now = sum(p.stat().st_size for p in directory.rglob("*") if p.is_file())
        if now != last:
            last, since = now, time.monotonic()
        time.sleep(0.1)


class Bench:
    """All scenarios of one adapter."""

    def __init__(self, engine: Engine, row: Row) -> None:
        self.engine, self.row, self.args = engine, row, engine.args
        self.dir = engine.args.dir / f"l2-{engine.adapter}" / "ns-0b"
        shutil.rmtree(self.dir.parent, ignore_errors=True)
        self.dir.mkdir(parents=True)
        (self.dir.parent / ".kvhost-tier").touch()
        self.random = random.Random(engine.adapter)
        self.known: list[tuple[list[int], Reply]] = []

    def prompt(self) -> list[int]:
        return [self.random.randrange(32, 127) for _ in range(self.args.tokens)]

    def run(self) -> None:
        self.engine.start_cache(self.dir)
        self.engine.start_runner()
        self.cold()
        self.engine.stop_all()
        self.engine.start_cache(self.dir)
        self.engine.start_runner()
        self.after_restart()
        if self.args.quick:
            return
        self.damaged()
        self.pruned_under_load()
        self.server_restart()
        self.limit_over_restarts()
        if self.args.full_disk:
            self.full_disk(self.args.full_disk)

    def cold(self) -> None:
        self.engine.ask(self.prompt()[:600])  # the first request compiles things
        for _ in range(self.args.repeats):
            prompt = self.prompt()
            self.known.append((prompt, self.engine.ask(prompt)))
            settle(self.dir)
        replies = [r for _, r in self.known]
        self.row["cold_ttft_s"] = median(r.ttft for r in replies)
        self.row["cold_cached"] = max(r.cached for r in replies)
        sizes = sorted({p.stat().st_size for p in kv_files(self.dir)})
        self.row["bytes_per_token"] = sizes[0] // 256
        self.row["file_sizes"], self.row["files"] = sizes, len(kv_files(self.dir))

    def after_restart(self) -> None:
        before = self.engine.l2_hits()
        replies = [(old, self.engine.ask(prompt)) for prompt, old in self.known]
        self.row["restart_ttft_s"] = median(new.ttft for _, new in replies)
        self.row["restart_cached"] = [new.cached for _, new in replies]
        self.row["restart_l2_tokens"] = self.engine.l2_hits() - before
        self.row["restart_same_text"] = all(old.text == new.text for old, new in replies)
        again = []
        for prompt, _ in self.known:
            self.engine.forget()
            again.append(self.engine.ask(prompt).ttft)
        self.row["l2_ttft_s"] = median(again)

    def damaged(self) -> None:
        """Files of one prompt each: cut to half, emptied, twice as long."""
        for name, factor in (("truncated", 0.5), ("empty", 0), ("oversized", 2)):
            prompt = self.prompt()
            before = set(kv_files(self.dir))
            old = self.engine.ask(prompt)
            settle(self.dir)
            victim = sorted(set(kv_files(self.dir)) - before, key=lambda p: p.stat().st_mtime)[10]
            size = victim.stat().st_size
            os.truncate(victim, int(size * factor))
            self.engine.forget()
            new = self.engine.ask(prompt)
            settle(self.dir)
            self.engine.forget()
            again = self.engine.ask(prompt)
            settle(self.dir)
            self.row[name] = {
                "status": new.status,
                "cached": new.cached,
                "same_text": new.text == old.text,
                "cached_again": again.cached,
                "same_text_again": again.text == old.text,
                "repaired": victim.exists() and victim.stat().st_size == size,
            }

    @contextlib.contextmanager
    def pruner(self, limit: int, interval: float = 1.0) -> Iterator[None]:
        command = [sys.executable, str(PRUNER), "run", "--tier", str(self.dir.parent)]
        command += ["--limit-bytes", str(limit), "--interval", str(interval), "--low", "0.85"]
        with (self.args.dir / f"{self.engine.adapter}-pruner.log").open("wb") as log:
            process = subprocess.Popen(command, stderr=log)
            try:
                yield
            finally:
                process.terminate()
                process.wait()

    def pruned_under_load(self) -> None:
        """Known and new prompts while the pruner works and files vanish during the request."""
        replies = []
        with self.pruner(2 * self.args.tokens * self.row["bytes_per_token"]):
            for i in range(self.args.repeats * 6):
                prompt, old = self.known[0] if i % 3 else (self.prompt(), None)
                self.engine.forget()
                files = self.random.sample(kv_files(self.dir), 3) if kv_files(self.dir) else []
                timer = threading.Timer(self.random.uniform(0, 0.3), remove, [files])
                timer.start()
                new = self.engine.ask(prompt)
                timer.join()
                settle(self.dir)
                replies.append((new, old is None or old.text == new.text))
        prompt, old = self.known[0]
        self.engine.forget()
        self.engine.ask(prompt)
        settle(self.dir)
        self.engine.forget()
        after = self.engine.ask(prompt)
        self.row["pruned"] = {
            "requests": len(replies),
            "answered": sum(r.status == 200 and bool(r.text) for r, _ in replies),
            "same_text": sum(same for _, same in replies),
            "cached": [r.cached for r, _ in replies],
            "stored_again_cached": after.cached,
        }

    def limit_over_restarts(self) -> None:
        """Three starts with new prompts each against a limit of 100 MiB, sampled every 100 ms."""
        limit, interval = 100 << 20, 1.0
        stop, above, most, longest = threading.Event(), 0.0, 0, 0.0

        def sample() -> None:
            nonlocal above, most, longest
            while not stop.wait(0.1):
                now = time.monotonic()
                used = sum(allocated(p) for p in self.dir.iterdir())
                most = max(most, used)
                above = 0.0 if used <= limit else above or now
                longest = max(longest, now - above if above else 0.0)

        replies: list[Reply] = []
        with self.pruner(limit, interval):
            time.sleep(2)  # what lay there before goes first
            thread = threading.Thread(target=sample)
            thread.start()
            for _ in range(3):
                self.engine.stop_all()
                self.engine.start_cache(self.dir)
                self.engine.start_runner()
                replies += [self.engine.ask(self.prompt()[:3000]) for _ in range(4)]
                settle(self.dir)
            stop.set()
            thread.join()
        self.row["limit_100_mib_over_3_starts"] = {
            "answered": sum(r.status == 200 and bool(r.text) for r in replies),
            "requests": len(replies),
            "written_mib": len(replies) * (3000 // 256 * 256) * self.row["bytes_per_token"] >> 20,
            "most_mib": round(most / (1 << 20), 1),
            "above_limit_s": round(longest, 2),
            "interval_s": interval,
        }

    def server_restart(self) -> None:
        """The cache server alone: killed, with requests while it is away; then stopped in order."""
        for number in (signal.SIGKILL, signal.SIGTERM):
            began = time.monotonic()
            self.engine.stop("cache", number)
            away = [self.timed(self.prompt())] if number == signal.SIGKILL else []
            self.engine.start_cache(self.dir)
            back = time.monotonic()
            prompt, replies = self.prompt(), []
            while time.monotonic() - back < 90:
                with contextlib.suppress(OSError):
                    self.engine.forget()
                replies.append(self.engine.ask(prompt))
                if replies[-1].cached > len(prompt) * 0.9:
                    break
                settle(self.dir)
            self.row[f"server_{signal.Signals(number).name}"] = {
                "down_s": round(back - began, 1),
                "while_away": away,
                "answered": all(r.status == 200 for r in replies),
                "same_text": len({r.text for r in replies}) == 1,
                "cached": [r.cached for r in replies],
                "hit_again_after_s": round(time.monotonic() - back, 1),
            }

    def timed(self, prompt: list[int]) -> Row:
        began = time.monotonic()
        reply = self.engine.ask(prompt)
        seconds = round(time.monotonic() - began, 2)
        return {"status": reply.status, "seconds": seconds, "cached": reply.cached}

    def full_disk(self, directory: Path) -> None:
        """A filesystem with less room than one prompt needs; then room again."""
        where = directory / "ns-0f"
        shutil.rmtree(where, ignore_errors=True)
        where.mkdir()
        self.engine.stop_all()
        self.engine.start_cache(where)
        self.engine.start_runner()
        prompts = [self.prompt() for _ in range(2)]
        first = [self.engine.ask(p) for p in prompts]
        settle(where)
        self.engine.forget()
        again = [self.engine.ask(p) for p in prompts]
        settle(where)
        sizes = {p.stat().st_size for p in kv_files(where)}
        left = [p.name for p in where.rglob("*") if ".tmp" in p.name]
        for path in kv_files(where):
            path.unlink()
        self.engine.forget()
        short = prompts[0][:3000]
        self.engine.ask(short)
        settle(where)
        self.engine.forget()
        room = self.engine.ask(short)
        self.row["full_disk"] = {
            "answered": all(r.status == 200 and r.text for r in (*first, *again)),
            "same_text": all(a.text == b.text for a, b in zip(first, again, strict=True)),
            "cached_again": [r.cached for r in again],
            "file_sizes": sorted(sizes),
            "temporary_left": len(left),
            "cached_with_room_again": room.cached,
        }


def median(values: Iterator[float] | list[float]) -> float:
    return round(statistics.median(values), 3)


def table(rows: list[Row]) -> str:
    keys = list(dict.fromkeys(k for row in rows for k in row))
    lines: list[list[str]] = []
    for key in keys:
        value = [row.get(key, "-") for row in rows]
        inner: dict[str, None] = dict.fromkeys(k for v in value if isinstance(v, dict) for k in v)
        if not inner:
            lines.append([key, *map(str, value)])
        for k in inner:
            cells = [v.get(k, "-") if isinstance(v, dict) else v for v in value]
            lines.append([f"{key}.{k}", *map(str, cells)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--env-bin", type=Path, required=True, help="bin of the engine environment")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dir", type=Path, required=True, help="scratch: caches and logs")
    parser.add_argument("--full-disk", type=Path, help="directory on a small filesystem")
    parser.add_argument(
        "--pythonpath", type=Path, help="where nixl lies, if not in the environment"
    )
    parser.add_argument("--adapters", default=",".join(ADAPTERS))
    parser.add_argument("--tokens", type=int, default=8200)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--port", type=int, default=23110, help="and the three after it")
    parser.add_argument("--max-workers", type=int, default=4)
    parser.add_argument("--no-shm", dest="shm", action="store_false", help="no --shm-name")
    parser.add_argument("--quick", action="store_true", help="only the restart")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.dir.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    for adapter in args.adapters.split(","):
        row: Row = {"adapter": adapter}
        rows.append(row)
        engine = Engine(args, adapter)
        try:
            Bench(engine, row).run()
        except (RuntimeError, OSError, IndexError) as why:
            row["failed"] = f"{type(why).__name__}: {why}"
        finally:
            engine.stop_all()
        print(json.dumps(row), file=sys.stderr, flush=True)
    print(table(rows))
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1))
    return int(any("failed" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
