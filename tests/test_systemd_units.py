"""kvhost's units under a real systemd, doubles in the place of the engine: one host, its life."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvhost.schema.runners import MoreRunner
from kvhost.services.served import api_key_path
from kvhost.services.service import unit_file
from kvhost.services.units import TRIES
from kvhost.settings import Settings
from tests.e2e_tools import Done, make_site
from tests.lab.nspawn import Host, Lab, until
from tests.lab.nspawn_engine import engine_binds
from tests.systemd_tools import KEY, ORDER, Units

pytestmark = [
    pytest.mark.systemd,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: namespaces, mounts, containers"),
]
PLACE = "/etc/systemd/system"
#: of `systemd-analyze security`; without hardening it is 9.0
MOST_EXPOSED = 2.6


@pytest.fixture(scope="module")
def units() -> Iterator[Units]:
    with Lab() as lab:
        made = Units(lab.host("units"))
        made.make()
        made.call("ensure")
        yield made


@pytest.fixture
def host(units: Units) -> Iterator[Host]:
    """The host with all services well, before and after."""
    if not units.good():
        units.call("ensure")
    yield units.host
    units.host.root("rm", "-f", *(f"{units.paths.home}/{name}.do" for name in ORDER))
    units.render()
    units.call("ensure")
    assert units.good()


def test_all_run_and_are_enabled(units: Units, host: Host) -> None:
    assert units.good()
    assert units.status()["manager"] == "systemd"
    assert {units.show(name, "UnitFileState") for name in ORDER} == {"enabled"}
    assert host.root("systemctl", "--failed", "--no-legend") == ""


def test_again_nothing_is_touched(units: Units, host: Host) -> None:
    pids, log = units.pids(), host.root("journalctl", "-u", "init.scope", "-o", "cat")
    said = units.call("ensure")
    assert said == "exit 0\n"
    assert units.pids() == pids
    assert host.root("journalctl", "-u", "init.scope", "-o", "cat") == log  # no daemon-reload


def test_a_further_runner_comes_and_goes_and_the_others_keep_their_processes(
    units: Units, host: Host
) -> None:
    before, plain = units.pids(), units.settings
    more = [MoreRunner(name="second", api_port=8001)]
    units.settings = Settings(heartbeat_s=1, ready_timeout_s=20, more_runners=more)
    try:
        units.render()
        units.call("ensure")
        assert units.good()
        assert list(units.rows()) == ["cache", "runner", "runner-second", "pruner"]
        assert units.show("runner-second", "UnitFileState") == "enabled"
        pid = units.pids()["runner-second"]
    finally:
        units.settings = plain
        for name in ("runner-second.json", unit_file("runner-second")):
            host.root("rm", "-f", f"{units.paths.etc}/{name}")
    assert units.status()["supervisor_fresh"] is False  # its unit is there still
    assert "taking kvhost-runner-second.service away" in units.call("ensure")
    assert units.good()
    assert units.pids() == before
    assert units.show("runner-second", "LoadState") == "not-found"
    assert host.root("sh", "-c", f"test -e /proc/{pid} || echo gone").strip() == "gone"
    assert host.root("find", "/etc/systemd", "-name", "*second*") == ""


def test_systemd_finds_nothing_wrong_and_little_exposed(units: Units, host: Host) -> None:
    paths = [f"{PLACE}/{unit_file(name)}" for name in ORDER]
    said = host.root("sh", "-c", '"$@" 2>&1', "-", "systemd-analyze", "verify", *paths, ok=False)
    assert "kvhost-" not in said
    table = host.root("systemd-analyze", "security", "--no-pager", ok=False)
    scores = dict(re.findall(r"kvhost-(\w+)\.service +(\d+\.\d)", table))
    print("exposure:", scores)
    assert set(scores) == set(ORDER)
    assert max(map(float, scores.values())) <= MOST_EXPOSED


def test_what_a_service_can_do(units: Units, host: Host) -> None:
    host.root("sh", "-c", "touch /tmp/of-others; echo secret > /home/deploy/private")
    units.call("restart")
    for role in ORDER:
        saw = units.saw(role)
        assert saw["writes"] == ["/tmp", "/dev/shm", units.paths.home], role
        assert saw["reads"] == [], role
        assert saw["tmp"] == [], role
        assert saw["limits"] == ["0000000000000000", "1"], role  # CapBnd, NoNewPrivs
        assert saw["sudo"] is False, role
        assert units.show(role, "LimitMEMLOCK") == "infinity"
    assert host.root("sh", "-c", f"cat /proc/{units.pids()['runner']}/oom_score_adj") == "300\n"


def test_the_key_is_handed_over_and_shown_nowhere(units: Units, host: Host) -> None:
    answers = host.root("curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", "-d", "{}",
                        "-H", f"Authorization: Bearer {KEY}", "http://127.0.0.1:8000/")  # fmt: skip
    assert answers == "200"
    assert host.root("stat", "-c", "%U %a", api_key_path(units.paths)).strip() == "root 600"
    for argv in (
        ("ps", "axww", "-o", "args"),
        ("journalctl", "--no-pager"),
        ("sh", "-c", f"cat {PLACE}/kvhost-*"),
        ("systemctl", "show", *map(unit_file, ORDER)),
        ("sh", "-c", f"cat {units.base}/log/* {units.base}/etc/*"),
    ):
        assert KEY not in host.root(*argv), argv


def reaches(host: Host, port: int) -> bool:
    """Whether a connection to a port of loopback is made, as the user deploy."""
    script = f"import socket; socket.create_connection(('127.0.0.1', {port}), 3)"
    return host.ssh("python3", "-c", script).returncode == 0


def test_other_users_reach_the_api_and_not_the_cache_server(units: Units, host: Host) -> None:
    ports = (units.settings.cache_port, units.settings.cache_http_port)
    assert [reaches(host, port) for port in ports] == [False, False]
    assert reaches(host, units.settings.api_port)
    assert units.good()  # root and the runner do
    # a firewall that takes all rules away is made good by the next start of the cache server
    host.root("nft", "flush", "ruleset")
    assert reaches(host, ports[0])
    units.call("restart", "cache")
    assert not reaches(host, ports[0])


def test_without_nft_it_starts_and_says_that_the_ports_are_open(units: Units, host: Host) -> None:
    host.root("nft", "flush", "ruleset")
    host.root("mv", "/usr/sbin/nft", "/usr/sbin/nft.away")
    units.call("restart", "cache")
    assert reaches(host, units.settings.cache_port)
    journal = host.root("journalctl", "-u", unit_file("cache"), "-n", "20", "-o", "cat")
    assert "PORTS 5555,8085 ARE OPEN TO ALL USERS" in journal
    host.root("mv", "/usr/sbin/nft.away", "/usr/sbin/nft")
    units.call("restart", "cache")


def test_the_output_is_in_the_journal_and_in_the_file(units: Units, host: Host) -> None:
    journal = host.root("journalctl", "-u", unit_file("cache"), "-o", "cat")
    assert "double of cache starts" in journal
    assert "double of cache starts" in host.read(f"{units.paths.log}/cache.log")


def test_a_reboot_brings_all_back_unattended(units: Units, host: Host) -> None:
    host.reboot()
    until(units.good, 60, "the services come back")
    record = host.read(f"{units.paths.run}/runner.json")
    assert '"clean_stop_before": true' in record


def test_a_power_cut_brings_all_back_unattended(units: Units, host: Host) -> None:
    host.power_cut()
    host.boot()
    until(units.good, 60, "the services come back")
    assert '"clean_stop_before": null' not in host.read(f"{units.paths.run}/runner.json")


@pytest.mark.parametrize("who", ["pid", "launcher_pid"])
@pytest.mark.parametrize("name", ["cache", "runner", "pruner"])
def test_killed_it_comes_back_and_the_others_stay(
    units: Units, host: Host, name: str, who: str
) -> None:
    before = units.pids()
    units.kill(name, who)
    until(lambda: units.good() and units.pids()[name] != before[name], 30, f"{name} comes back")
    after = units.pids()
    assert {n for n in ORDER if after[n] != before[n]} == {name}


def test_the_cache_server_stays_away_for_two_heartbeats(units: Units, host: Host) -> None:
    before, began = units.pids(), time.monotonic()
    units.call("restart", "cache")
    assert time.monotonic() - began > 2 * units.settings.heartbeat_s
    assert units.pids()["runner"] == before["runner"]


def test_both_stopped_by_hand_the_runner_wants_the_cache(units: Units, host: Host) -> None:
    units.call("stop")
    assert {row["state"] for row in units.rows().values()} == {"STOPPED"}
    host.root("systemctl", "start", unit_file("runner"))
    rows = units.rows()
    assert (rows["cache"]["state"], rows["runner"]["state"]) == ("RUNNING", "RUNNING")


def test_running_means_answered(units: Units, host: Host) -> None:
    units.tell("runner", "slow")
    began = time.monotonic()
    host.root("systemctl", "restart", unit_file("runner"))
    assert time.monotonic() - began > 5  # the double answers a request after 5 s


@pytest.mark.full  # 50 s of pauses
def test_a_service_that_keeps_failing_is_given_up_with_its_reason(units: Units, host: Host) -> None:
    units.tell("runner", "die")
    said = units.call("restart", "runner", code=1)
    assert "told to die" in said
    assert "ended by itself with 3" in said
    until(lambda: units.rows()["runner"]["state"] == "FATAL", 120, "the limit of restarts")
    row = units.rows()["runner"]
    assert "ended by itself with 3" in row["failed"]
    journal = host.root("journalctl", "-b", "-u", unit_file("runner"), "-o", "cat")
    assert journal.splitlines().count("told to die") == TRIES
    # the others were left alone, and a start by hand is not held back by the limit
    assert units.rows()["cache"]["state"] == "RUNNING"
    units.tell("runner", "")
    units.call("start", "runner")


def test_an_unusable_description_is_not_tried_again(units: Units, host: Host) -> None:
    spec = f"{units.paths.etc}/pruner.json"
    host.write(spec, "{}")
    said = units.call("restart", "pruner", code=1)
    assert "unusable" in said
    until(lambda: units.rows()["pruner"]["state"] == "FATAL", 10, "it is given up")
    assert units.show("pruner", "NRestarts") == "0"


def test_a_tier_that_is_not_there_is_named_and_comes_back(units: Units, host: Host) -> None:
    tier, pids = units.paths.tier_dir, units.pids()
    host.root("sh", "-c", f"mv {tier} {tier}.away && mkdir {tier} && chown kvhost: {tier}")
    said = units.call("restart", "cache", code=1)
    assert ".kvhost-tier" in said
    assert "mounted" in said
    assert host.root("ls", "-A", tier) == ""  # nothing was written to the disk below
    assert units.pids()["runner"] == pids["runner"]
    host.root("sh", "-c", f"rmdir {tier} && mv {tier}.away {tier}")
    until(lambda: units.rows()["cache"]["state"] == "RUNNING", 60, "it comes back by itself")


def test_a_unit_that_systemd_does_not_understand_is_not_installed(units: Units, host: Host) -> None:
    before, installed = units.pids(), host.read(f"{PLACE}/{unit_file('cache')}")
    units.render(cache="[Service]\nMemoryMaxx=1G\n")
    said = units.call("ensure", code=1)
    assert "MemoryMaxx" in said
    assert host.read(f"{PLACE}/{unit_file('cache')}") == installed
    assert units.pids() == before
    assert {row["state"] for row in units.rows().values()} == {"RUNNING"}


def test_a_changed_unit_restarts_its_service_alone(units: Units, host: Host) -> None:
    before = units.pids()
    units.render(pruner="[Service]\nNice=5\n")
    assert not units.good()
    units.call("ensure")
    after = units.pids()
    assert {n for n in ORDER if after[n] != before[n]} == {"pruner"}
    assert host.root("ps", "-o", "ni=", "-p", str(after["pruner"])).strip() == "5"


def test_a_drop_in_of_the_users_is_respected(units: Units, host: Host) -> None:
    folder = f"{PLACE}/{unit_file('pruner')}.d"
    host.root("mkdir", "-p", folder)
    host.write(f"{folder}/mine.conf", "[Service]\nNice=7\n")
    host.root("systemctl", "daemon-reload")  # as `systemctl edit` does
    units.call("ensure")
    units.call("restart", "pruner")
    assert units.good()
    assert host.root("ps", "-o", "ni=", "-p", str(units.pids()["pruner"])).strip() == "7"
    assert "Nice=7" in host.read(f"{folder}/mine.conf")
    host.root("rm", "-r", folder)


@pytest.mark.parametrize("foreign", ["[Service]\nExecStart=/bin/true\n", None])
def test_a_unit_of_somebody_elses_is_left_as_it_is(
    units: Units, host: Host, foreign: str | None
) -> None:
    path, before = f"{PLACE}/{unit_file('runner')}", units.pids()
    host.root("mv", path, "/root/saved.service")
    if foreign is None:
        host.root("ln", "-s", "/dev/null", path)  # masked
    else:
        host.write(path, foreign)
    host.root("systemctl", "daemon-reload")
    said = units.call("ensure", code=1)
    assert path in said
    assert "not" in said
    if foreign is not None:
        assert host.read(path) == foreign
    assert units.pids() == before
    host.root("rm", path)
    host.root("mv", "/root/saved.service", path)
    host.root("systemctl", "daemon-reload")


def test_a_stop_under_load_ends_within_its_time(units: Units, host: Host) -> None:
    units.tell("runner", "deaf")
    began = time.monotonic()
    units.call("stop", "runner")
    assert time.monotonic() - began < 75


def test_an_installation_under_supervisord_moves_over(units: Units) -> None:
    host = units.host.lab.host("moves", binds_ro=engine_binds())
    moved = Units(host, with_key=False)
    moved.make()
    conf, run_dir = f"{moved.paths.etc}/supervisord.conf", moved.paths.run
    launch = f"{moved.base}/tools/current/bin/python {moved.base}/bin/launch.py"
    programs = "".join(
        f"[program:{name}]\ncommand={launch} {moved.paths.etc}/{name}.json\nstopwaitsecs=20\n"
        for name in ORDER
    )
    host.write(
        conf,
        f"[unix_http_server]\nfile={run_dir}/supervisor.sock\nchmod=0700\n"
        f"[supervisord]\nlogfile={moved.paths.log}/supervisord.log\n"
        f"pidfile={run_dir}/supervisord.pid\nminfds=256\n"
        "[rpcinterface:supervisor]\n"
        "supervisor.rpcinterface_factory = supervisor.rpcinterface:make_main_rpcinterface\n"
        f"{programs}",
    )
    as_user = ("setpriv", "--reuid=kvhost", "--regid=kvhost", "--clear-groups")
    host.root(*as_user, f"{moved.base}/tools/current/bin/supervisord", "-c", conf)
    until(lambda: host.root("sh", "-c", f"ls {run_dir}/*.json | wc -l").strip() == "3", 30, "three")
    before = {name: host.read(f"{run_dir}/{name}.json") for name in ORDER}
    said = moved.call("ensure")
    assert "move from supervisord to systemd" in said
    assert moved.good()
    assert all(host.read(f"{run_dir}/{name}.json") != before[name] for name in ORDER)
    assert "supervisord" not in host.root("ps", "axww", "-o", "args")
    assert host.root("sh", "-c", f"ls {conf} || true") == ""
    assert moved.call("ensure") == "exit 0\n"
    host.stop()


def test_uninstall_takes_away_its_own_and_leaves_drop_ins(units: Units, host: Host) -> None:
    folder = f"{PLACE}/{unit_file('cache')}.d"
    host.root("mkdir", "-p", folder)
    host.write(f"{folder}/mine.conf", "[Service]\nNice=1\n")
    units.call("uninstall")
    assert host.root("sh", "-c", f"ls {PLACE} | grep kvhost").split() == [f"{unit_file('cache')}.d"]
    assert host.root("systemctl", "list-units", "--all", "--no-legend", "kvhost-*") == ""
    assert host.root("sh", "-c", "pgrep -u kvhost || true") == ""
    assert "kvhost" not in host.root("nft", "list", "ruleset")
    host.root("rm", "-r", folder)


def test_remove_over_ssh_takes_units_and_files_and_leaves_the_cache(
    units: Units, tmp_path: Path
) -> None:
    """`pyinfra remove.py` as a user with sudo; the last test: nothing of kvhost is left."""
    host, base = units.host, units.base
    assert units.good()
    host.write(f"{units.namespace}/chunk.data", "of somebody's prompt")
    receipt = {"files": {f"{PLACE}/{unit_file(name)}": "" for name in ORDER}}
    host.write(f"{base}/state/receipt.json", json.dumps(receipt))
    host.write(f"{base}/state/run.lock.guard", "")
    copy, inventory = make_site(tmp_path / "controller"), host.lab.inventory(tmp_path / "hosts.py")
    pyinfra = str(Path(sys.executable).with_name("pyinfra"))
    # other tests of this file made hosts too, which are off by now
    argv = host.lab.argv(pyinfra, str(inventory), "remove.py", "--limit", host.name, "-y")
    for changes in (True, False):
        done = subprocess.run(
            argv, cwd=copy.repo, env=copy.own_env, text=True, check=False,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-4000:]
        assert bool(Done(0, done.stdout).changed()) == changes
    assert host.root("find", PLACE, "-name", "kvhost*") == ""  # nor what enabled them
    assert host.root("systemctl", "list-units", "--all", "--no-legend", "kvhost-*") == ""
    assert "kvhost" not in host.root("nft", "list", "ruleset")
    assert host.root("sh", "-c", "pgrep -u kvhost || true") == ""
    assert host.root("ls", base).split() == ["state", "tier"]
    assert host.read(f"{units.namespace}/chunk.data") == "of somebody's prompt"
