"""A rented container: over SSH from nothing, stopped with its disk thrown away, started again.

With doubles in the place of the engine; in the full tier with the real one, to the verdict, and a
prompt of before the stop that comes from the volume.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvhost import working_copy
from kvhost.onhost.pruner import writeback_seconds
from tests.fleet_tools import plant
from tests.lab.nspawn import Lab, until
from tests.lab.nspawn_engine import engine_binds
from tests.lab.pod import SSH_PORT, VOLUME, Pod, pod

pytestmark = [
    pytest.mark.fleet,
    pytest.mark.skipif(os.geteuid() != 0, reason="root: namespaces and containers"),
]
REPO = Path(__file__).parents[1]
CLIENT = REPO / "tests/engine_client.py"
BASE = f"{VOLUME}/kvhost"
KEY = "sk-pod-0d7c3e19"
HOOK = ("python3", f"{BASE}/bin/pod_start.py", "--base", BASE)
SMALL = {"cache_limit_gib": 1, "free_floor_gib": 0.5, "l1_gib": 1}


@dataclass
class Site:
    """A working copy in the pod's network, and the volume as this machine sees it."""

    lab: Lab
    pod: Pod
    copy: Path
    volume: Path

    def kvhost(
        self, *words: str, timeout: float = 300, split: bool = False
    ) -> subprocess.CompletedProcess[str]:
        keep = {k: v for k, v in os.environ.items() if not k.startswith(("KVHOST_", "PYTEST"))}
        path = f"{self.copy}:{REPO}"
        return subprocess.run(
            self.lab.argv(sys.executable, "-m", "kvhost.cli", *words), cwd=self.copy, text=True,
            env={**keep, "PYTHONPATH": path, "HOME": str(self.copy), "KVHOST_API_KEY": KEY},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if split else subprocess.STDOUT, timeout=timeout, check=False,
        )  # fmt: skip

    def add(self, *more: str) -> subprocess.CompletedProcess[str]:
        line = f"ssh root@{self.pod.address} -p {SSH_PORT} -i {self.lab.key}"
        return self.kvhost("inventory", "add", line, "--name", "p1", *more)

    def set(self, **settings: Any) -> None:
        """Settings of all hosts, in fleet.yaml."""
        path = self.copy / "fleet.yaml"
        text = path.read_text()
        path.write_text(text.replace("settings: {}", f"settings: {json.dumps(settings)}"))

    def services(self) -> dict[str, Any]:
        script = (f"{BASE}/bin/services.py", "--base", BASE, "--user", "kvhost", "--json", "status")
        lines = self.pod.root("python3", *script, ok=False).splitlines()
        return dict(json.loads(lines[-1])["services"]) if lines else {}

    def well(self) -> bool:
        rows = self.services().values()
        return bool(rows) and all(row["state"] == "RUNNING" and row["alive"] for row in rows)

    def ask(self, seed: int) -> dict[str, Any]:
        """A prompt of 2,100 tokens: what tests/engine_client.py tells of its answer."""
        words = ("/usr/bin/python3", str(CLIENT), "8000", str(seed), "2100")
        done = self.pod.in_network("env", f"KVHOST_API_KEY={KEY}", *words, timeout=300)
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    def chunks(self) -> int:
        """Whole files of the cache."""
        names = [path.name for path in self.volume.glob("kvhost/tier/ns-*/*")]
        return sum(".tmp" not in name and name[0] != "." for name in names)


@pytest.fixture
def site(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Site]:
    engine = getattr(request, "param", None)
    volume = tmp_path / "tree" / VOLUME.lstrip("/")
    copy = tmp_path / "copy"
    copy.mkdir()
    working_copy.make(copy)
    binds = {}
    if engine:
        binds = engine_binds(BASE)
        for place in binds:  # on the volume, which is bound in first
            (tmp_path / "tree" / place.lstrip("/")).mkdir(parents=True)
        (volume / "kvhost/state").mkdir()
        (volume / "kvhost/state/run.lock.guard").touch()  # the mark of the run that built it
    else:
        plant(tmp_path / "tree", BASE)
    with Lab(kind=Pod) as lab:
        yield Site(lab, pod(lab, "pod", volume, binds), copy, volume)
    shutil.rmtree(volume)


def test_a_pod_comes_back_from_its_volume(site: Site) -> None:
    added = site.add()
    assert added.returncode == 0, added.stdout
    assert "no systemd (PID 1 is sshd)" in added.stdout
    entry = (site.copy / "fleet.yaml").read_text()
    assert "role: pod\n    volume: /workspace" in entry, added.stdout

    refused = site.kvhost("plan", "--json", "--data", "tier_dir=/srv/tier")
    assert refused.returncode == 1
    assert '"code": "off_the_volume"' in refused.stdout, refused.stdout

    site.set(verify="never", **SMALL)
    # another system account of this disk takes the uid that would be next
    site.pod.root("useradd", "--system", "other")
    done = site.kvhost("up")
    assert done.returncode == 0, done.stdout[-6000:]
    assert site.well()
    uid = site.pod.root("id", "-u", "kvhost").strip()
    (namespace,) = (site.volume / "kvhost/tier").glob("ns-*")
    assert str(namespace.stat().st_uid) == uid

    site.pod.throw_away()
    site.pod.start_again()
    assert "kvhost:" not in site.pod.read("/etc/passwd")
    other = site.kvhost("plan")
    assert other.returncode == 1
    assert "kvhost inventory new-key p1" in other.stdout
    assert site.kvhost("inventory", "new-key", "p1").returncode == 0
    done = site.kvhost("up")
    assert done.returncode == 0, done.stdout[-6000:]
    assert site.well()
    assert site.pod.root("id", "-u", "kvhost").strip() == uid, "the cache is another user's now"

    # the same by the start hook, with nobody to run a command
    site.pod.throw_away()
    site.pod.start_again()
    told = json.loads(site.pod.root(*HOOK, timeout=120).splitlines()[-1])
    assert told["user"] == "made"
    assert told["services"] == "running"
    assert site.well()
    pids = {name: row["pid"] for name, row in site.services().items()}
    assert json.loads(site.pod.root(*HOOK).splitlines()[-1])["user"] == "there"
    assert site.kvhost("inventory", "new-key", "p1").returncode == 0
    done = site.kvhost("up", "--json", split=True)
    assert done.returncode == 0, done.stderr[-6000:]
    told = json.loads(done.stdout)  # and nothing else
    assert (told["exit"], told["retry"]) == (0, None)
    assert [(row["host"], row["result"]) for row in told["hosts"]] == [("p1", "unchanged")]
    assert "Starting operation" in done.stderr
    assert {name: row["pid"] for name, row in site.services().items()} == pids


@pytest.mark.full
@pytest.mark.engine
@pytest.mark.parametrize("site", ["engine"], indirect=True)
def test_with_the_engine_a_prompt_of_before_the_stop_comes_from_the_volume(site: Site) -> None:
    assert site.add().returncode == 0
    site.set(**SMALL)
    done = site.kvhost("up", "--data", "verify=never", timeout=600)
    assert done.returncode == 0, done.stdout[-8000:]
    before = site.ask(1)
    assert (before["status"], before["cached"]) == (200, 0), before
    until(lambda: site.chunks() >= 8, 60, "the cache is written")
    # a stop is a power cut: the last minute of what was written is not trusted, and goes
    time.sleep(writeback_seconds() + 5)
    assert site.ask(3)["status"] == 200
    until(lambda: site.chunks() >= 16, 60, "the cache is written")

    site.pod.throw_away()
    site.pod.start_again()
    assert site.kvhost("inventory", "new-key", "p1").returncode == 0
    done = site.kvhost("up", timeout=600)
    assert done.returncode == 0, done.stdout[-8000:]
    assert "p1: persisted PASS" in done.stdout
    after, control = site.ask(1), site.ask(2)
    assert (after["status"], after["text"]) == (200, before["text"]), after
    assert after["cached"] >= 2048, after
    assert (control["status"], control["cached"]) == (200, 0), control
