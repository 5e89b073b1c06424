"""Asks the services and gathers what they say, for one event of evidence.py; lies beside it.

A Collector knows how to send a request with the evidence around it, to wait until its KV is in L2,
to restart a service, and to clean up. Which of that is done when is in evidence_events.py.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import secrets
import signal
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvhost.onhost import evidence_probe as probe
    from kvhost.onhost.evidence_steps import SIGNALS, Interrupted, run_step
else:  # on the host the files lie beside each other, in no package
    import evidence_probe as probe
    from evidence_steps import SIGNALS, Interrupted, run_step

SCHEMA = "kvhost/evidence/2"
Json = dict[str, Any]
Files = dict[str, tuple[int, int, int]]  # relative name -> (inode, bytes, mtime_ns)
Counters = tuple[Any, Any]  # of vLLM and of the cache server; None: the page could not be had

LOG_LINES = {
    "cache": (
        "Prefetch request completed",
        "Registered",
        "No compute backend loaded",
        " ERROR",
    ),
    "runner": (
        "Using external LMCacheMPConnector",
        "Created TieringOffloadingManager",
        "Registering kv caches",
        "Failed to import from vllm._C",
        "No compute backend loaded",
        " ERROR",
    ),
}
SMALL_CHUNKS = 4  # of the prompts of the controls
TAIL = 8  # tokens behind the last whole chunk: vLLM computes at least one itself


def stop(number: int, _frame: Any) -> None:
    raise Interrupted(signal.Signals(number).name)


@contextlib.contextmanager
def finishing_first() -> Iterator[None]:
    """A signal counts only afterwards: a restart that has begun must not leave a service down."""
    arrived: list[int] = []
    old = {n: signal.signal(n, lambda number, _: arrived.append(number)) for n in SIGNALS}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
    if arrived:
        stop(arrived[0], None)


class Collector:
    """What one event's evidence is gathered with; fills ``evidence``, whatever happens."""

    def __init__(self, config: Json, event: str, seed: str | None = None) -> None:
        self.config, self.limits, self.event = config, config["timeouts"], event
        self.seed = seed or secrets.token_hex(32)  # of the prompts, which are kept nowhere
        self.key: str | None = None
        self.opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        #: whether vLLM keeps its cache itself, without a cache server
        self.native = config["cache_http"] is None
        self.mount = probe.mount_of(config["namespace_dir"])
        self.chunks = config["prompt_tokens"] // config["chunk_size"]
        self.small = min(SMALL_CHUNKS, self.chunks) if self.chunks >= 2 else 0
        # who is asked: the event "other" puts a second pair of services here
        self.asked: Json = {k: config[k] for k in ("api_base", "metrics_url", "cache_http")}
        self.asked["own_requests"] = config["own_requests"]
        self.asked["records"] = {n: s["record"] for n, s in config["services"].items()}
        self.cold_files: Files = {}
        self.small_files: dict[str, Files] = {}
        self.windows: list[tuple[str, Files]] = []  # files that appeared in a request's window
        self.window_open: tuple[str, Files] | None = None
        self.number, self.total = 0, 0
        self.logs: Json = {}
        shown = ("model", "prompt_tokens", "chunk_size", "max_tokens", "files_per_chunk", "warm")
        names = ("disrupt", "namespace_dir", "exact_numerics")
        kind = {"native": self.native}
        empty = "refused interrupted written page_cache cleanup moved flushed killed resumed"
        self.evidence: Json = {
            "schema": SCHEMA,
            "started_unix": time.time(),
            "event": event,
            "config": {**{key: config[key] for key in (*shown, *names)}, **kind},
            "boot_id": probe.boot_id(),
            "filesystem": self.mount,
            "versions": {},
            "services": {},
            "requests": {},
            "logs": self.logs,
            "steps": [],
            "registered": None,
            **dict.fromkeys(empty.split()),
        }

    # -- asking ---------------------------------------------------------------------------------
    def get(self, url: str, timeout: float = 10) -> str:
        with self.opener.open(url, timeout=timeout) as reply:
            return str(reply.read().decode(errors="replace"))

    def identity(self, name: str) -> Json:
        """{"record", "proc", "listens"} of a service; parts that cannot be had are None."""
        record, proc, holds = None, None, None
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            with open(self.asked["records"][name], encoding="utf-8") as handle:
                found = json.load(handle)
            record = {key: found[key] for key in ("pid", "start_ticks", "boot_id")}
            proc = probe.process(record["pid"])
        if record and proc:
            url = self.asked["api_base" if name == "runner" else "cache_http"]
            holds = probe.listens(record["pid"], urllib.parse.urlsplit(url).port or 80)
        return {"record": record, "proc": proc, "listens": holds}

    def scrape(self) -> Counters:
        if self.native:
            return self.scrape_tiers()
        pages: list[Json | None] = []
        for url, wanted in (
            (self.asked["metrics_url"], probe.VLLM),
            (self.asked["cache_http"] + "/metrics", probe.CACHE),
        ):
            try:
                pages.append(probe.parse_metrics(self.get(url), wanted))
            except (OSError, ValueError):
                pages.append(None)
        return pages[0], pages[1]

    def scrape_tiers(self) -> Counters:
        """Both from the one page that there is."""
        try:
            text = self.get(self.asked["metrics_url"])
            page = probe.parse_metrics(text, probe.VLLM)
            return page, probe.tier_counters(text, self.config["chunk_size"])
        except (OSError, ValueError):
            return None, None

    def reads(self, who: Json) -> Json | None:
        """What was read by the process that reads the files."""
        if self.native:
            return probe.tree_reads(who["runner"]["pid"]) if who["runner"] else None
        return probe.process_reads(who["cache"]["pid"]) if who["cache"] else None

    def own_requests(self, add: int = 0) -> int | None:
        """Requests of kvhost's own that this runner has had, ``add`` of them counted now."""
        proc = self.identity("runner")["proc"]
        if not proc:
            return None
        count = probe.own_requests(self.asked["own_requests"], proc) + add
        if add:
            now = {"pid": proc["pid"], "start_ticks": proc["start_ticks"], "count": count}
            probe.write_json(self.asked["own_requests"], now, 0o644)
        return count

    def snapshot(self, counters: Counters | None = None) -> Json:
        vllm, cache = counters or self.scrape()
        names = self.config["services"]
        who: Json = {"cache": None, **{name: self.identity(name)["proc"] for name in names}}
        files, _ = probe.scan(self.config["namespace_dir"])
        return {
            "unix": time.time(),
            "vllm": vllm,
            "cache": cache,
            "own_requests": self.own_requests(),
            "processes": who,
            "cache_reads": self.reads(who),
            "device_read_bytes": probe.device_reads(self.mount["device"]),
            "files": len(files),
            "bytes": sum(size for _, size, _ in files.values()),
            "own_files": sum(files.get(name) == info for name, info in self.cold_files.items()),
        }

    # -- prompts --------------------------------------------------------------------------------
    def prompt(self, name: str) -> list[int]:
        """The prompt of this name: random, the same whenever it is asked for with this seed."""
        draw = random.Random(f"{self.seed}:{name}").randrange
        if name in ("half_cold", "half", "moved_cold"):
            length = self.small * self.config["chunk_size"] + TAIL
        else:
            length = self.config["prompt_tokens"]
        tokens = [draw(*self.config["vocab"]) for _ in range(length)]
        if name == "half":  # its first half is that of another
            shared = self.small // 2 * self.config["chunk_size"]
            tokens[:shared] = self.prompt("half_cold")[:shared]
        return tokens

    def files_of(self, chunks: int) -> int:
        return int(chunks * self.config["files_per_chunk"])

    def complete(self, prompt: list[int], result: Json, salt: str | None = None) -> None:
        """One streamed greedy completion; fills ``result``; raises OSError, ValueError."""
        body: Json = {
            "model": self.config["model"],
            "prompt": prompt,
            "max_tokens": self.config["max_tokens"],
            "temperature": 0,
            "ignore_eos": True,  # always the same number of tokens to compare
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,  # vLLM's own; the first event also repeats the prompt
            "logprobs": 5,
            "return_tokens_as_token_ids": True,
        }
        if salt:
            body["cache_salt"] = salt
        with self.send(body) as reply:
            result["http_status"] = reply.status
            self.own_requests(add=1)
            result.update(probe.read_stream(reply, self.began, self.limits["request_s"]))

    def send(self, body: Json) -> Any:
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = "Bearer " + self.key
        url = self.asked["api_base"] + "/v1/completions"
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        self.began = time.monotonic()
        return self.opener.open(request, timeout=self.limits["request_s"])

    def blank(self, role: str, prompt: list[int]) -> Json:
        digest = hashlib.sha256(",".join(map(str, prompt)).encode()).hexdigest()
        fields = "http_status ttft_s total_s output_tokens usage_prompt_tokens usage_cached_tokens"
        result: Json = {"role": role, "prompt_digest": digest, "error": None}
        result.update(dict.fromkeys([*fields.split(), "before", "after", "files"]))
        result |= {"prompt_tokens": len(prompt), "first_logprobs": None, "written": None}
        self.evidence["requests"][role] = result
        return result

    def request(
        self, role: str, prompt: list[int], expect_files: int, salt: str | None = None
    ) -> Json:
        """A request with the evidence around it; what appeared in the namespace meanwhile too."""
        result = self.blank(role, prompt)
        before, _ = probe.scan(self.config["namespace_dir"])
        self.window_open = (role, before)
        result["before"] = self.snapshot()
        try:
            self.complete(prompt, result, salt)
        except urllib.error.HTTPError as error:
            result["http_status"] = error.code
            result["error"] = probe.scrub(error.read().decode(errors="replace"), self.key)
        except (OSError, ValueError) as error:
            result["error"] = probe.scrub(f"{type(error).__name__}: {error}", self.key)
        written = self.wait_files(before, 0 if result["error"] else expect_files)
        result["after"] = self.snapshot(self.settled(result["before"]))
        new = self.close_window()
        now, _ = probe.scan(self.config["namespace_dir"])
        changed = [n for n, info in before.items() if n in now and now[n][:2] != info[:2]]
        gone = [name for name in before if name not in now]
        result["files"] = {"new": len(new), "changed": len(changed), "gone": len(gone)}
        if expect_files:
            result["written"] = written
        if role == "cold":
            self.cold_files, self.evidence["written"] = new, written
        elif role.endswith("_cold"):
            self.small_files[role] = new
        if result["error"]:
            raise ValueError(result["error"])
        return {key: result[key] for key in ("ttft_s", "usage_cached_tokens")}

    def settled(self, before: Json) -> Counters:
        """Counters once they stand still and count the request; the cache server's come late."""
        deadline = time.monotonic() + self.limits["settle_s"]
        last = self.scrape()
        while time.monotonic() < deadline:
            time.sleep(min(0.5, self.limits["stable_s"]))
            now = self.scrape()
            grew = all(
                page and (page[key] or 0) > ((old or {}).get(key) or 0)
                for page, old, key in (
                    (now[0], before["vllm"], "requests_finished"),
                    # vLLM asks its tiers for nothing that its own memory has
                    *(() if self.native else ((now[1], before["cache"], "lookups"),)),
                )
            )
            if grew and now == last:
                break
            last = now
        return last

    def wait_files(self, before: Files, expected: int) -> Json:
        """Waits until new files stand still, none is temporary, and there are enough of them."""
        started = quiet_since = time.monotonic()
        last: Any = None
        while True:
            files, temporary = probe.scan(self.config["namespace_dir"])
            new = {name: info for name, info in files.items() if before.get(name) != info}
            now = time.monotonic()
            if new != last or temporary:
                last, quiet_since = new, now
            quiet = now - quiet_since >= self.limits["stable_s"]
            done = quiet and len(new) >= expected
            if done or now - started > self.limits["write_s"]:
                return {
                    "expected_files": expected,
                    "new_files": len(new),
                    "new_bytes": sum(size for _, size, _ in new.values()),
                    "sizes": sorted({size for _, size, _ in new.values()}),
                    "temporary_files": temporary,
                    "waited_s": round(now - started, 2),
                    "timed_out": not done,
                }
            time.sleep(min(0.2, self.limits["stable_s"] / 3))

    def close_window(self) -> Files:
        """Files that appeared since the window was opened: they are this request's, if alone."""
        if self.window_open is None:
            return {}
        (role, before), self.window_open = self.window_open, None
        files, _ = probe.scan(self.config["namespace_dir"])
        new = {name: info for name, info in files.items() if name not in before}
        self.windows.append((role, new))
        return new

    # -- the end --------------------------------------------------------------------------------
    def expected_of(self, role: str) -> int:
        """Files that a request of this role leaves behind."""
        small = self.files_of(self.small)
        return {
            "half_cold": small,
            "moved_cold": small,
            "moved": small,
            "half": self.files_of(self.small - self.small // 2),
        }.get(role, self.files_of(self.chunks))

    def clean_up(self) -> Json:
        """Removes files that can only be this test's own: as many as its chunks, same inode."""
        if self.window_open:  # interrupted in a request: what is written yet may still come
            self.wait_files(self.window_open[1], self.expected_of(self.window_open[0]))
            self.close_window()
        result: Json = {"removed": 0, "bytes": 0, "left": 0, "why": None}
        self.evidence["cleanup"] = result
        found: dict[str, Files] = {}
        for role, new in self.windows:
            if role == "moved":  # what it wrote was replaced by what was put back
                new = {n: i for n, i in new.items() if n not in self.small_files["moved_cold"]}
            # what was complete before the kill and what was missing are the files of one prompt
            found.setdefault("cut" if role == "killed" else role, {}).update(new)
        for role, new in found.items():
            if len(new) not in (0, self.expected_of(role)):
                result["left"] += len(new)
                needed = self.expected_of(role)
                why = f"{role}: {len(new)} new files, {needed} expected; not told apart"
                result["why"] = "; ".join(filter(None, (result["why"], why)))
                continue
            for name, (inode, size, _) in new.items():
                path = os.path.join(self.config["namespace_dir"], name)
                with contextlib.suppress(FileNotFoundError):  # pruned
                    if os.lstat(path).st_ino == inode:
                        os.unlink(path)
                        result["removed"] += 1
                        result["bytes"] += size
        return result

    def log_of(self, name: str) -> str | None:
        path: str | None = self.config["services"][name].get("log")
        return path

    def read_logs(self) -> None:
        for name, entry in self.logs.items():
            path = self.log_of(name)
            found = probe.read_log(path, entry["from"]) if path else None
            if found is None:
                continue
            entry["to"], text = found
            hits = [line for line in text.splitlines() if any(w in line for w in LOG_LINES[name])]
            entry["lines"] = [probe.scrub(line, self.key) for line in hits[-20:]]

    def step(self, title: str, action: Callable[[], Any]) -> bool:
        """Runs one step, records its outcome; False when it failed."""
        self.number += 1
        head = f"[{self.event} {self.number}/{self.total}] "
        return run_step(self.evidence["steps"], title, action, self.key, head)
