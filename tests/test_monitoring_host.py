"""Monitoring on the real thing: a running engine's pages, a host with systemd."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from kvhost.onhost import metrics
from kvhost.services import monitoring
from kvhost.settings import Settings
from tests.e2e_tools import Done, make_site
from tests.engine_pair import Pair
from tests.fleet_tools import REPO, Fleet
from tests.lab.nspawn import Lab, until
from tests.lab.vm import Lab as VmLab
from tests.test_monitoring import metrics_of

pytestmark = pytest.mark.full
ONHOST = REPO / "kvhost/onhost"
TOP = Path(os.environ.get("KVHOST_FLEET_BASE", "/var/lib/kvhost-fleet")) / "monitoring"


@pytest.mark.engine
def test_a_running_engine_exports_every_series(engine: Path, tmp_path: Path) -> None:
    """The collector beside the real cache server and runner, after a prompt that came from L2."""
    base = Path(os.environ.get("KVHOST_E2E_BASE", "/var/lib/kvhost-e2e")) / "metrics"
    shutil.rmtree(base, ignore_errors=True)
    base.mkdir(parents=True)
    pair = Pair(base, engine)
    pair.make()
    api, cache = (f"http://127.0.0.1:{pair.ports[n]}" for n in (0, 2))
    try:
        for turn in (1, 2):  # the second time the prompt lies in L2, another is stored
            pair.start()
            wait_for(f"{api}/health")
            ask(api, 1)
            ask(api, turn)
            time.sleep(4)
            words = [sys.executable, metrics.__file__, "--base", base, "--tier", base / "tier",
                     "--out", tmp_path, "--cache", cache, "--runner", f"runner={api}"]  # fmt: skip
            subprocess.run([str(word) for word in words], check=True)
            pair.stop()
    finally:
        pair.stop()
    text = (tmp_path / metrics.FILE).read_text()
    shutil.rmtree(base)
    exported = set(re.findall(r"(?m)^# TYPE (\S+)", text))
    assert {*metrics.VLLM, *metrics.LMCACHE} - exported == set()
    found = dict(metrics_of(text))
    assert found['kvhost_service_up{service="runner"}'] == 1
    assert found["lmcache_mp_lookup_hit_l2_tokens_total"] >= 1024


class Managed:
    """One host with systemd, provisioned as far as monitoring needs it; over SSH, with sudo."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab, self.host = lab, lab.host("monitored")
        self.copy = make_site(folder / "controller")
        self.inventory = lab.inventory(folder / "hosts.py")

    def pyinfra(self, deploy: str, **data: str) -> Done:
        given = [word for key, value in data.items() for word in ("--data", f"{key}={value}")]
        program = str(Path(sys.executable).with_name("pyinfra"))
        argv = self.lab.argv(program, str(self.inventory), deploy, "-y", *given)
        done = subprocess.run(
            argv, cwd=self.copy.repo, text=True, timeout=240, check=False,
            env=self.copy.own_env, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        return Done(done.returncode, done.stdout)

    def stage(self, wanted: str, **data: str) -> Done:
        done = self.pyinfra("tests/doubles/monitoring_only.py", monitoring=wanted, **data)
        assert done.code == 0, done.text[-4000:]
        return done

    def figures(self) -> str:
        return self.host.root("cat", FIGURES, ok=False)


UNIT_PLACE = f"/etc/systemd/system/{monitoring.UNIT}"
FIGURES = f"/var/lib/prometheus/node-exporter/{metrics.FILE}"
WANTED, UNWANTED = "monitoring: figures for Prometheus", "monitoring: not wanted"


@pytest.mark.systemd
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: namespaces, mounts, containers")
def test_on_a_host_with_systemd(tmp_path: Path) -> None:
    with Lab() as lab:
        site = Managed(lab, tmp_path)
        host = site.host
        assert UNWANTED not in site.stage("false").changed()
        assert WANTED in site.stage("true").changed()
        until(lambda: "kvhost_service_up" in site.figures(), 60, "the figures are written")
        assert host.root("stat", "-c", "%U %a", FIGURES).split() == ["root", "644"]
        assert 'kvhost_source_readable{source="pruner"} 0.0' in site.figures()
        # what the service's user has in its closed directory is read, the sandbox notwithstanding
        status = {"usage_bytes": 5, "files": 1, "limit_bytes": 9, "free_bytes": 7, "interval": 5.0,
                  "free_floor_bytes": 1, "time_unix": 8, "state": "ok", "removed": {}}  # fmt: skip
        path = "/var/lib/kvhost/log/pruner-status.json"
        host.write(path, json.dumps(status))
        host.root("chown", "kvhost:", path)
        until(lambda: "kvhost_tier_bytes 5.0" in site.figures(), 60, "the tier is told")
        said = host.root("systemd-analyze", "verify", "--man=no", UNIT_PLACE)
        assert monitoring.UNIT not in said
        # again nothing is touched
        pid = host.root("systemctl", "show", "-P", "MainPID", monitoring.UNIT)
        assert WANTED not in site.stage("true").changed()
        assert host.root("systemctl", "show", "-P", "MainPID", monitoring.UNIT) == pid
        # it comes back, by itself and by the next run
        host.root("systemctl", "disable", "-q", "--now", monitoring.UNIT)
        assert WANTED in site.stage("true").changed()
        # taken away with its file, by the setting and by the removal
        assert UNWANTED in site.stage("false").changed()
        there = f"test -e {UNIT_PLACE} || test -e {FIGURES}; echo $?"
        assert host.root("sh", "-c", there).strip() == "1"
        assert UNWANTED not in site.stage("false").changed()
        site.stage("true")
        until(lambda: "kvhost_service_up" in site.figures(), 60, "the figures are written")
        done = site.pyinfra("remove.py")
        assert done.code == 0, done.text[-4000:]
        assert host.root("sh", "-c", there).strip() == "1"
        assert "kvhost-metrics" not in host.root("systemctl", "list-units", "--all", "kvhost*")
        # another's unit is left, and the host refused
        host.write(UNIT_PLACE, "[Service]\nExecStart=/bin/true\n")
        done = site.pyinfra("tests/doubles/monitoring_only.py", monitoring="true")
        assert done.code != 0
        assert "is not this installation's unit" in " ".join(done.text.split())
        assert host.read(UNIT_PLACE).startswith("[Service]")


def with_siblings(name: str) -> list[str]:
    """A script of onhost, and those that it imports from beside it."""
    names = [name]
    for one in names:
        words = re.findall(r"(?m)^ +(?:from|import) (\w+)", (ONHOST / one).read_text())
        more = [f"{word}.py" for word in words if (ONHOST / f"{word}.py").exists()]
        names += [found for found in dict.fromkeys(more) if found not in names]
    return names


@pytest.mark.skipif(os.geteuid() != 0, reason="the image of the test host is made as root")
def test_the_health_of_an_nvme_drive_is_read_from_within_the_sandbox() -> None:
    """The real unit on a virtual machine; the drive is QEMU's."""
    with VmLab() as lab:
        machine = lab.host("watched", drives=("TIER",))
        name = machine.names()["TIER"]
        settings = Settings(monitoring=True, tier_dir="/srv/fast/tier")
        folder = settings.monitoring_textfile_dir
        machine.ssh(
            f"mkdir -p /srv/fast {settings.paths.bin} {folder} && mkfs.xfs -q /dev/{name} && "
            f"mount /dev/{name} /srv/fast && mkdir {settings.tier_dir}"
        )
        for script in with_siblings("metrics.py"):
            text = (ONHOST / script).read_text()
            machine.put(text, f"{settings.paths.bin}/{script}", "0755")
        unit = monitoring.unit_text(settings, settings.paths, "x")
        machine.put(unit, UNIT_PLACE, "0644")
        machine.ssh(f"systemctl daemon-reload && systemctl start {monitoring.UNIT}")

        def figures() -> str:
            return machine.ssh(f"cat {FIGURES} || true").stdout

        until(lambda: "kvhost_metrics_last_run" in figures(), 90, "the figures are written")
        found = dict(metrics_of(figures()))
        print(figures(), machine.ssh(f"journalctl -o cat -u {monitoring.UNIT}").stdout)
        assert found['kvhost_source_readable{source="drive"}'] == 1
        assert found[f'kvhost_drive_wear_percent{{device="{name}"}}'] == 0
        assert 0 < found[f'kvhost_drive_temperature_celsius{{device="{name}"}}'] < 80
        assert found[f'kvhost_drive_written_bytes_total{{device="{name}"}}'] > 0


def test_the_whole_deploy_under_supervisord(tmp_path: Path) -> None:
    """The real deploy and supervisord; the engine is a double, which has no pages."""
    shutil.rmtree(TOP, ignore_errors=True)
    fleet, folder = Fleet(tmp_path), TOP / "text"
    base = fleet.add_here("a", TOP, monitoring=True, monitoring_textfile_dir=str(folder))
    host, path = fleet.hosts["@local/a"], folder / metrics.FILE
    try:
        ran = fleet.run("up")
        assert ran.code == 0, ran.text[-4000:]

        def figures() -> dict[str, float]:
            return dict(metrics_of(path.read_text())) if path.exists() else {}

        told = "kvhost_tier_limit_bytes"  # once the pruner has made a pass
        until(lambda: told in figures(), 3 * monitoring.EVERY_S, "the tier is told")
        assert figures()['kvhost_service_up{service="pruner"}'] == 1
        assert figures()[told] == int(host["cache_limit_gib"] * (1 << 30))
        assert path.owner() == "kvhost"
        words = [sys.executable, "-m", "kvhost.cli", "monitoring", "scrape", "--inventory",
                 str(fleet.inventory)]  # fmt: skip
        said = subprocess.run(
            words, cwd=REPO, env=fleet.env, capture_output=True, text=True, check=True
        ).stdout
        assert json.loads(said) == [{"targets": ["127.0.0.1:9100"], "labels": {"kvhost": "a"}}]
        again = Done(0, fleet.run("up").text)
        assert again.changed() == []
        host["monitoring"] = False
        done = Done(0, fleet.run("up").text)
        assert UNWANTED in done.changed(), done.text[-4000:]
        assert not path.exists()
        assert "metrics" not in (base / "etc/supervisord.conf").read_text()
        assert fleet.well("a")
    finally:
        fleet.remove()
        shutil.rmtree(TOP)


def wait_for(url: str) -> None:
    deadline = time.monotonic() + 240
    while True:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(1)


def ask(api: str, which: int) -> None:
    body = {"model": "kvhost-builtin", "prompt": [20 + which * n * n % 211 for n in range(2056)],
            "max_tokens": 2, "temperature": 0}  # fmt: skip
    request = urllib.request.Request(
        f"{api}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    urllib.request.urlopen(request, timeout=120).close()
