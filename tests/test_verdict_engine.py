"""Healthy and broken set-ups of the real engine: each must get its verdict, with its cause named.

One cache server and one runner serve the whole file, as kvhost describes them. Most set-ups use the
event "cache", which restarts no engine; it has few blocks of KV, so that its memory is soon full.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from kvhost.evidence_model import Evidence, parse_events
from kvhost.onhost import evidence_probe as probe
from kvhost.second_pair import second_pair
from kvhost.services import vllm_config
from kvhost.verdict import judge
from tests.e2e_tools import BASE, Site
from tests.engine_pair import NAMESPACE, REPO, Json, Pair, restart

pytestmark = [pytest.mark.verdict, pytest.mark.engine]
full = pytest.mark.full
BLOCKS = 64  # of 128 tokens: the prompts of one test fit, and little more


def engine_env(request: pytest.FixtureRequest) -> Path:
    """An environment with the engine: a given one, or that of the end-to-end tests."""
    given = os.environ.get("KVHOST_TEST_ENGINE")
    if given:
        return Path(given)
    site: Site = request.getfixturevalue("site")
    if not (site.base / "current").exists():
        done = site.up(verify="never")
        assert done.code == 0, done.text[-4000:]
    return (site.base / "current").resolve()


@pytest.fixture(scope="module")
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    base = Path(f"{BASE}-verdict")
    subprocess.run(["rm", "-rf", str(base)], check=True)
    one = Pair(base, engine_env(request))
    one.make()
    config = vllm_config(one.settings, one.paths, with_key=False)
    one.configure({**config, "num-gpu-blocks-override": BLOCKS, "max-model-len": 4096})
    try:
        one.start()
        wait_for(one)
        yield one
    finally:
        one.stop()
        subprocess.run(["rm", "-rf", str(base)], check=True)


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=5) as reply:
        text: str = reply.read().decode()
        return text


def wait_for(pair: Pair, seconds: float = 240) -> None:
    """Until both answer and the engine is registered."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            get(f"http://127.0.0.1:{pair.ports[0]}/health")
            status = get(f"http://127.0.0.1:{pair.ports[2]}/status")
            if probe.registered(json.loads(status)):
                return
        except OSError as error:
            assert time.monotonic() < deadline, (error, pair.log("runner")[-3000:])
        time.sleep(0.5)


def ask(pair: Pair, tokens: list[int]) -> None:
    body = {"model": "kvhost-builtin", "prompt": tokens, "max_tokens": 1, "temperature": 0}
    request = urllib.request.Request(
        f"http://127.0.0.1:{pair.ports[0]}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    urllib.request.urlopen(request, timeout=120).read()


def collect(pair: Pair, **changed: Any) -> list[Evidence]:
    state = pair.base / "state"
    config = pair.config(**{"events": ["cache"], **changed})
    (state / "config.json").write_text(json.dumps(config))
    argv = [sys.executable, str(REPO / "kvhost/onhost/evidence.py")]
    argv += ["--config", str(state / "config.json"), "--out", str(state / "out.json")]
    done = subprocess.run(argv, stderr=subprocess.PIPE, text=True, timeout=900, check=False)
    assert done.returncode in (0, 3), done.stderr
    return parse_events((state / "out.json").read_text())


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
    marks: tuple[pytest.MarkDecorator, ...] = ()


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
FIRST_HALF = "ls *.data | awk 'NR % 2' | while read f; do"
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
    Broken("the files are deleted", "FAIL", "evicted", "rm -f *.data"),
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
    ),
    Broken(
        "no metrics",
        "INCONCLUSIVE",
        "metrics-unreadable",
        config={"metrics_url": "http://127.0.0.1:9/metrics"},
    ),
    Broken(
        "half of the files deleted", "FAIL", "evicted", f"{FIRST_HALF} rm $f; done", marks=(full,)
    ),
    Broken(
        "half of the files truncated",
        "FAIL",
        "files-touched",
        f"{FIRST_HALF} truncate -s 1000000 $f; done",
        marks=(full,),
    ),
    Broken(
        "another namespace after the restart",
        "FAIL",
        "namespace-changed",
        f"sed -i s/{NAMESPACE}/ns-0ff/ ../../etc/cache.json; mkdir -p ../ns-0ff",
        marks=(full,),
    ),
    Broken("no L2", "FAIL", "l2-absent", argv=without_l2, marks=(full,)),
    Broken(
        "L2 on a tmpfs, whose reads cannot be observed",
        "INCONCLUSIVE",
        "page-cache-not-dropped",
        config={"namespace_dir": TMPFS},
        argv=on_tmpfs,
        prepare=make_tmpfs,
        marks=(full,),
    ),
    Broken(
        "a prompt of one chunk",
        "INCONCLUSIVE",
        "prompt-too-short",
        config={"prompt_tokens": 300},
        marks=(full,),
    ),
    Broken("two clients at once", "INCONCLUSIVE", "not-alone", beside=Client, marks=(full,)),
    Broken("a proxy alters the answer", "FAIL", "wrong-kv-served", beside=Proxy, marks=(full,)),
)


@pytest.mark.parametrize(
    "setup", [pytest.param(one, id=one.what.replace(" ", "-"), marks=one.marks) for one in SETUPS]
)
def test_a_set_up_is_judged_as_it_is(pair: Pair, setup: Broken) -> None:
    service = pair.describe()["cache"]
    # without the sweep: what lies there is what the server finds
    argv = setup.argv(service.argv) if setup.argv else service.argv
    pair.write(cache={"before": (), "argv": argv})
    between = pair.base / "between.sh"
    try:
        if setup.argv:
            if setup.prepare:
                setup.prepare(pair)
            restart(pair.base, "cache")
            wait_for(pair)
        elif setup.prepare:
            setup.prepare(pair)
        between.write_text(f"set -e; cd tier/{NAMESPACE}\n{setup.between}\n")
        config = dict(setup.config)
        services = config.pop("services", {})
        if services:
            known = pair.config()["services"]
            config["services"] = {n: {**known[n], **services.get(n, {})} for n in known}
        with (setup.beside or Beside)(pair) as beside:
            (found,) = collect(pair, **config, **beside.config)
    finally:
        between.unlink(missing_ok=True)
        pair.write(cache={"before": ()})
        restart(pair.base, "cache")
        wait_for(pair)
        for path in pair.namespace.glob("*.data"):
            path.unlink()
        subprocess.run(["rm", "-rf", str(Path(TMPFS).parent)], check=True)
    verdict = judge(found)
    unmet = [(c.id, c.figure, c.threshold) for c in verdict.conditions if c.met is not True]
    causes = [cause.slug for cause in verdict.causes]
    steps = [(s.name, s.error) for s in found.steps if s.error]
    assert verdict.persisted == setup.persisted, (causes, unmet, steps)
    assert (causes[0] if causes else None) == setup.cause, (causes, unmet, steps)


def other(pair: Pair) -> Json:
    api = "http://127.0.0.1:{api_port}"
    return {
        "start": [sys.executable, str(REPO / "kvhost/onhost/launch.py")],
        "services": second_pair(pair.settings, pair.paths, str(pair.namespace), with_key=False),
        "api_base": api,
        "metrics_url": f"{api}/metrics",
        "cache_http": "http://127.0.0.1:{cache_http_port}",
    }


@full
@pytest.mark.parametrize("event", ["runner", "both", "kill", "other"])
def test_a_healthy_pair_passes_every_event(pair: Pair, event: str) -> None:
    (found,) = collect(pair, events=[event], other=other(pair) if event == "other" else None)
    verdict = judge(found)
    unmet = [(c.id, c.figure, c.threshold) for c in verdict.conditions if c.met is not True]
    steps = [(s.name, s.error) for s in found.steps if s.error]
    assert verdict.persisted == "PASS", (verdict.summary, unmet, steps)
    assert not list(pair.namespace.glob("*.data"))


@full
@pytest.mark.parametrize("number", range(20))
def test_a_healthy_pair_passes_each_time(pair: Pair, number: int) -> None:
    (found,) = collect(pair, events=["both"])
    verdict = judge(found)
    unmet = [(c.id, c.figure, c.threshold) for c in verdict.conditions if c.met is not True]
    assert verdict.persisted == "PASS", (verdict.summary, unmet)
