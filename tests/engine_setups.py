"""Set-ups of the real engine, one thing broken in each, with the verdict and cause it must get.

tests/test_verdict_engine.py plays them through; docs/verdict.md shows them.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.engine_pair import NAMESPACE, Json, Pair


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=5) as reply:
        text: str = reply.read().decode()
        return text


def ask(pair: Pair, tokens: list[int]) -> None:
    body = {"model": "kvhost-builtin", "prompt": tokens, "max_tokens": 1, "temperature": 0}
    request = urllib.request.Request(
        f"http://127.0.0.1:{pair.ports[0]}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    urllib.request.urlopen(request, timeout=120).read()


@dataclass(frozen=True)
class Broken:
    """A set-up, what is done to it, and what must be said."""

    what: str
    persisted: str
    cause: str | None
    #: shell commands between stop and start of the cache server, in the namespace's directory
    between: str = ""
    #: changes of the config of evidence.py
    config: Json = field(default_factory=dict)
    #: changes of the cache server's arguments, before the test
    argv: Callable[[tuple[str, ...]], tuple[str, ...]] | None = None
    prepare: Callable[[Pair], None] | None = None
    #: what goes on beside the test; a context
    beside: Callable[[Pair], Beside] | None = None
    #: too long for the core tier
    full: bool = False


class Beside:
    """Something that runs while the test does; ``config``: what the test is told."""

    def __init__(self, pair: Pair) -> None:
        self.config: Json = {}
        self.ended = threading.Event()

    def __enter__(self) -> Beside:
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()


class Client(Beside):
    """Somebody else who asks all the time."""

    def __init__(self, pair: Pair) -> None:
        super().__init__(pair)
        self.config = {"disrupt": True}

        def run() -> None:
            while not self.ended.wait(1.5):
                ask(pair, [random.randrange(20, 236) for _ in range(300)])

        threading.Thread(target=run, daemon=True).start()


class Proxy(Beside):
    """A proxy before the runner that alters the answers from the fifth streamed one on."""

    def __init__(self, pair: Pair) -> None:
        super().__init__(pair)
        behind, seen = f"http://127.0.0.1:{pair.ports[0]}", [0]

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.answer(get(behind + self.path).encode())

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                request = urllib.request.Request(
                    behind + self.path, body, {"Content-Type": "application/json"}
                )
                with urllib.request.urlopen(request, timeout=120) as reply:
                    text: bytes = reply.read()
                if json.loads(body).get("stream"):
                    seen[0] += 1
                    if seen[0] > 4:
                        text = re.sub(rb'("token_ids":\[)(\d+)', rb"\g<1>1\g<2>", text)
                self.answer(text)

            def answer(self, body: bytes) -> None:
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.config = {"api_base": f"http://127.0.0.1:{self.server.server_port}"}

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()


def other_kv(pair: Pair) -> None:
    """Another prompt's KV, kept beside; between.sh plants it under the names of the test's."""
    before = set(pair.namespace.iterdir())
    draw = random.Random(time.time_ns()).randrange
    ask(pair, [draw(20, 236) for _ in range(2056)])
    deadline = time.monotonic() + 60
    while len(new := set(pair.namespace.glob("*.data")) - before) < 8:
        assert time.monotonic() < deadline, "the other prompt was not written"
        time.sleep(0.2)
    time.sleep(1)
    keep = pair.base / "others"
    subprocess.run(["rm", "-rf", str(keep)], check=True)
    keep.mkdir()
    for path in new:
        path.rename(keep / path.name)


PLANT = """
import os, pathlib
others = [p.read_bytes() for p in sorted(pathlib.Path("../../others").iterdir())]
for number, path in enumerate(sorted(pathlib.Path(".").glob("*.data"))):
    times = os.stat(path)
    with path.open("r+b") as handle:
        handle.write(others[number % len(others)])
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
"""
FIRST_HALF = "ls -- *.data | awk 'NR % 2' | while read -r f; do"
TMPFS = f"/dev/shm/kvhost-test-{os.getpid()}/{NAMESPACE}"


def without_l2(argv: tuple[str, ...]) -> tuple[str, ...]:
    return argv[: argv.index("--l2-adapter")]


def on_tmpfs(argv: tuple[str, ...]) -> tuple[str, ...]:
    adapter = json.loads(argv[-1])
    return (*argv[:-1], json.dumps({**adapter, "base_path": TMPFS}))


def make_tmpfs(pair: Pair) -> None:
    Path(TMPFS).mkdir(parents=True, exist_ok=True)


SETUPS = (
    Broken("nothing is broken", "PASS", None),
    Broken(
        "another prompt's KV lies under the names",
        "FAIL",
        "wrong-kv-served",
        f"python3 -c '{PLANT}'",
        {"disrupt": True},
        prepare=other_kv,
    ),
    Broken(
        "a restart that does not restart",
        "INCONCLUSIVE",
        "not-restarted",
        config={"services": {"cache": {"restart": ["true"]}}},
        full=True,
    ),
    Broken(
        "no metrics",
        "INCONCLUSIVE",
        "metrics-unreadable",
        config={"metrics_url": "http://127.0.0.1:9/metrics"},
        full=True,
    ),
    Broken("the files are deleted", "FAIL", "evicted", "rm -f -- *.data", full=True),
    Broken(
        "half of the files deleted", "FAIL", "evicted", f'{FIRST_HALF} rm -- "$f"; done', full=True
    ),
    Broken(
        "half of the files truncated",
        "FAIL",
        "files-touched",
        f'{FIRST_HALF} truncate -s 1000000 -- "$f"; done',
        full=True,
    ),
    Broken(
        "another namespace after the restart",
        "FAIL",
        "namespace-changed",
        f"sed -i s/{NAMESPACE}/ns-0ff/ ../../etc/cache.json; "
        "mkdir -p ../ns-0ff; cp .kvhost-namespace.json ../ns-0ff",
        full=True,
    ),
    Broken("no L2", "FAIL", "l2-absent", argv=without_l2, full=True),
    Broken(
        "L2 on a tmpfs, whose reads cannot be observed",
        "INCONCLUSIVE",
        "page-cache-not-dropped",
        config={"namespace_dir": TMPFS},
        argv=on_tmpfs,
        prepare=make_tmpfs,
        full=True,
    ),
    Broken(
        "a prompt of one chunk",
        "INCONCLUSIVE",
        "prompt-too-short",
        config={"prompt_tokens": 300},
        full=True,
    ),
    Broken("two clients at once", "INCONCLUSIVE", "not-alone", beside=Client, full=True),
    Broken("a proxy alters the answer", "FAIL", "wrong-kv-served", beside=Proxy, full=True),
)
