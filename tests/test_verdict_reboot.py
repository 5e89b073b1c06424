"""The event "reboot" on a host that reboots: a container with systemd, the doubles as its services.

The container shares this machine's kernel, so that the boot's id stays and the first process tells.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from kvhost.verdict.evidence import Evidence, parse_events
from kvhost.verdict.judge import judge
from tests.lab.nspawn import Host, Lab, run, until

REPO = Path(__file__).resolve().parents[1]
STATE = "/srv/kvhost"
PORTS = {"cache": 8085, "runner": 8000}
pytestmark = [
    pytest.mark.verdict,
    pytest.mark.systemd,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: namespaces, mounts, containers"),
]

UNIT = """[Unit]
Description=double of the {name}
[Service]
ExecStart=/usr/bin/python3 /opt/onhost/launch.py {state}/etc/{name}.json
[Install]
WantedBy=multi-user.target
"""


DEPLOY = """
import types
from pyinfra.api import FunctionCommand, operation
from deploys.common.reboot import identity, reboot

run = types.SimpleNamespace(host="one", settings=types.SimpleNamespace(ready_timeout_s=90))

def go(state, host):
    before = identity(host)
    return reboot(host, run) and identity(host) not in (None, before)

@operation()
def one():
    yield FunctionCommand(go, (), {})

one(name="reboot")
"""


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    binds = {"/opt/onhost": str(REPO / "kvhost/onhost"), "/opt/tests": str(REPO / "tests")}
    with Lab() as lab:
        one = lab.host("reboots", binds_ro=binds)
        one.root("mkdir", "-p", *(f"{STATE}/{name}" for name in ("etc", "run", "kv", "state")))
        for name, port in PORTS.items():
            engine = "/opt/tests/doubles/engine_double.py"
            argv = ["/usr/bin/python3", engine, name, str(port), STATE, str(PORTS["cache"])]
            spec = {"service": name, "argv": argv, "env": {"PATH": "/usr/bin:/bin"}}
            spec["record"] = f"{STATE}/run/{name}.json"
            one.write(f"{STATE}/etc/{name}.json", json.dumps(spec))
            one.write(f"/etc/systemd/system/{name}.service", UNIT.format(name=name, state=STATE))
        one.write(f"{STATE}/etc/config.json", json.dumps(config()))
        one.root("systemctl", "daemon-reload")
        one.root("systemctl", "enable", "--now", *PORTS)
        for port in PORTS.values():
            until(partial(answers, one, port), 60, f"port {port} answers")
        yield one


def answers(host: Host, port: int) -> bool:
    return host.in_network("curl", "-sf", f"http://127.0.0.1:{port}/health").returncode == 0


def config(ready_s: int = 60) -> dict[str, object]:
    api, cache = (f"http://127.0.0.1:{PORTS[name]}" for name in ("runner", "cache"))
    return {
        "api_base": api,
        "metrics_url": f"{api}/metrics",
        "cache_http": cache,
        "model": "tiny",
        "namespace_dir": f"{STATE}/kv",
        "own_requests": f"{STATE}/state/own-requests.json",
        "services": {
            name: {"record": f"{STATE}/run/{name}.json", "restart": ["systemctl", "restart", name]}
            for name in PORTS
        },
        "events": ["both", "reboot"],
        "prompt_tokens": 2056,
        "chunk_size": 256,
        "vocab": [100, 4000],
        "timeouts": {"stable_s": 0.1, "settle_s": 1, "ready_s": ready_s},
    }


def collect(host: Host) -> int:
    script = "/usr/bin/python3 /opt/onhost/evidence.py"
    words = f"{script} --config {STATE}/etc/config.json --out {STATE}/state/out.json"
    return run(host.root_argv(*shlex.split(words)), 120).returncode


def judged(host: Host) -> list[Evidence]:
    return parse_events(host.read(f"{STATE}/state/out.json"))


def test_the_test_goes_on_after_a_reboot(host: Host) -> None:
    assert collect(host) == 4
    assert host.root("stat", "-c", "%a", f"{STATE}/state/verify-journal.json").strip() == "600"
    host.reboot()
    assert collect(host) == 0
    events = judged(host)
    verdicts = [judge(one) for one in events]
    unmet = [(c.id, c.figure, c.threshold) for c in verdicts[-1].conditions if c.met is not True]
    steps = [(s.name, s.error) for s in events[-1].steps if s.error]
    assert [v.event for v in verdicts] == ["both", "reboot"]
    assert [v.persisted for v in verdicts] == ["PASS", "PASS"], (unmet, steps)
    resumed = events[-1].resumed
    assert resumed is not None and resumed.pid1_ticks != resumed.pid1_ticks_after
    assert host.root("ls", f"{STATE}/kv").split() == []


def test_kv_that_did_not_survive_the_reboot_fails(host: Host) -> None:
    assert collect(host) == 4
    host.root("sh", "-c", f"rm {STATE}/kv/*.data")  # as a memory file system would
    host.reboot()
    assert collect(host) == 0
    verdict = judge(judged(host)[-1])
    assert (verdict.persisted, verdict.causes[0].slug) == ("FAIL", "evicted")


def test_services_that_do_not_come_back_by_themselves_are_told(host: Host) -> None:
    host.write(f"{STATE}/etc/config.json", json.dumps({**config(ready_s=15), "events": ["reboot"]}))
    assert collect(host) == 4
    host.root("systemctl", "disable", "runner")
    host.reboot()
    assert collect(host) == 0
    verdict = judge(judged(host)[-1])
    assert (verdict.persisted, verdict.causes[0].slug) == ("INCONCLUSIVE", "service-not-ready")


def test_pyinfra_reboots_a_host_and_reaches_it_again(host: Host, tmp_path: Path) -> None:
    data = {
        "ssh_hostname": host.address,
        "ssh_user": "deploy",
        "ssh_key": str(host.lab.key),
        "ssh_known_hosts_file": str(host.lab.known_hosts),
        "_sudo": True,
    }
    (tmp_path / "inventory.py").write_text(f"hosts = [('one', {data!r})]\n")
    (tmp_path / "deploy.py").write_text(DEPLOY)
    boots = host.boots
    pyinfra = str(Path(sys.executable).with_name("pyinfra"))
    files = [str(tmp_path / name) for name in ("inventory.py", "deploy.py")]
    words = host.lab.argv("env", f"PYTHONPATH={REPO}", pyinfra, *files, "-y")
    done = run(words, 180)
    assert done.returncode == 0, done.stdout + done.stderr
    assert host.boots == boots + 1
