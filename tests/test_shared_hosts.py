"""Two hosts with systemd and the real engine, over SSH, and a store on the first: made by kvhost,
provisioned to PASS, and what one computes is served on the other; no secret; the store away."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.e2e_tools import Done
from tests.fleet_tools import Fleet
from tests.lab.nspawn import USER, Host, Lab
from tests.lab.nspawn_engine import engine_host
from tests.store_tools import PASSWORD, debian_packages

pytestmark = [
    pytest.mark.fleet, pytest.mark.systemd, pytest.mark.engine, pytest.mark.full,
    pytest.mark.skipif(os.geteuid() != 0, reason="containers need root"),
]  # fmt: skip
BASE = "/var/lib/kvhost"
NAMES = ("a", "b")
STORE = "redis-server@kvhost.service"


@dataclass
class TwoHosts:
    hosts: dict[str, Host]
    fleet: Fleet

    def run(self, *words: str, timeout: float = 900) -> Done:
        ran = self.fleet.run(*words, timeout=timeout)
        return Done(ran.code, ran.text)

    def check(self, first: str, second: str) -> tuple[int, dict[str, Any]]:
        words = ("shared", "--check", first, second, "--json")
        process = self.fleet.start(*words, stderr_apart=True)
        out, err = process.communicate(timeout=600)
        assert out.strip(), err[-6000:]
        told: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
        return process.returncode, told

    def answers(self, name: str, prompt: str) -> str:
        code = (
            "import json,sys,urllib.request as u; r=u.Request("
            "'http://127.0.0.1:8000/v1/completions',json.dumps({'model':'kvhost-builtin',"
            "'prompt':sys.argv[1],'max_tokens':4,'temperature':0}).encode(),"
            "{'Content-Type':'application/json','Authorization':'Bearer '+sys.argv[2]});"
            "print(json.loads(u.urlopen(r,timeout=120).read())['choices'][0]['text'])"
        )
        key = self.fleet.env["KVHOST_API_KEY"]
        done = self.hosts[name].in_network("/usr/bin/python3", "-c", code, prompt, key)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoHosts]:
    folder = tmp_path_factory.mktemp("controller")
    secret = folder / "shared"
    secret.write_text(PASSWORD + "\n")
    secret.chmod(0o600)
    with Lab() as lab:
        fleet = Fleet(folder, prefix=tuple(lab.argv()))
        hosts = {name: engine_host(lab, name, boot=False) for name in NAMES}
        shutil.copytree(debian_packages(folder / "debs"), hosts["a"].tree / "srv/debs")
        sources = hosts["a"].tree / "etc/apt/sources.list"
        sources.write_text("deb [trusted=yes] file:/srv/debs ./\n")
        for name, host in hosts.items():
            host.boot(wait=False)
            fleet.hosts[name] = {
                "ssh_hostname": host.address, "ssh_user": USER, "ssh_key": str(lab.key),
                "ssh_known_hosts_file": str(lab.known_hosts),
                "ssh_strict_host_key_checking": "yes", "_sudo": True,
                "shared_tier": f"redis://{hosts['a'].address}:6379",
                "shared_tier_password_file": str(secret), "cache_limit_gib": 1.0,
                "free_floor_gib": 0.05, "verify_prompt_tokens": 2056, "max_model_len": 4096,
            }  # fmt: skip
        fleet.hosts["a"] |= {"shared_store_address": hosts["a"].address,
                             "shared_store_memory_gib": 0.5}  # fmt: skip
        for host in hosts.values():
            host.wait()
        yield TwoHosts(hosts, fleet)


def test_a_store_and_two_hosts_from_nothing_to_pass(two: TwoHosts) -> None:
    ran = two.run("shared")
    assert ran.code == 0, ran.text[-4000:]
    ran = two.run("up")
    assert ran.code == 0, ran.text[-8000:]
    assert ran.text.count("persisted PASS") >= 2
    assert "without the shared tier" not in ran.text


def test_what_either_computed_is_served_on_the_other(two: TwoHosts) -> None:
    for first, second in (("a", "b"), ("b", "a")):
        code, told = two.check(first, second)
        assert (code, told["shared"]) == (0, "PASS"), told
    keys = two.hosts["a"].root("redis-cli", "-h", two.hosts["a"].address, "--no-auth-warning",
                               "-a", PASSWORD, "dbsize")  # fmt: skip
    assert keys.strip() == "0", "the tests leave nothing there"


def test_again_nothing_changes(two: TwoHosts) -> None:
    for words in (("up",), ("shared",)):
        ran = two.run(*words)
        assert ran.code == 0, ran.text[-4000:]
        assert ran.changed() == [], ran.text[-4000:]
    assert two.run("drift").code == 0


def test_the_password_is_nowhere_that_others_can_read(two: TwoHosts) -> None:
    for host in two.hosts.values():
        looked_at = {
            "ps": host.root("ps", "axww", "-o", "args"),
            "units": host.root("sh", "-c", "find /etc/systemd/system -type f -exec cat {} +"),
            "shown": host.root("systemctl", "show", "kvhost-*", "redis-server@kvhost*"),
            "journal": host.root("journalctl", "--no-pager", "-o", "export"),
            "files": host.root("sh", "-c", f"cat {BASE}/log/* {BASE}/etc/* {BASE}/run/*.json "
                                           f"{BASE}/state/*.json"),
        }  # fmt: skip
        for name, text in looked_at.items():
            assert text, name
            assert PASSWORD not in text, name
        hunt = f"find / -xdev -type f -perm /044 -print0 | xargs -0 grep -lsF '{PASSWORD}'"
        assert host.root("sh", "-c", hunt, ok=False) == ""


def test_with_the_store_away_both_answer_and_it_is_said(two: TwoHosts) -> None:
    prompt = "the same words again and again " * 100
    before = {name: two.answers(name, prompt) for name in NAMES}
    two.hosts["a"].root("systemctl", "stop", STORE)
    for name in NAMES:
        assert two.answers(name, prompt) == before[name]
        assert two.answers(name, f"other words for {name} " * 100)
    ran = two.run("plan")
    assert ran.code == 0
    assert ran.text.count("does not answer from here (Connection refused)") == 2, ran.text
    code, told = two.check("a", "b")
    assert (code, told["shared"]) == (2, "INCONCLUSIVE")
    ran = two.run("up")  # a host is provisioned without it
    assert ran.code == 0, ran.text[-4000:]
    two.hosts["a"].root("systemctl", "start", STORE)
