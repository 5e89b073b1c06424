#!/usr/bin/env python3
"""Collects the evidence whether a KV cache survived a restart. It gives no verdict.

    evidence.py --config FILE --out FILE        (as root, on the host)

Steps: identity of the services; is the server in use?; a cold request with a fresh random prompt;
wait until its KV is in L2; the same request warm; restart the cache server, then the runner; flush
this test's files and drop them from the page cache; the same request again; an unseen prompt as
control; remove this test's own files. Around each request: counters of both servers, reads of the
cache process and of the drive, files of the namespace, identity of both processes.
evidence_probe.py and evidence_config.py must lie beside this file.

The config is one JSON object. All URLs are plain HTTP on this host; paths are absolute.
  api_base       str    URL of the runner; /health and /v1/completions are below it
  metrics_url    str    Prometheus page of the runner (vLLM)
  cache_http     str    URL of the cache server; /healthcheck, /metrics, /version are below it
  model          str    served model name
  api_key_file   str|null   file that holds the API key
  namespace_dir  str    directory that L2 writes to
  own_requests   str    file {"pid", "start_ticks", "count"}: kvhost's own requests to this runner
  services       {"cache": S, "runner": S}, S = {"record": str, "restart": [str, ...],
                 "log": str|null}; record is the file {"pid", "start_ticks", "boot_id", ...} that
                 the launcher writes
  prompt_tokens  int    tokens of a prompt
  chunk_size     int    tokens of a chunk of the cache
  vocab          [int, int]   prompts are drawn from these token ids, the second one excluded
  Optional, with defaults: max_tokens 16; files_per_chunk 1 (tensor parallel ranks times object
  groups); warm true; disrupt false (true: run although the server is in use);
  timeouts {"request_s": 600, "ready_s": 600, "restart_s": 180, "write_s": 120, "stable_s": 2,
  "settle_s": 10}, seconds.

--out is written 0600. It holds no prompt, no key, no name of a KV file: a prompt appears as its
digest. Exit: 0 evidence is written (also of a failure), 3 refused because in use (evidence says
so), 1 bad config, or the evidence could not be written.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvhost.onhost import evidence_probe as probe
    from kvhost.onhost.evidence_config import load_config
else:  # on the host the files lie beside each other, in no package
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import evidence_probe as probe
    from evidence_config import load_config

SCHEMA = "kvhost/evidence/1"
Json = dict[str, Any]
Files = dict[str, tuple[int, int, int]]  # relative name -> (inode, bytes, mtime_ns)
Counters = tuple[Any, Any]  # of vLLM and of the cache server; None: the page could not be had

LOG_LINES = {
    "cache": ("Prefetch request completed", "Registered", " ERROR"),
    "runner": ("Using external LMCacheMPConnector", "Registering kv caches", " ERROR"),
}


class Interrupted(BaseException):
    """SIGTERM or SIGINT arrived; not an Exception, so that no step takes it for its own failure."""


SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # the last one: the connection is gone


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


class InUse(Exception):
    """Somebody else uses the server, and the config does not say to disrupt it."""


class Collector:
    """Runs the steps and fills ``evidence``, whatever happens."""

    def __init__(self, config: Json) -> None:
        self.config, self.limits = config, config["timeouts"]
        self.key: str | None = None
        self.opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self.mount = probe.mount_of(config["namespace_dir"])
        self.chunks = config["prompt_tokens"] // config["chunk_size"]
        self.expected = self.chunks * config["files_per_chunk"]
        self.cold_files: Files = {}
        self.windows: list[tuple[str, Files]] = []  # files that appeared in a request's window
        self.window_open: tuple[str, Files] | None = None
        self.number = 0
        self.total = 10 + bool(config["warm"])
        self.logs: Json = {}
        shown = ("model", "prompt_tokens", "chunk_size", "max_tokens", "files_per_chunk", "warm")
        self.evidence: Json = {
            "schema": SCHEMA,
            "started_unix": time.time(),
            "event": "both",
            "config": {key: config[key] for key in (*shown, "disrupt", "namespace_dir")},
            "boot_id": probe.boot_id(),
            "filesystem": self.mount,
            "versions": {},
            "refused": None,
            "interrupted": None,
            "services": {},
            "requests": {},
            "written": None,
            "page_cache": None,
            "logs": self.logs,
            "cleanup": None,
            "steps": [],
        }

    # -- asking ---------------------------------------------------------------------------------
    def get(self, url: str, timeout: float = 10) -> str:
        with self.opener.open(url, timeout=timeout) as reply:
            return str(reply.read().decode(errors="replace"))

    def identity(self, name: str) -> Json:
        """{"record", "proc", "listens"} of a service; parts that cannot be had are None."""
        record, proc, holds = None, None, None
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            with open(self.config["services"][name]["record"], encoding="utf-8") as handle:
                found = json.load(handle)
            record = {key: found[key] for key in ("pid", "start_ticks", "boot_id")}
            proc = probe.process(record["pid"])
        if record and proc:
            url = self.config["api_base" if name == "runner" else "cache_http"]
            holds = probe.listens(record["pid"], urllib.parse.urlsplit(url).port or 80)
        return {"record": record, "proc": proc, "listens": holds}

    def scrape(self) -> Counters:
        pages: list[Json | None] = []
        for url, wanted in (
            (self.config["metrics_url"], probe.VLLM),
            (self.config["cache_http"] + "/metrics", probe.CACHE),
        ):
            try:
                pages.append(probe.parse_metrics(self.get(url), wanted))
            except (OSError, ValueError):
                pages.append(None)
        return pages[0], pages[1]

    def own_requests(self, add: int = 0) -> int | None:
        """Requests of kvhost's own that this runner has had, ``add`` of them counted now."""
        proc = self.identity("runner")["proc"]
        if not proc:
            return None
        count = probe.own_requests(self.config["own_requests"], proc) + add
        if add:
            now = {"pid": proc["pid"], "start_ticks": proc["start_ticks"], "count": count}
            probe.write_json(self.config["own_requests"], now, 0o644)
        return count

    def snapshot(self, counters: Counters | None = None) -> Json:
        vllm, cache = counters or self.scrape()
        who = {name: self.identity(name)["proc"] for name in ("cache", "runner")}
        files, _ = probe.scan(self.config["namespace_dir"])
        return {
            "unix": time.time(),
            "vllm": vllm,
            "cache": cache,
            "own_requests": self.own_requests(),
            "processes": who,
            "cache_reads": probe.process_reads(who["cache"]["pid"]) if who["cache"] else None,
            "device_read_bytes": probe.device_reads(self.mount["device"]),
            "files": len(files),
            "bytes": sum(size for _, size, _ in files.values()),
            "own_files": sum(files.get(name) == info for name, info in self.cold_files.items()),
        }

    # -- one request ----------------------------------------------------------------------------
    def new_prompt(self) -> list[int]:
        draw = random.SystemRandom().randrange
        return [draw(*self.config["vocab"]) for _ in range(self.config["prompt_tokens"])]

    def complete(self, prompt: list[int], result: Json) -> None:
        """One streamed greedy completion; fills ``result``; raises OSError, ValueError."""
        body = {
            "model": self.config["model"],
            "prompt": prompt,
            "max_tokens": self.config["max_tokens"],
            "temperature": 0,
            "ignore_eos": True,  # always the same number of tokens to compare
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,  # vLLM's own; the first event also repeats the prompt
        }
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = "Bearer " + self.key
        url = self.config["api_base"] + "/v1/completions"
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        started = time.monotonic()
        with self.opener.open(request, timeout=self.limits["request_s"]) as reply:
            result["http_status"] = reply.status
            self.own_requests(add=1)
            result.update(probe.read_stream(reply, started, self.limits["request_s"]))

    def request(self, role: str, prompt: list[int], expect_files: int) -> Json:
        """A request with the evidence around it; what appeared in the namespace meanwhile too."""
        digest = hashlib.sha256(",".join(map(str, prompt)).encode()).hexdigest()
        fields = "http_status ttft_s total_s output_tokens usage_prompt_tokens usage_cached_tokens"
        result: Json = {"role": role, "prompt_digest": digest, "error": None}
        result.update(dict.fromkeys([*fields.split(), "before", "after", "files"]))
        self.evidence["requests"][role] = result
        before, _ = probe.scan(self.config["namespace_dir"])
        self.window_open = (role, before)
        result["before"] = self.snapshot()
        try:
            self.complete(prompt, result)
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
        if role == "cold":
            self.cold_files, self.evidence["written"] = new, written
        if result["error"]:
            raise ValueError(result["error"])
        return {key: result[key] for key in ("ttft_s", "usage_cached_tokens")}

    def settled(self, before: Json) -> Counters:
        """Counters once they stand still and count the request; the cache server's come late."""
        deadline = time.monotonic() + self.limits["settle_s"]
        last = self.scrape()
        while time.monotonic() < deadline:
            time.sleep(0.5)
            now = self.scrape()
            grew = all(
                page and (page[key] or 0) > ((old or {}).get(key) or 0)
                for page, old, key in (
                    (now[0], before["vllm"], "requests_finished"),
                    (now[1], before["cache"], "lookups"),
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
            time.sleep(0.2)

    def close_window(self) -> Files:
        """Files that appeared since the window was opened: they are this request's, if alone."""
        if self.window_open is None:
            return {}
        (role, before), self.window_open = self.window_open, None
        files, _ = probe.scan(self.config["namespace_dir"])
        new = {name: info for name, info in files.items() if name not in before}
        self.windows.append((role, new))
        return new

    # -- steps ----------------------------------------------------------------------------------
    def identify(self) -> None:
        if self.config["api_key_file"]:
            with open(self.config["api_key_file"], encoding="utf-8") as handle:
                self.key = handle.read().strip()
        for name, service in self.config["services"].items():
            who = self.identity(name)
            self.evidence["services"][name] = {"before": who, "after": None, "restart": None}
            path = service.get("log")
            found = probe.read_log(path) if path else None
            self.logs[name] = {"from": found[0] if found else 0, "to": None, "lines": []}
        for name, url in (
            ("vllm", self.config["api_base"] + "/version"),
            ("lmcache", self.config["cache_http"] + "/version"),
        ):
            with contextlib.suppress(OSError, ValueError):
                found = json.loads(self.get(url))
                version = found.get("version") if isinstance(found, dict) else found
                self.evidence["versions"][name] = str(version)

    def check_use(self) -> Json:
        vllm, _ = self.scrape()
        own = self.own_requests()
        if not vllm or vllm["requests_finished"] is None or own is None:
            found: Json = {"busy": None, "foreign": None, "own": own}  # cannot know: refuse too
        else:
            busy = int((vllm["running"] or 0) + (vllm["waiting"] or 0))
            found = {"busy": busy, "foreign": int(vllm["requests_finished"]) - own, "own": own}
        free = found["busy"] == 0 and found["foreign"] == 0
        if not free and not self.config["disrupt"]:
            self.evidence["refused"] = found
            raise InUse(
                "the runner's metrics or record cannot be read"
                if found["busy"] is None
                else f"{found['busy']} requests now, {found['foreign']} finished are not kvhost's"
            )
        return found

    def restart(self, name: str) -> Json:
        service = self.config["services"][name]
        entry = self.evidence["services"][name]
        outcome: Json = {"exit_code": None, "ready_s": None}
        entry["restart"] = outcome
        with tempfile.TemporaryFile() as output:  # a pipe would wait for what the service inherits
            with finishing_first():
                done = subprocess.run(
                    service["restart"],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    timeout=self.limits["restart_s"],
                    check=False,
                    start_new_session=True,  # Ctrl-C reaches the whole group
                )
            outcome["exit_code"] = done.returncode
            if done.returncode:
                output.seek(0)
                text = output.read().decode(errors="replace")[-300:]
                raise ValueError(f"exit {done.returncode}: " + probe.scrub(text, self.key))
        base, path = ("api_base", "/health") if name == "runner" else ("cache_http", "/healthcheck")
        started = alive = time.monotonic()
        while True:
            entry["after"] = self.identity(name)
            with contextlib.suppress(OSError):
                self.get(self.config[base] + path, timeout=5)
                break
            now = time.monotonic()
            alive = now if entry["after"]["proc"] else alive
            if now - started > self.limits["ready_s"] or now - alive > 30:
                raise ValueError(
                    f"{name} is not ready after {now - started:.0f} s; {self.tail(name)}"
                )
            time.sleep(0.5)
        entry["after"] = self.identity(name)
        outcome["ready_s"] = round(time.monotonic() - started, 2)
        return outcome

    def tail(self, name: str) -> str:
        path = self.config["services"][name].get("log")
        found = probe.read_log(path, -2000) if path else None
        if found is None:
            return "no log"
        lines = found[1].splitlines()[-3:]
        return "last lines: " + " / ".join(probe.scrub(line, self.key, 200) for line in lines)

    def drop_pages(self) -> Json:
        found = probe.drop_pages(self.config["namespace_dir"], self.cold_files)
        self.evidence["page_cache"] = found
        return found

    def clean_up(self) -> Json:
        """Removes files that can only be this test's own: as many as its chunks, same inode."""
        if self.window_open:  # interrupted in a request: what is written yet may still come
            self.wait_files(self.window_open[1], self.expected)
            self.close_window()
        result: Json = {"removed": 0, "bytes": 0, "left": 0, "why": None}
        self.evidence["cleanup"] = result
        for role, new in self.windows:
            if len(new) not in (0, self.expected):
                result["left"] += len(new)
                why = f"{role}: {len(new)} new files, {self.expected} expected; not told apart"
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

    def read_logs(self) -> None:
        for name, entry in self.logs.items():
            path = self.config["services"][name].get("log")
            found = probe.read_log(path, entry["from"]) if path else None
            if found is None:
                continue
            entry["to"], text = found
            hits = [line for line in text.splitlines() if any(w in line for w in LOG_LINES[name])]
            entry["lines"] = [probe.scrub(line, self.key) for line in hits[-20:]]

    def step(self, title: str, action: Callable[[], Any]) -> bool:
        """Runs one step, records its outcome; False when it failed."""
        self.number += 1
        started = time.monotonic()
        row: Json = {"name": title, "ok": False, "seconds": 0.0, "error": None}
        self.evidence["steps"].append(row)
        shown: Any = None
        try:
            shown = action()
            row["ok"] = True
        except Interrupted as error:
            row["error"] = f"interrupted by {error}"
            raise
        except Exception as error:  # recorded for the judge, not swallowed
            row["error"] = probe.scrub(f"{type(error).__name__}: {error}", self.key, 1000)
            if isinstance(error, InUse):
                raise
        finally:
            row["seconds"] = round(time.monotonic() - started, 2)
            text = row["error"] or ("" if shown is None else json.dumps(shown))
            head = f"[{self.number}/{self.total}] {title} ... {row['seconds']:.1f} s"
            with contextlib.suppress(OSError):  # nobody listens any more; the test goes on
                print(f"{head}  {text}".rstrip(), file=sys.stderr, flush=True)
        return bool(row["ok"])

    def steps(self) -> Iterator[bool]:
        """The steps in order; a False one ends the test, the clean-up still follows."""
        prompt, other = self.new_prompt(), self.new_prompt()
        yield self.step("identify the services", self.identify)
        yield self.step("is the server in use", self.check_use)
        yield self.step(
            "cold request, until it is written", lambda: self.request("cold", prompt, self.expected)
        )
        if self.config["warm"]:
            self.step("warm request", lambda: self.request("warm", prompt, 0))
        yield self.step("restart the cache server", lambda: self.restart("cache"))
        yield self.step("restart the runner", lambda: self.restart("runner"))
        self.step("drop the test's files from the page cache", self.drop_pages)
        self.step("the same request again", lambda: self.request("restored", prompt, 0))
        wait = self.expected if self.cold_files else 0  # without an L2 there is nothing to wait for
        self.step("control: an unseen prompt", lambda: self.request("control", other, wait))

    def run(self) -> None:
        try:
            for going_on in self.steps():
                if not going_on:
                    break
        except InUse:
            return
        except Interrupted as error:
            self.evidence["interrupted"] = str(error)
        for number in SIGNALS:  # the rest is short and must happen
            signal.signal(number, signal.SIG_IGN)
        self.step("remove the test's files", self.clean_up)
        self.step("read the logs", self.read_logs)


def main() -> int:
    lines = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(
        description="\n".join(lines), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", required=True, help="JSON, see above")
    parser.add_argument("--out", required=True, help="where the evidence is written")
    args = parser.parse_args()
    try:
        config = load_config(args.config)
    except (OSError, ValueError) as error:
        print(f"{args.config}: {error}", file=sys.stderr)
        return 1

    for number in SIGNALS:
        signal.signal(number, stop)
    collector = Collector(config)
    collector.run()
    collector.evidence["finished_unix"] = time.time()
    try:
        probe.write_json(args.out, collector.evidence, 0o600)
    except OSError as error:
        print(f"the evidence cannot be written: {error}", file=sys.stderr)
        return 1
    if collector.evidence["refused"]:
        with contextlib.suppress(OSError):
            print("refused: in use; set disrupt to run the test anyway", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
