#!/usr/bin/env python3
"""Waits until the server has answered a request, or says why it has not: ready.py --base DIR …

Ready means: the cache server is healthy, vLLM is registered with it, and one token was generated;
with --health-only (llama-server, in whose slots a token would take the place of a saved prompt),
that it says of itself that it is ready. Without --cache there is no cache server to be asked.
A service that fails meanwhile is shown at once with its last log lines (launch.py writes why into
run/NAME.failed); the second failure of one ends the wait, long before a time-out would.
`--once` asks a single time, generates nothing, and prints JSON.

A service that hangs is none that is slow: it ran for longer than --timeout when the wait began, and
nothing answered on its port for a minute since. Exit: 0 ready, 1 not, 3 the runner hangs, 4 the
cache server does: a restart is what helps.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import sys
import time
import urllib.error
import urllib.request
from typing import Any

RUNNER = "runner"
FAILURES = 2  # of one service, since the wait began
RUNNER_HANGS, CACHE_HANGS = 3, 4  # exit codes
SILENT_S = 60.0  # without any answer, of a process that should have answered long ago
UNUSABLE = 78  # launch.py's exit for a description that no retry will mend

# loopback is never reached through a proxy, whatever the environment says
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def call(url: str, body: Any = None, key: str | None = None, timeout: float = 30) -> Any:
    """(HTTP status, text); status 0 when nothing answers, the reason in the text."""
    headers = {"Content-Type": "application/json"}
    if key:
        headers["Authorization"] = "Bearer " + key
    data = None if body is None else json.dumps(body).encode()
    try:
        request = urllib.request.Request(url, data=data, headers=headers)
        with OPENER.open(request, timeout=timeout) as reply:
            return reply.status, reply.read().decode(errors="replace")
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode(errors="replace")
    except (OSError, ValueError, http.client.HTTPException) as error:
        return 0, str(error) or type(error).__name__


def registered(status: Any) -> int | None:
    """Workers of engines that are registered, by the cache server's /status; None if it does not
    say. Each rank of each runner is one.

    LMCache 0.5.6 lists them per way of transfer under keys such as "registered_gpu_ids" and
    "registered_non_cuda_instance_ids" (lmcache/v1/multiprocess/modules/*_transfer.py).
    """
    known: int | None = None
    items = status.items() if isinstance(status, dict) else []
    for key, value in items:
        if key.startswith("registered_") and isinstance(value, list):
            found: int | None = len(value)
        else:
            found = registered(value)
        if found is not None:
            known = found + (known or 0)
    return known


def shared_away(status: Any) -> str | None:
    """Why the tier that hosts share is not used, by the cache server's /status; None if it is, or
    there is none. No reason not to be ready: the host goes on without it."""
    if isinstance(status, dict):
        shared = status.get("shared")
        if isinstance(shared, dict) and status.get("type") == "kvhost_shared":
            return None if shared.get("answers") else str(shared.get("why"))
        status = list(status.values())
    found = [shared_away(one) for one in status] if isinstance(status, list) else []
    return next((one for one in found if one is not None), None)


class Server:
    """The two services, asked over HTTP. Raises OSError, ValueError for an unusable key file."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.base: str = args.base
        self.api: str | None = args.api.rstrip("/") if args.api else None
        self.cache: str | None = args.cache.rstrip("/") if args.cache else None
        self.health_only: bool = args.health_only
        self.model: str = args.model
        self.runner: str = args.runner
        self.engines: int = args.engines
        self.key: str | None = None
        #: what the cache server said of itself last
        self.status: Any = None
        #: the service on whose port nothing answered when it was asked last
        self.silent: str | None = None
        if args.key_file:
            with open(args.key_file, encoding="utf-8") as handle:
                self.key = handle.read().rstrip("\n")
            # urllib's own error would show the key
            if not self.key.isascii() or not self.key.isprintable():
                raise ValueError(f"{args.key_file}: a key is one line of printable ASCII")

    def unhealthy(self, name: str) -> str | None:
        status, text = call(f"{self.api}/health", timeout=5)
        self.silent = None if status else self.runner
        return None if status == 200 else f"{name}: " + (text.strip()[:200] or f"HTTP {status}")

    def missing(self, generate: bool) -> str | None:
        """What is still missing, in words; None when the server is ready."""
        if self.health_only:
            return self.unhealthy("llama-server")
        if self.cache is not None:
            status, text = call(self.cache + "/healthcheck", timeout=5)
            self.silent = None if status else "cache"
            if status != 200:
                return "the cache server: " + (text.strip()[:200] or f"HTTP {status}")
        if self.api is None:
            return None
        if (why := self.unhealthy("vLLM")) is not None:
            return why
        if self.cache is not None and (missing := self.unregistered(self.cache)):
            return missing
        if not generate:
            return None
        # a single token of prompt: nothing of it is worth a place in the cache
        body = {"model": self.model, "prompt": [1], "max_tokens": 1, "temperature": 0}
        status, text = call(self.api + "/v1/completions", body, self.key, timeout=120)
        if status == 200:
            count_own_request(self.base, self.runner)
            return None
        return f"a first token: HTTP {status} {text.strip()[:200]}"

    def unregistered(self, cache: str) -> str | None:
        """What is missing of the engines' registrations with the cache server, in words."""
        status, text = call(cache + "/status", timeout=5)
        try:
            self.status = json.loads(text) if status == 200 else None
        except ValueError:
            return f"the cache server's status: not JSON: {text.strip()[:200]}"
        found = registered(self.status)
        if found is not None and found < self.engines:
            some = f", {found} of {self.engines}" if self.engines > 1 else ""
            return f"vLLM's registration with the cache server{some}"
        return None


def read_json(path: str) -> dict[str, Any]:
    """{} without a usable file."""
    try:
        with open(path, encoding="utf-8") as handle:
            data = json.load(handle)
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def own_requests(state: str, runner: str) -> str:
    """The file in state/ with their number, one a runner."""
    return os.path.join(state, f"own-requests{runner[len(RUNNER) :]}.json")


def count_own_request(base: str, name: str) -> None:
    """kvhost's own requests are told apart from those of a server in use (see evidence.py)."""
    runner = read_json(os.path.join(base, "run", f"{name}.json"))
    path = own_requests(os.path.join(base, "state"), name)
    own = read_json(path)
    who = {"pid": runner.get("pid"), "start_ticks": runner.get("start_ticks")}
    same = all(own.get(key) == value for key, value in who.items())
    had = own.get("count") if same else 0
    count = (had if type(had) is int and had >= 0 else 0) + 1  # of a wrong shape: none known
    try:
        with open(path + ".new", "w", encoding="utf-8") as handle:
            json.dump({**who, "count": count}, handle)
        os.replace(path + ".new", path)
    except OSError as error:
        # uncounted it looks like a user's, and the next verdict refuses to disturb the server
        say(f"warning: own request not counted: {error}")


class Failures:
    """Counts how often each service has failed since this was made, by its run/NAME.failed."""

    def __init__(self, base: str, names: tuple[str, ...]) -> None:
        self.base, self.names = base, names
        self.last = {name: self.read(name).get("failed_unix") for name in names}
        self.count = dict.fromkeys(names, 0)

    def read(self, name: str) -> dict[str, Any]:
        return read_json(os.path.join(self.base, "run", name + ".failed"))

    def look(self) -> str | None:
        """Shows what failed since the last look; the name of a service that is given up."""
        given_up = None
        for name in self.names:
            failed = self.read(name)
            if failed.get("failed_unix") in (None, self.last[name]):
                continue
            self.last[name] = failed["failed_unix"]
            self.count[name] += 1
            say(f"{name}: {failed.get('why')}")
            show_log(self.base, name)
            if self.count[name] >= FAILURES or failed.get("exit") == UNUSABLE:
                given_up = given_up or name
        return given_up


def show_log(base: str, name: str, lines: int = 25) -> None:
    if "JOURNAL_STREAM" in os.environ:  # under systemd they stand just above, in the journal
        return
    path = os.path.join(base, "log", name + ".log")
    try:
        # the directory is the service user's: no link is followed, no pipe is waited for
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as handle:
            handle.seek(max(os.fstat(handle.fileno()).st_size - (1 << 16), 0))
            last = handle.read().decode(errors="replace").splitlines()[-lines:]
    except OSError as error:
        last = [f"no log: {error}"]
    say(f"last lines of {path}:")
    for line in last:
        say("  | " + line.rstrip()[:400])


def lives(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as handle:
            return handle.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def age_s(base: str, name: str) -> float:
    """Seconds for which a service's process has lived, by its record; 0 if it is not that one."""
    record = read_json(os.path.join(base, "run", name + ".json"))
    try:
        with open(f"/proc/{int(record['pid'])}/stat", encoding="utf-8", errors="replace") as handle:
            ticks = int(handle.read().rpartition(")")[2].split()[19])  # field 22 of proc(5)
        if ticks != record["start_ticks"]:
            return 0.0
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def wait(server: Server, timeout: float, main: int | None = None) -> int:
    """``main``: the service's first process, whose end ends the wait (systemd waits for us)."""
    names = ("cache", server.runner) if server.cache else (server.runner,)
    failures = Failures(server.base, names)
    began = answered = time.monotonic()
    told = began - 5
    overdue = {name for name in names if age_s(server.base, name) > timeout}
    while True:
        missing = server.missing(generate=True)
        now = time.monotonic()
        if server.silent not in overdue:
            answered = now
        if missing is None:
            say(f"ready after {now - began:.0f} s")
            away = shared_away(server.status)
            if away is not None:
                say(f"without the shared tier: {away}")
            return 0
        if main is not None and not lives(main):
            say(f"not ready: process {main} has ended")
            return 1
        given_up = failures.look()
        if given_up is not None:
            say(f"not ready: {given_up} does not start (it is still tried again)")
            return 1
        if server.silent is not None and now - answered > min(SILENT_S, timeout):
            age = age_s(server.base, server.silent)
            say(f"not ready: {server.silent} has run for {age:.0f} s and does not answer: it hangs")
            return CACHE_HANGS if server.silent == "cache" else RUNNER_HANGS
        if now - began > timeout:
            say(f"not ready after {timeout:.0f} s; missing: {missing}")
            for name in names:
                show_log(server.base, name)
            return 1
        if now - told >= 10:
            told = now
            say(f"  ... {now - began:.0f} s, waiting for {missing}")
        time.sleep(1)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--base", required=True)
    parser.add_argument("--api", help="base URL of vLLM; without it only the cache server is asked")
    parser.add_argument("--cache", help="base URL of the cache server's HTTP port, if there is one")
    parser.add_argument("--health-only", action="store_true", help="of a runner alone: "
                        "no more than whether it is healthy")  # fmt: skip
    parser.add_argument("--model", help="served model name")
    parser.add_argument("--runner", default=RUNNER, help="name of its service (runner)")
    parser.add_argument("--engines", type=int, default=1, help="workers that must be registered")
    parser.add_argument("--key-file", help="file with the API key")
    parser.add_argument("--timeout", type=float, default=600, help="seconds")
    parser.add_argument("--main", type=int, help="end with this process, for systemd")
    parser.add_argument("--once", action="store_true", help="ask once, print JSON")
    args = parser.parse_args()
    if args.api and not args.model:
        parser.error("--api needs --model")
    if not (args.cache or args.api) or (args.health_only and (args.cache or not args.api)):
        parser.error("--api, --cache or both; --api alone with --health-only")
    try:
        server = Server(args)
    except (OSError, ValueError) as error:
        say(f"ready: the API key cannot be used: {error}")
        return 1
    if args.once:
        missing = server.missing(generate=False)
        away = shared_away(server.status)
        print(json.dumps({"ready": missing is None, "missing": missing, "shared_away": away}))
        return 0 if missing is None else 1
    return wait(server, args.timeout, args.main)


if __name__ == "__main__":
    sys.exit(main())
