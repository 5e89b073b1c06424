"""What is done to the services in an event of the test: restarts, kills, the engine's own memory
emptied. Lies beside evidence.py.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import signal
import subprocess
import tempfile
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvhost.onhost import evidence_probe as probe
    from kvhost.onhost.evidence_collect import Collector, Json, finishing_first
    from kvhost.onhost.ready import registered
else:  # on the host the files lie beside each other, in no package
    import evidence_probe as probe
    from evidence_collect import Collector, finishing_first
    from ready import registered

BATCH = 32  # prompts in one request that fills the engine's memory
#: a quarter of its files must be there when the services are killed
KILL_AT = 4


class Services(Collector):
    """A collector that can restart the services that it asks."""

    def command(self, name: str) -> None:
        """Runs the restart command of a service. Raises ValueError with its output, OSError."""
        outcome = self.evidence["services"][name]["restart"]
        with tempfile.TemporaryFile() as output:  # a pipe would wait for what the service inherits
            done = subprocess.run(
                self.config["services"][name]["restart"],
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
                text = output.read().decode(errors="replace")
                said = probe.scrub(text, self.key, last=True)
                raise ValueError(f"exit {done.returncode}: {said}")

    def wait_ready(self, name: str) -> Json:
        """Until the service answers on its port. Raises ValueError with its last log lines."""
        entry = self.evidence["services"][name]
        base, path = ("api_base", "/health") if name == "runner" else ("cache_http", "/healthcheck")
        started = alive = time.monotonic()
        while True:
            entry["after"] = self.identity(name)
            with contextlib.suppress(OSError):
                self.get(self.asked[base] + path, timeout=5)
                break
            now = time.monotonic()
            alive = now if entry["after"]["proc"] else alive
            if now - started > self.limits["ready_s"] or now - alive > 30:
                raise ValueError(
                    f"{name} is not ready after {now - started:.0f} s; {self.tail(name)}"
                )
            time.sleep(0.5)
        entry["after"] = self.identity(name)
        entry["restart"]["ready_s"] = round(time.monotonic() - started, 2)
        return dict(entry["restart"])

    def restart(self, name: str) -> Json:
        self.evidence["services"][name]["restart"] = {"exit_code": None, "ready_s": None}
        with finishing_first():
            self.command(name)
        return self.wait_ready(name)

    def tail(self, name: str) -> str:
        path = self.log_of(name)
        found = probe.read_log(path, -2000) if path else None
        if found is None:
            return "no log"
        lines = found[1].splitlines()[-3:]
        return "last lines: " + " / ".join(probe.scrub(line, self.key, 200) for line in lines)

    def stays(self, name: str) -> None:
        """A service that was not restarted: the one asked afterwards is looked at too."""
        self.evidence["services"][name]["after"] = self.identity(name)

    def wait_registered(self) -> Json:
        """The engine has seen that the server is another and registered again (LMCache#4642)."""
        time.sleep(2 * self.config["heartbeat_s"])
        deadline = time.monotonic() + self.limits["registered_s"]
        while True:
            found: bool | None = None
            with contextlib.suppress(OSError, ValueError):
                count = registered(json.loads(self.get(self.asked["cache_http"] + "/status")))
                found = None if count is None else count >= self.config["engines"]
            self.evidence["registered"] = found
            if found or time.monotonic() > deadline:
                return {"registered": found}
            time.sleep(0.5)

    def flush_engine(self) -> Json:
        """Fills the engine's own KV memory with prompts shorter than a chunk, which no cache keeps,
        until every block that held the test's prompts has been taken for another."""
        started = time.monotonic()
        result: Json = dict.fromkeys(("blocks", "block_size", "error"))
        result |= {"tokens": 0, "requests": 0, "seconds": 0.0}
        self.evidence["flushed"] = result
        info = probe.labels_of(self.get(self.asked["metrics_url"]), "vllm:cache_config_info")
        try:
            blocks, size = int(info["num_gpu_blocks"]), int(info["block_size"])
        except (KeyError, ValueError):
            result["error"] = "the metrics do not say how many blocks of KV the engine has"
            raise ValueError(result["error"]) from None
        result |= {"blocks": blocks, "block_size": size}
        length = self.config["chunk_size"] - 1
        todo = blocks // max(1, math.ceil(length / size)) + BATCH
        draw = random.Random(f"{self.seed}:flush").randrange
        while todo > 0:
            if time.monotonic() - started > self.limits["flush_s"]:
                result["error"] = f"not filled within {self.limits['flush_s']} s"
                raise ValueError(result["error"])
            prompts = [
                [draw(*self.config["vocab"]) for _ in range(length)]
                for _ in range(min(BATCH, todo))
            ]
            body = {"model": self.config["model"], "prompt": prompts, "max_tokens": 1}
            with self.send({**body, "temperature": 0}) as reply:
                reply.read()
            self.own_requests(add=len(prompts))
            todo -= len(prompts)
            result["requests"] += len(prompts)
            result["tokens"] += len(prompts) * length
        result["seconds"] = round(time.monotonic() - started, 2)
        return dict(result)

    def kill_midway(self) -> Json:
        """Sends a prompt, kills the services while its KV is written, starts them again."""
        prompt = self.prompt("killed")
        result = self.blank("killed", prompt)
        before, _ = probe.scan(self.config["namespace_dir"])
        self.window_open = ("killed", before)
        result["before"] = self.snapshot()

        def ask() -> None:
            try:
                self.complete(prompt, result)
            except (OSError, ValueError) as error:
                result["error"] = probe.scrub(f"{type(error).__name__}: {error}", self.key)

        asking = threading.Thread(target=ask, daemon=True)
        expected = self.files_of(self.chunks)
        entry: Json = {"pids": [], "files": 0, "expected_files": expected, "kept": None}
        self.evidence["killed"] = entry
        services = self.evidence["services"]
        # the cache server first, where there is one: it is what writes
        names = [name for name in ("cache", "runner") if name in services]
        trees = [probe.tree(services[name]["before"]["record"]["pid"]) for name in names]
        asking.start()
        deadline = time.monotonic() + self.limits["request_s"]
        while time.monotonic() < deadline:
            files, _ = probe.scan(self.config["namespace_dir"])
            if len(files.keys() - before.keys()) >= max(1, expected // KILL_AT):
                break
            time.sleep(0.002)
        with finishing_first():
            for pid in (pid for pids in trees for pid in pids):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    entry["pids"].append(pid)
            asking.join(30)
            whole = self.close_window()
            entry["files"] = len(whole)
            for name in names:
                services[name]["restart"] = {"exit_code": None, "ready_s": None}
                self.command(name)
        for name in names:
            self.wait_ready(name)
        now, _ = probe.scan(self.config["namespace_dir"])
        entry["kept"] = sum(now.get(name) == info for name, info in whole.items())
        probe.drop_pages(self.config["namespace_dir"], whole)
        return dict(entry)
