#!/usr/bin/env python3
"""Do the built-in model's answers depend on its KV, and only on its KV?

Runs the real pair (`vllm serve`, `lmcache server` with a file L2 tier) and asks three questions:

- restored: after both services were restarted, does every prompt get the answer of its cold run
  (16 greedy tokens), with its KV from L2?
- planted: after the bytes of one 256-token chunk of every prompt were replaced with another
  prompt's chunk at the same positions, how many answers change?
- numerics: how far apart are the log-probabilities of cold and restored, against the margin
  between the two best tokens? Their ratio says how often a right answer would look wrong.

    python bench/model_sensitivity.py --env-bin ENV/bin --scratch DIR --prompts 100 --tokens 2100

Prints a table, and JSON as the last line (or to --out). Exit status: 0 where all restored answers
agree and at least 99 % of the planted ones changed, 1 where not, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MODEL_SCRIPT = ROOT / "kvhost" / "onhost" / "model_builtin.py"
CHUNK = 256  # tokens
ANSWER = 16  # tokens

# Run in the engine's environment: the server's hash (hex) of every whole chunk of each prompt.
HASHES = """
import json, sys
from lmcache.v1.multiprocess.token_hasher import TokenHasher
hasher = TokenHasher(chunk_size=int(sys.argv[1]))
prompts = json.load(sys.stdin)
json.dump([[h.hex() for h in hasher.compute_chunk_hashes(p)] for p in prompts], sys.stdout)
"""


@dataclass(frozen=True)
class Answer:
    """One reply. `ttft` and `total` in seconds, `top` the two best log-probabilities a token."""

    text: str
    cached: int
    ttft: float
    total: float
    top: list[list[float]] = field(repr=False)


class Pair:
    """`lmcache server` and `vllm serve` on loopback, started and stopped together."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.bin: Path = options.env_bin
        self.scratch: Path = options.scratch
        self.model: Path = options.model
        self.adapter: str = options.adapter
        self.dtype: str = options.dtype
        self.port: int = options.port
        self.cache_port: int = options.cache_port
        self.cache_http: int = options.cache_http_port
        self.max_model_len: int = options.max_model_len
        self.tier: Path = self.scratch / "tier"
        self.tier.mkdir(parents=True, exist_ok=True)
        self.running: list[tuple[str, subprocess.Popen[bytes]]] = []

    def environment(self) -> dict[str, str]:
        home = self.scratch / "home"
        home.mkdir(exist_ok=True)
        return {
            "PATH": f"{self.bin}:{os.environ.get('PATH', '')}",
            "HOME": str(home),
            "NUMBA_CACHE_DIR": str(home / "numba"),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_HOST_IP": "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "lo",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "LMCACHE_TRACK_USAGE": "false",
        }

    def start(self) -> None:
        adapter: dict[str, Any] = {"type": self.adapter, "base_path": str(self.tier)}
        cache = [
            "lmcache", "server", "--host", "127.0.0.1", "--port", str(self.cache_port),
            "--http-host", "127.0.0.1", "--http-port", str(self.cache_http),
            "--l1-size-gb", "1", "--l1-init-size-gb", "1", "--eviction-policy", "LRU",
            "--chunk-size", str(CHUNK), "--supported-transfer-mode", "auto",
            "--shm-name", f"kvhost-bench-{os.getpid()}", "--l2-adapter", json.dumps(adapter),
        ]  # fmt: skip
        connector = {
            "kv_connector": "LMCacheMPConnector",
            "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "lmcache.mp.host": "tcp://127.0.0.1",
                "lmcache.mp.port": self.cache_port,
            },
        }
        runner = [
            "vllm", "serve", str(self.model), "--host", "127.0.0.1", "--port", str(self.port),
            "--served-model-name", "m", "--dtype", self.dtype, "--enforce-eager",
            "--max-model-len", str(self.max_model_len), "--enable-prompt-tokens-details",
            "--kv-transfer-config", json.dumps(connector),
        ]  # fmt: skip
        self._spawn("cache", cache, f"http://127.0.0.1:{self.cache_http}/healthcheck")
        self._spawn("runner", runner, f"http://127.0.0.1:{self.port}/health")

    def _spawn(self, name: str, command: list[str], health: str) -> None:
        log = self.scratch / f"{name}.log"
        with log.open("ab") as out:
            process = subprocess.Popen(
                [str(self.bin / command[0]), *command[1:]],
                env=self.environment(), cwd=self.scratch, stdin=subprocess.DEVNULL,
                stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        self.running.append((name, process))
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline:
            if process.poll() is not None:
                break
            try:
                with urllib.request.urlopen(health, timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        tail = log.read_text(errors="replace").splitlines()[-15:]
        raise RuntimeError(f"{name} did not come up ({health}); end of {log}:\n" + "\n".join(tail))

    def stop(self) -> None:
        """Stop both by their process groups, the runner first."""
        for _, process in reversed(self.running):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):  # the group is killed next
                process.wait(60)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        self.running = []
        for left in Path("/dev/shm").glob(f"*kvhost-bench-{os.getpid()}*"):
            left.unlink()

    def ask(self, prompt: str) -> Answer:
        """One greedy request, streamed. Raises RuntimeError on any status but 200."""
        body = {
            "model": "m", "prompt": prompt, "max_tokens": ANSWER, "temperature": 0,
            "ignore_eos": True, "logprobs": 2, "stream": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        begin = time.monotonic()
        first = 0.0
        text, top = "", []
        usage: dict[str, Any] = {}
        link.request(
            "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        reply = link.getresponse()
        if reply.status != 200:
            raise RuntimeError(f"the runner answered {reply.status}: {reply.read(2000)!r}")
        for line in reply:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            event = json.loads(line[6:])
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                first = first or time.monotonic() - begin
                text += choice["text"]
                best = (choice.get("logprobs") or {}).get("top_logprobs") or []
                top += [sorted(t.values(), reverse=True)[:2] for t in best]
        link.close()
        details = usage.get("prompt_tokens_details") or {}
        cached = details.get("cached_tokens") or 0
        return Answer(text, cached, first, time.monotonic() - begin, top)

    def l2_tokens(self) -> float:
        """Tokens that the server found in L2 since its start."""
        url = f"http://127.0.0.1:{self.cache_http}/metrics"
        with urllib.request.urlopen(url, timeout=10) as reply:
            lines = reply.read().decode().splitlines()
        name = "lmcache_mp_lookup_hit_l2_tokens_total"
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    def chunk_files(self, prompts: list[str]) -> list[list[Path]]:
        """The L2 file of every whole chunk of every prompt, once all of them are written.

        Raises RuntimeError where one is still missing after 60 s.
        """
        asked = json.dumps([list(prompt.encode()) for prompt in prompts])
        done = subprocess.run(
            [str(self.bin / "python"), "-c", HASHES, str(CHUNK)], input=asked, text=True,
            env=self.environment(), stdout=subprocess.PIPE, check=True,
        )  # fmt: skip
        hashes: list[list[str]] = json.loads(done.stdout.splitlines()[-1])
        wanted = {h for chain in hashes for h in chain}
        deadline = time.monotonic() + 60
        while True:
            found = {
                part: path
                for path in self.tier.rglob("*")
                if path.is_file()
                for part in path.name.removesuffix(".data").split("@")
                if part in wanted
            }
            if len(found) == len(wanted):
                return [[found[h] for h in chain] for chain in hashes]
            if time.monotonic() > deadline:
                raise RuntimeError(f"{len(wanted) - len(found)} chunks never came to {self.tier}")
            time.sleep(1)


def make_prompts(count: int, tokens: int, seed: int) -> list[str]:
    """`count` texts of `tokens` printable ASCII characters: one token each."""
    source = random.Random(seed)
    letters = [chr(c) for c in range(0x20, 0x7F)]
    return ["".join(source.choices(letters, k=tokens)) for _ in range(count)]


def ask_all(pair: Pair, prompts: list[str], label: str) -> list[Answer]:
    answers = []
    for i, prompt in enumerate(prompts):
        answers.append(pair.ask(prompt))
        if i % 10 == 9:
            print(f"{label}: {i + 1} of {len(prompts)}", file=sys.stderr, flush=True)
    return answers


def plant(chunks: list[list[Path]], index: list[int]) -> dict[Path, bytes]:
    """Over each prompt's chunk `index[i]` write the next prompt's; returns the bytes of before."""
    before = {chunks[i][c]: chunks[i][c].read_bytes() for i, c in enumerate(index)}
    donors = [chunks[(i + 1) % len(chunks)][c].read_bytes() for i, c in enumerate(index)]
    for (path, own), other in zip(before.items(), donors, strict=True):
        if len(own) != len(other) or own == other:
            raise RuntimeError(f"{path} and its donor do not differ as two chunks should")
        path.write_bytes(other)
    return before


def seconds(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {"median": round(statistics.median(ordered), 3), "max": round(ordered[-1], 3)}


def measure(pair: Pair, options: argparse.Namespace) -> dict[str, Any]:
    """All rounds, as a dictionary: times in seconds, margins in nats, counts."""
    prompts = make_prompts(options.prompts, options.tokens, options.seed)
    per_prompt = (options.tokens - 1) // CHUNK
    pair.start()
    cold = ask_all(pair, prompts, "cold")
    chunks = pair.chunk_files(prompts)
    pair.stop()

    pair.start()
    restored = ask_all(pair, prompts, "restored")
    l2 = pair.l2_tokens()
    pair.stop()

    changed, first_changed, tries, same = 0, 0, 0, []
    for turn in range(options.rounds):
        # Stride the chunk index, so that the tries spread evenly over the prompt.
        index = [(i + turn * len(prompts)) * 7 % per_prompt for i in range(len(prompts))]
        before = plant(chunks, index)
        pair.start()
        planted = ask_all(pair, prompts, f"planted {turn + 1}/{options.rounds}")
        pair.stop()
        for path, data in before.items():
            path.write_bytes(data)
        for i, (a, b) in enumerate(zip(restored, planted, strict=True)):
            if b.cached < per_prompt * CHUNK:
                raise RuntimeError(f"prompt {i}: only {b.cached} tokens came from the cache")
            tries += 1
            changed += a.text != b.text
            first_changed += a.text[:1] != b.text[:1]
            if a.text == b.text:
                same.append({"prompt": i, "chunk": index[i]})

    agree = [a.text == b.text for a, b in zip(cold, restored, strict=True)]
    margins = sorted(t[0] - t[1] for a in cold for t in a.top)
    noise = [
        abs(x[0] - y[0])
        for a, b, ok in zip(cold, restored, agree, strict=True)
        if ok
        for x, y in zip(a.top, b.top, strict=True)
    ]
    return {
        "prompts": len(prompts),
        "prompt_tokens": options.tokens,
        "chunks_per_prompt": per_prompt,
        "chunk_bytes": chunks[0][0].stat().st_size,
        "dtype": options.dtype,
        "l2_adapter": options.adapter,
        "restored_agree": sum(agree),
        "restored_cached_tokens_min": min(a.cached for a in restored),
        "restored_l2_tokens": l2,
        "restored_l2_tokens_expected": per_prompt * CHUNK * len(prompts),
        "planted_tries": tries,
        "planted_changed": changed,
        "planted_first_token_changed": first_changed,
        "planted_unchanged": same,
        "ttft_cold_s": seconds([a.ttft for a in cold]),
        "ttft_restored_s": seconds([a.ttft for a in restored]),
        "margin_nats": {
            "min": margins[0],
            "p1": margins[len(margins) // 100],
            "median": statistics.median(margins),
        },
        "logprob_difference_nats": {
            "max": max(noise, default=None),  # of the answers that agree
            "median": statistics.median(noise) if noise else None,
        },
        "answers_distinct": len({a.text for a in cold}),
        "distinct_tokens_per_answer": statistics.mean(len(set(a.text)) for a in cold),
        "examples": [a.text for a in cold[:3]],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--env-bin", type=Path, required=True, help="bin of the engine's venv")
    parser.add_argument("--scratch", type=Path, required=True, help="empty directory for all files")
    parser.add_argument("--model", type=Path, help="model directory (default: built in scratch)")
    parser.add_argument("--adapter", choices=["fs", "fs_native"], default="fs_native")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=2100, help="tokens a prompt")
    parser.add_argument("--rounds", type=int, default=1, help="planted tries a prompt")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--max-model-len", type=int, default=32768, help="tokens")
    parser.add_argument("--port", type=int, default=21800)
    parser.add_argument("--cache-port", type=int, default=21855)
    parser.add_argument("--cache-http-port", type=int, default=21885)
    parser.add_argument("--out", type=Path, help="write the JSON here too")
    options = parser.parse_args()
    if options.tokens <= CHUNK or options.prompts < 2:
        parser.error(f"needs --tokens above {CHUNK} and at least 2 --prompts")
    options.scratch = options.scratch.absolute()
    options.scratch.mkdir(parents=True, exist_ok=True)
    if any(options.scratch.iterdir()):
        parser.error(f"--scratch {options.scratch} is not empty")
    options.env_bin = options.env_bin.absolute()
    if options.model is None:
        options.model = options.scratch / "model"
        subprocess.run(
            [sys.executable, str(MODEL_SCRIPT), "--out", str(options.model)],
            check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
    pair = Pair(options)
    try:
        result = measure(pair, options)
    finally:
        pair.stop()
    for key, value in result.items():
        print(f"{key:32} {value}")
    text = json.dumps(result)
    if options.out:
        options.out.write_text(text + "\n")
    print(text)
    good = (
        result["restored_agree"] == result["prompts"]
        and result["restored_l2_tokens"] >= result["restored_l2_tokens_expected"]
        and result["planted_changed"] >= 0.99 * result["planted_tries"]
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
