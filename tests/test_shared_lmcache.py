"""The real LMCache with both tiers, without an engine: what A stored B reads, another namespace
misses, the own tier comes first, and a store that is away or refuses costs the own tier nothing."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.s3_tools import SwiftServer, s3
from tests.store_tools import PASSWORD, RedisServer, redis

pytestmark = [pytest.mark.fleet, pytest.mark.engine]
SCRIPT = Path(__file__).with_name("doubles") / "shared_storage.py"
ONHOST = Path(__file__).parents[1] / "kvhost/onhost"
NS, OTHER = "ns-" + "a" * 24, "ns-" + "b" * 24


@dataclass
class Hosts:
    engine: Path
    folder: Path
    server: RedisServer | SwiftServer

    def start(self, verb: str, host: str, namespace: str = NS, password: str = PASSWORD) -> Any:
        """One host: its own directory and path of the model; the store is that of all."""
        own = self.folder / host / namespace
        own.mkdir(parents=True, exist_ok=True)
        params = {**self.server.params(), "namespace": namespace, "timeout_s": 2.0}
        adapters = [
            {"type": "fs_native", "base_path": str(own), "num_workers": 2},
            {"type": "plugin", "module_path": "kvhost_shared", "class_name": "SharedAdapter",
             "adapter_params": params},
        ]  # fmt: skip
        argv = [
            str(self.engine / "bin/python"),
            str(SCRIPT),
            json.dumps(adapters),
            verb,
            f"/models/{host}",
        ]
        env = {"PATH": "/usr/bin:/bin", "HOME": str(self.folder), "PYTHONPATH": str(ONHOST),
               "KVHOST_SHARED_PASSWORD": password, "LMCACHE_TRACK_USAGE": "false",
               "NUMBA_CACHE_DIR": str(self.folder / "numba")}  # fmt: skip
        return subprocess.Popen(argv, env=env, text=True, stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE)  # fmt: skip

    def end(self, process: Any) -> dict[str, Any]:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err[-3000:]
        assert PASSWORD not in out + err
        told: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
        return told

    def files(self, host: str) -> int:
        return sum(1 for path in (self.folder / host).rglob("*.data"))


@pytest.fixture(scope="module", params=[redis, s3])
def hosts(
    engine: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Hosts]:
    folder = tmp_path_factory.mktemp("hosts")
    with request.param(folder / "store") as server:
        made = Hosts(engine, folder, server)
        assert made.end(made.start("write", "a"))["shared"]["stored"] == 8
        yield made


def test_what_a_stored_b_reads_and_another_namespace_does_not(hosts: Hosts) -> None:
    running = [hosts.start("read", "b"), hosts.start("read", "b", OTHER), hosts.start("read", "a")]
    there, other, own = map(hosts.end, running)
    assert (there["hits"], there["from_l2"], there["same"]) == (8, 8, True)
    assert there["shared"]["loaded"] == 8
    assert hosts.files("b") == 0
    assert other["hits"] == 0
    # what both have comes from the host's own
    assert (own["hits"], own["same"], own["shared"]["loaded"]) == (8, True, 0)


def test_of_a_longer_prompt_the_beginning_that_is_there_is_found(hosts: Hosts) -> None:
    there = hosts.end(hosts.start("longer", "c"))
    assert (there["hits"], there["from_l2"], there["same"]) == (8, 8, True)


@pytest.mark.full
def test_a_store_that_hangs_refuses_or_is_gone_costs_the_own_tier_nothing(hosts: Hosts) -> None:
    refused = hosts.end(hosts.start("read", "a", password="another-" + "x" * 20))
    assert (refused["hits"], refused["same"]) == (8, True)
    assert "it refuses the " in refused["shared"]["why"]
    hosts.server.hold()
    hanging = hosts.end(hosts.start("read", "a"))
    assert (hanging["hits"], hanging["same"]) == (8, True)
    assert "no answer within 2 s" in hanging["shared"]["why"]
    hosts.server.stop(signal.SIGKILL)
    running = [hosts.start("read", host) for host in ("a", "b")]
    own, other = map(hosts.end, running)
    assert (own["hits"], own["same"], other["hits"]) == (8, True, 0)
    assert "Connection refused" in other["shared"]["why"]
