#!/usr/bin/env python3
"""Waits until the server has answered a request, or says why it has not: ready.py --base DIR …

Ready means: the cache server is healthy, vLLM is registered with it, and one token was generated.
If a service gave up, its last log lines are shown at once instead of a time-out later.
`--once` asks a single time and prints JSON. Exit: 0 ready, 1 not.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import urllib.error
import urllib.request


def say(text):
    print(text, file=sys.stderr, flush=True)


def call(url, body=None, key=None, timeout=30):
    """(HTTP status, text); status 0 when nothing answers."""
    headers = {"Content-Type": "application/json"}
    if key:
        headers["Authorization"] = "Bearer " + key
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=timeout) as reply:
            return reply.status, reply.read().decode(errors="replace")
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(errors="replace")
    except (urllib.error.URLError, OSError, ValueError) as error:
        return 0, str(error)


class Server:
    def __init__(self, args):
        self.base, self.api, self.cache = args.base, args.api, args.cache
        self.model = args.model
        self.key = None
        if args.key_file:
            with open(args.key_file, encoding="utf-8") as handle:
                self.key = handle.read().rstrip("\n")

    def missing(self, generate):
        """What is still missing, in words; None when the server is ready."""
        status, text = call(self.cache + "/healthcheck", timeout=5)
        if status != 200:
            return "the cache server: " + (text.strip()[:200] or "HTTP %d" % status)
        status, text = call(self.api + "/health", timeout=5)
        if status != 200:
            return "vLLM: " + (text.strip()[:200] or "HTTP %d" % status)
        if not generate:
            return None
        # a single token of prompt: nothing of it is worth a place in the cache
        body = {"model": self.model, "prompt": [1], "max_tokens": 1, "temperature": 0}
        status, text = call(self.api + "/v1/completions", body, self.key, timeout=120)
        if status == 200:
            count_own_request(self.base)
            return None
        return "a first token: HTTP %d %s" % (status, text.strip()[:200])


def read_json(path):
    try:
        with open(path, encoding="utf-8") as handle:
            return json.load(handle)
    except (OSError, ValueError):
        return {}


def count_own_request(base):
    """kvhost's own requests are told apart from those of a server in use (see evidence.py)."""
    runner = read_json(os.path.join(base, "run", "runner.json"))
    path = os.path.join(base, "state", "own-requests.json")
    own = read_json(path)
    who = {"pid": runner.get("pid"), "start_ticks": runner.get("start_ticks")}
    same = all(own.get(key) == value for key, value in who.items())
    who["count"] = (own.get("count", 0) if same else 0) + 1
    with open(path + ".new", "w", encoding="utf-8") as handle:
        json.dump(who, handle)
    os.replace(path + ".new", path)


def given_up(base, since):
    """Names of services that have ended since we began to wait, by their own records."""
    names = []
    for name in ("cache", "runner"):
        record = read_json(os.path.join(base, "run", name + ".json"))
        if record.get("ended_unix", 0) > since and not record.get("clean_stop"):
            names.append(name)
    return names


def show_log(base, name, lines=25):
    path = os.path.join(base, "log", name + ".log")
    try:
        with open(path, encoding="utf-8", errors="replace") as handle:
            last = handle.readlines()[-lines:]
    except OSError as error:
        last = [f"no log: {error}"]
    say(f"last lines of {path}:")
    for line in last:
        say("  | " + line.rstrip()[:400])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", required=True)
    parser.add_argument("--api", required=True, help="base URL of vLLM")
    parser.add_argument("--cache", required=True, help="base URL of the cache server's HTTP port")
    parser.add_argument("--model", required=True, help="served model name")
    parser.add_argument("--key-file", help="file with the API key")
    parser.add_argument("--timeout", type=float, default=600, help="seconds")
    parser.add_argument("--once", action="store_true", help="ask once, print JSON")
    args = parser.parse_args()
    server = Server(args)
    if args.once:
        missing = server.missing(generate=False)
        print(json.dumps({"ready": missing is None, "missing": missing}))
        return 0 if missing is None else 1

    began, told, deaths = time.time(), 0.0, 0
    while True:
        missing = server.missing(generate=True)
        if missing is None:
            say("ready after %d s" % (time.time() - began))
            return 0
        dead = given_up(args.base, began)
        deaths = deaths + 1 if dead else 0
        if deaths > 2:  # ended, and still not back after two more looks
            say("not ready: {} ended by itself".format(" and ".join(dead)))
            for name in dead:
                show_log(args.base, name)
            return 1
        if time.time() - began > args.timeout:
            say("not ready after %d s; missing: %s" % (args.timeout, missing))
            for name in ("cache", "runner"):
                show_log(args.base, name)
            return 1
        if time.time() - told >= 10:
            told = time.time()
            say("  ... %d s, waiting for %s" % (time.time() - began, missing))
        time.sleep(1)


if __name__ == "__main__":
    sys.exit(main())
