"""A cache server and a runner on loopback ports, for benches on the real engine; stdlib only."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple


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
