"""Compare LMCache's file L2 adapters on the real engine: what survives, how fast, what breaks.

    python bench/l2_adapters.py --env-bin ENV/bin --model MODEL_DIR --dir SCRATCH [--full-disk DIR]

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
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

PRUNER = Path(__file__).parents[1] / "kvhost" / "onhost" / "pruner.py"
ADAPTERS = ("fs", "fs_native", "nixl_store_dynamic")
Row = dict[str, Any]


def l2_spec(adapter: str, directory: Path) -> dict[str, Any]:
    """The value of --l2-adapter (lmcache 0.5.6)."""
    if adapter != "nixl_store_dynamic":
        return {"type": adapter, "base_path": str(directory)}
    params = {"file_path": str(directory), "use_direct_io": "false", "max_capacity_gb": "100"}
    return {"type": adapter, "backend": "POSIX", "backend_params": params}


class Reply(NamedTuple):
    """One answer: HTTP status, seconds to the first token, cached tokens, the text."""

    status: int
    ttft: float
    cached: int
    text: str


class Engine:
    """A cache server and a runner in front of it, on loopback ports of their own."""

    def __init__(self, args: argparse.Namespace, adapter: str) -> None:
        self.args, self.adapter = args, adapter
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.env = {
            **os.environ,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
            "VLLM_HOST_IP": "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "lo",
            "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "LMCACHE_TRACK_USAGE": "false",
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }
        if args.pythonpath:
            self.env["PYTHONPATH"] = str(args.pythonpath)

    def _start(self, name: str, command: list[str], health: str) -> None:
        log = (self.args.dir / f"{self.adapter}-{name}.log").open("ab")
        self.processes[name] = subprocess.Popen(
            command, env=self.env, stdout=log, stderr=log, start_new_session=True
        )
        log.close()
        deadline = time.monotonic() + 240
        while get(health) is None:
            if self.processes[name].poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{name} did not come up; see {log.name}")
            time.sleep(0.2)

    def start_cache(self, directory: Path) -> None:
        port = self.args.port
        command = [f"{self.args.env_bin}/lmcache", "server", "--host", "127.0.0.1"]
        command += ["--port", str(port + 1), "--http-host", "127.0.0.1"]
        command += ["--http-port", str(port + 2), "--prometheus-port", str(port + 3)]
        command += ["--l1-size-gb", "1", "--l1-init-size-gb", "1", "--eviction-policy", "LRU"]
        command += ["--chunk-size", "256", "--supported-transfer-mode", "auto"]
        command += ["--max-workers", str(self.args.max_workers)]
        command += ["--shm-name", f"kvhost_bench_{port}"] if self.args.shm else []
        command += ["--l2-adapter", json.dumps(l2_spec(self.adapter, directory))]
        self._start("cache", command, f"http://127.0.0.1:{port + 2}/healthcheck")

    def start_runner(self) -> None:
        extra = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": self.args.port + 1}
        extra |= {"lmcache.mp.mq_timeout": 10, "lmcache.mp.heartbeat_interval": 2}
        transfer = {
            "kv_connector": "LMCacheMPConnector",
            "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": extra,
        }
        command = [f"{self.args.env_bin}/vllm", "serve", str(self.args.model), "--enforce-eager"]
        command += ["--served-model-name", "m", "--max-model-len", "16384", "--dtype", "float32"]
        command += ["--host", "127.0.0.1", "--port", str(self.args.port), "--max-num-seqs", "4"]
        command += ["--enable-prompt-tokens-details", "--kv-transfer-config", json.dumps(transfer)]
        self._start("runner", command, f"http://127.0.0.1:{self.args.port}/health")

    def stop(self, name: str, number: int = signal.SIGTERM) -> None:
        process = self.processes.pop(name)
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with contextlib.suppress(ProcessLookupError):  # what it left of its own session
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def stop_all(self) -> None:
        for name in list(self.processes)[::-1]:
            self.stop(name)

    def forget(self) -> None:
        """Empty the runner's prefix cache and the server's memory, so that only L2 can answer."""
        post(f"http://127.0.0.1:{self.args.port}/reset_prefix_cache", {})
        post(f"http://127.0.0.1:{self.args.port + 2}/cache/clear", {"tier": "l1", "force": False})

    def ask(self, prompt: list[int], timeout: float = 120) -> Reply:
        body = {"model": "m", "prompt": prompt, "max_tokens": 16, "temperature": 0, "stream": True}
        body["stream_options"] = {"include_usage": True}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.args.port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        began, ttft, cached, text = time.monotonic(), 0.0, 0, ""
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                for line in answer:
                    if not line.startswith(b"data: {"):
                        continue
                    event = json.loads(line[6:])
                    if "error" in event:
                        return Reply(500, 0, 0, str(event["error"])[:200])
                    if event.get("choices"):
                        ttft = ttft or time.monotonic() - began
                        text += event["choices"][0]["text"]
                    if event.get("usage"):
                        details = event["usage"].get("prompt_tokens_details") or {}
                        cached = details.get("cached_tokens") or 0
                return Reply(answer.status, ttft, cached, text)
        except urllib.error.HTTPError as why:
            return Reply(why.code, 0, 0, why.read().decode()[:200])
        except OSError as why:
            return Reply(0, 0, 0, str(why))

    def l2_hits(self) -> int:
        """Tokens that the server's own counter says came from L2."""
        text = get(f"http://127.0.0.1:{self.args.port + 2}/metrics") or ""
        lines = [n for n in text.splitlines() if n.startswith("lmcache_mp_lookup_hit_l2_tokens")]
        return int(sum(float(n.split()[-1]) for n in lines if "_created" not in n))


def get(url: str) -> str | None:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return str(answer.read().decode())
    except OSError:
        return None


def post(url: str, body: dict[str, Any]) -> None:
    data, kind = json.dumps(body).encode(), {"Content-Type": "application/json"}
    urllib.request.urlopen(urllib.request.Request(url, data, kind), timeout=30).close()


def kv_files(directory: Path) -> list[Path]:
    return sorted(p for p in directory.rglob("*.data"))


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
    def pruner(self, limit: int) -> Iterator[None]:
        command = [sys.executable, str(PRUNER), "run", "--tier", str(self.dir.parent)]
        command += ["--limit-bytes", str(limit), "--interval", "1", "--low", "0.5"]
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
