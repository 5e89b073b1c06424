#!/usr/bin/env python3
"""Evidence whether the KV cache of a server that kvhost did not install survives a restart.

    evidence_foreign.py --config FILE --out FILE      (where the restart command runs)

It gives no verdict. Steps: what answers; is the server in use?; a cold request with a fresh random
prompt; the same warm; drop what it wrote from the page cache; the restart command; the same again;
an unseen prompt as control. Around each request: vLLM's counters and start time, those of a cache
server, the process that listens, files of the storage directory and their pages in memory. Nothing
is removed: the files of two prompts stay. evidence_foreign_parts.py and evidence_probe.py must lie
beside it.

The config is one JSON object, all URLs as seen from here:
  api_base          str    URL of the runner; /health, /v1/completions are below it
  metrics_url       str    its Prometheus page (vLLM)
  restart           [str]  the command, run here, by this user, without a shell
  prompt_tokens     int    tokens of a prompt
  chunk_size        int    tokens of the cache's chunk: only whole ones are expected back
  Optional, with defaults: cache_metrics_url null (Prometheus page of an LMCache server);
  storage_dir null (a directory here that the cache writes to); model null (the first one served);
  api_key_file null; vocab null ([first, end) of token ids; else words are tokenized by the server);
  max_tokens 16; disrupt false (true: also when the server is in use); timeouts {"request_s": 600,
  "ready_s": 600, "restart_s": 600, "same_s": 10, "write_s": 30, "stable_s": 2, "settle_s": 10,
  "poll_s": 0.5}, seconds.

--out is written 0600. It holds no prompt, key or file name. Exit: 0 evidence is written (also of a
failure), 3 refused because in use (evidence says so), 1 bad config, or it could not be written.
"""

from __future__ import annotations

import argparse
import contextlib
import getpass
import json
import os
import signal
import socket
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvhost.onhost import bounded
    from kvhost.onhost import evidence_foreign_parts as parts
    from kvhost.onhost import evidence_probe as probe
    from kvhost.onhost.evidence_steps import SIGNALS, Interrupted, InUse, run_step
else:  # on the host the files lie beside each other, in no package
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import bounded
    import evidence_foreign_parts as parts
    import evidence_probe as probe
    from evidence_steps import SIGNALS, Interrupted, InUse, run_step

SCHEMA = "kvhost/evidence-foreign/1"
SHOWN = ("model", "prompt_tokens", "chunk_size", "max_tokens", "disrupt", "storage_dir")
ANSWER = ("ttft_s", "total_s", "output_tokens", "usage_prompt_tokens", "usage_cached_tokens")
Json = dict[str, Any]


class Collector:
    """Runs the steps and fills ``evidence``, whatever happens."""

    def __init__(self, config: Json) -> None:
        self.config, self.limits = config, config["timeouts"]
        self.key: str | None = None
        self.opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self.storage = config["storage_dir"]
        self.mount = probe.mount_of(self.storage) if self.storage else None
        self.cold_files: parts.Files = {}
        self.sent = 0  # requests of the test to the process that runs now
        self.restarting = False
        self.late: list[int] = []
        self.evidence: Json = {
            "schema": SCHEMA,
            "started_unix": time.time(),
            "finished_unix": time.time(),
            "event": "command",
            "config": {key: config[key] for key in SHOWN},
            "where": {"host": socket.gethostname(), "user": getpass.getuser()},
            "cache_metrics": config["cache_metrics_url"] is not None,
            "filesystem": self.mount,
            "versions": {},
            "prompts": None,
            "refused": None,
            "interrupted": None,
            "restart": None,
            "requests": {},
            "written": None,
            "page_cache": None,
            "steps": [],
        }

    # -- asking -------------------------------------------------------------------------------
    def get(self, url: str, timeout: float = 10) -> str:
        request = urllib.request.Request(url, headers=self.headers())
        with self.opener.open(request, timeout=timeout) as reply:
            return str(reply.read().decode(errors="replace"))

    def headers(self) -> Json:
        found = {"Content-Type": "application/json"}
        if self.key:
            found["Authorization"] = "Bearer " + self.key
        return found

    def page(self, url: str | None, wanted: Json) -> Json | None:
        """Counters and start time of a metrics page; None: it could not be had."""
        if url is None:
            return None
        try:
            return probe.parse_metrics(self.get(url), {**wanted, **parts.START})
        except (OSError, ValueError):
            return None

    def snapshot(self, pages: tuple[Any, Any] | None = None) -> Json:
        vllm, cache = pages or self.scrape()
        files, _ = parts.scan(self.storage)
        runner = parts.who(self.config["api_base"])
        cold = self.cold_files
        return {
            "unix": time.time(),
            "vllm": vllm,
            "cache": cache,
            "sent": self.sent,
            "runner": runner,
            "files": len(files) if self.storage else None,
            "own_files": len(parts.same(cold, files)) if self.storage else None,
            "own_pages": parts.residency(self.storage, cold, files) if cold else None,
        }

    def scrape(self) -> tuple[Json | None, Json | None]:
        return (
            self.page(self.config["metrics_url"], probe.VLLM),
            self.page(self.config["cache_metrics_url"], probe.CACHE),
        )

    def tokenize(self, text: str) -> list[int] | None:
        body = json.dumps({"model": self.config["model"], "prompt": text}).encode()
        request = urllib.request.Request(
            self.config["api_base"] + "/tokenize", body, self.headers()
        )
        try:
            with self.opener.open(request, timeout=60) as reply:
                found = json.load(reply).get("tokens")
        except (OSError, ValueError, AttributeError):
            return None
        return found if isinstance(found, list) else None

    def complete(self, prompt: list[int] | str, result: Json) -> None:
        body = {
            "model": self.config["model"],
            "prompt": prompt,
            "max_tokens": self.config["max_tokens"],
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        url = self.config["api_base"] + "/v1/completions"
        request = urllib.request.Request(url, json.dumps(body).encode(), self.headers())
        started = time.monotonic()
        with self.opener.open(request, timeout=self.limits["request_s"]) as reply:
            result["http_status"] = reply.status
            self.sent += 1
            found = probe.read_stream(reply, started, self.limits["request_s"])
            result.update({key: found[key] for key in ANSWER})

    def request(self, role: str, prompt: list[int] | str) -> Json:
        """A request with the evidence around it."""
        result: Json = {"role": role, "prompt_digest": parts.digest(prompt), "error": None}
        result.update(dict.fromkeys(("http_status", *ANSWER, "before", "after", "files")))
        self.evidence["requests"][role] = result
        before, _ = parts.scan(self.storage)
        result["before"] = self.snapshot()
        try:
            self.complete(prompt, result)
        except urllib.error.HTTPError as error:
            result["http_status"] = error.code
            result["error"] = probe.scrub(error.read().decode(errors="replace"), self.key)
        except (OSError, ValueError) as error:
            result["error"] = probe.scrub(f"{type(error).__name__}: {error}", self.key)
        new = self.wait_files(before, role, bool(result["error"]))
        result["after"] = self.snapshot(self.settled(result["before"]))
        now, _ = parts.scan(self.storage)
        changed = [name for name, info in before.items() if name in now and now[name] != info]
        gone = [name for name in before if name not in now]
        if self.storage:
            result["files"] = {"new": len(new), "changed": len(changed), "gone": len(gone)}
        if result["error"]:
            raise ValueError(result["error"])
        return {key: result[key] for key in ("ttft_s", "usage_cached_tokens")}

    def settled(self, before: Json) -> tuple[Json | None, Json | None]:
        """Counters once they stand still and count the request; a cache server's come late."""
        deadline = time.monotonic() + self.limits["settle_s"]
        last = self.scrape()
        while time.monotonic() < deadline:
            time.sleep(self.limits["poll_s"])
            now = self.scrape()
            old = (before["vllm"] or {}).get("requests_finished") or 0
            if now[0] and (now[0]["requests_finished"] or 0) > old and now == last:
                break
            last = now
        return last

    def wait_files(self, before: parts.Files, role: str, failed: bool) -> parts.Files:
        """Waits until new files stand still; where the cold request wrote, for a first one, too."""
        if not self.storage:
            return {}
        expected = not failed and (role == "cold" or (role == "control" and bool(self.cold_files)))
        fresh, told = parts.wait_files(self.storage, before, expected, self.limits)
        if role == "cold":
            self.cold_files, self.evidence["written"] = fresh, told
        return fresh

    # -- steps --------------------------------------------------------------------------------
    def identify(self) -> Json:
        if self.config["api_key_file"]:
            with open(self.config["api_key_file"], encoding="utf-8") as handle:
                self.key = handle.read().strip()
        base = self.config["api_base"]
        models = json.loads(self.get(base + "/v1/models"))["data"]
        named = [one["id"] for one in models]
        if self.config["model"] is None:
            self.config["model"] = self.evidence["config"]["model"] = named[0]
        if self.config["model"] not in named:
            raise ValueError(f"no model {self.config['model']!r} is served: {', '.join(named)}")
        found = next(one for one in models if one["id"] == self.config["model"])
        longest, number = found.get("max_model_len"), self.config["prompt_tokens"]
        if longest and number + self.config["max_tokens"] > longest:
            raise ValueError(f"a prompt of {number} tokens does not fit into {longest}")
        with contextlib.suppress(OSError, ValueError):
            said = json.loads(self.get(base + "/version"))
            self.evidence["versions"]["vllm"] = str(said.get("version"))
        return {"model": self.config["model"], "runner": parts.who(base)}

    def check_use(self) -> Json:
        vllm, _ = self.scrape()
        if not vllm or vllm["requests_finished"] is None:
            found: Json = {"busy": None, "finished": None}  # cannot know: refuse too
        else:
            busy = int((vllm["running"] or 0) + (vllm["waiting"] or 0))
            found = {"busy": busy, "finished": int(vllm["requests_finished"])}
        if not self.config["disrupt"] and (found["busy"] != 0 or found["finished"] != 0):
            self.evidence["refused"] = found
            raise InUse(
                "the server's metrics cannot be read"
                if found["busy"] is None
                else f"{found['busy']} requests now, {found['finished']} since it started"
            )
        return found

    def drop_pages(self) -> Json:
        """Of the files as they are now: LMCache's fs:// writes them anew for the warm request."""
        now, _ = parts.scan(self.storage)
        self.cold_files = {name: now[name] for name in self.cold_files if name in now}
        found = probe.drop_pages(self.storage, self.cold_files)
        self.evidence["page_cache"] = found
        return found

    def restart(self) -> Json:
        """Runs the command and waits until another process answers; how is in the evidence."""
        old = self.evidence["requests"]["cold"]["after"]
        program = self.config["restart"][0]  # arguments may hold secrets
        outcome: Json = {
            "program": program,
            "exit_code": None,
            "began_unix": time.time(),
            "ready_s": None,
        }
        self.evidence["restart"] = outcome
        self.restarting = True
        started = time.monotonic()
        try:
            with tempfile.TemporaryFile() as output:  # a pipe would wait for what inherits it
                code = bounded.run_into(output, self.config["restart"], self.limits["restart_s"])
                outcome["exit_code"] = code
                said = bounded.last_of(output)
            if code:
                raise ValueError(f"exit {code}: " + probe.scrub(said, self.key, last=True))
            self.wait_ready(old, started)
            outcome["ready_s"] = round(time.monotonic() - started, 2)
        finally:
            self.restarting = False
            if self.late:
                raise Interrupted(signal.Signals(self.late[0]).name)
        self.sent = 0
        return outcome

    def wait_ready(self, old: Json, started: float) -> None:
        """Healthy, and not the old process; where nobody can tell, healthy for same_s seconds."""
        healthy_since: float | None = None
        while True:
            now = time.monotonic()
            try:
                self.get(self.config["api_base"] + "/health", timeout=5)
                healthy_since = healthy_since or now
            except OSError:
                healthy_since = None
            if healthy_since is not None:
                vllm, runner = self.scrape()[0], parts.who(self.config["api_base"])
                start, was = (vllm or {}).get("start_time"), (old["vllm"] or {}).get("start_time")
                other = runner is not None and runner != old["runner"]
                if other or (start is not None and was is not None and start != was):
                    return
                if now - healthy_since > self.limits["same_s"]:
                    return  # still the old one, or nobody knows: the judge sees it
            if now - started > self.limits["restart_s"] + self.limits["ready_s"]:
                raise ValueError(f"the server does not answer {now - started:.0f} s later")
            time.sleep(self.limits["poll_s"])

    def step(self, title: str, action: Callable[[], Any]) -> bool:
        """Runs one step, records its outcome; False when it failed."""
        return run_step(self.evidence["steps"], title, action, self.key)

    def steps(self) -> None:
        if not self.step("what answers", self.identify):
            return
        self.step("is the server in use", self.check_use)
        prompts: list[list[int] | str] = []
        if not self.step(
            "make two prompts",
            lambda: prompts.extend(parts.make_prompt(self.config, self.tokenize) for _ in "ab"),
        ):
            return
        prompt, other = prompts
        how = "text" if isinstance(prompt, str) else "ids" if self.config["vocab"] else "words"
        self.evidence["prompts"] = how
        if not self.step("cold request", lambda: self.request("cold", prompt)):
            return
        self.step("warm request", lambda: self.request("warm", prompt))
        if self.cold_files:
            self.step("drop what it wrote from the page cache", self.drop_pages)
        if not self.step("restart command", self.restart):
            return
        self.step("the same request again", lambda: self.request("restored", prompt))
        self.step("control: an unseen prompt", lambda: self.request("control", other))

    def stop(self, number: int, _frame: Any) -> None:
        if self.restarting:  # a restart that has begun must not leave the server down
            self.late.append(number)
        else:
            raise Interrupted(signal.Signals(number).name)

    def run(self) -> None:
        for number in SIGNALS:
            signal.signal(number, self.stop)
        try:
            self.steps()
        except InUse:
            pass  # the evidence says so
        except Interrupted as error:
            self.evidence["interrupted"] = str(error)
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        self.evidence["finished_unix"] = time.time()


def main() -> int:
    lines = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(
        description="\n".join(lines), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", required=True, help="JSON, see above")
    parser.add_argument("--out", required=True, help="where the evidence is written")
    args = parser.parse_args()
    try:
        with open(args.config, encoding="utf-8") as handle:
            config = parts.load_config(handle.read())
    except (OSError, ValueError) as error:
        print(f"{args.config}: {error}", file=sys.stderr)
        return 1
    collector = Collector(config)
    collector.run()
    try:
        probe.write_json(args.out, collector.evidence, 0o600)
    except OSError as error:
        print(f"the evidence cannot be written: {error}", file=sys.stderr)
        return 1
    if collector.evidence["refused"]:
        with contextlib.suppress(OSError):
            print("refused: in use; --disrupt runs the test anyway", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
