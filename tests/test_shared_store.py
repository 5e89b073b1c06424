"""`kvhost shared` on a host with a real systemd, over SSH, with Debian's own redis-server: made,
kept, drifted, restarted, taken away; what is refused; no secret where others can read it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from kvhost.services.store import CONFIG, ETC, START, USERS
from tests.e2e_tools import Done
from tests.fleet_tools import Fleet
from tests.lab.nspawn import USER, Host, Lab
from tests.store_tools import PASSWORD, debian_packages

pytestmark = [
    pytest.mark.fleet, pytest.mark.systemd,
    pytest.mark.skipif(os.geteuid() != 0, reason="containers need root"),
]  # fmt: skip
UNIT = "redis-server@kvhost.service"


@dataclass
class StoreSite:
    lab: Lab
    host: Host
    fleet: Fleet

    @property
    def data(self) -> dict[str, Any]:
        return self.fleet.hosts["store"]

    def run(self, *words: str) -> Done:
        ran = self.fleet.run("shared", *words)
        return Done(ran.code, ran.text)

    def ask(self, *words: str, password: str | None = PASSWORD) -> str:
        auth = () if password is None else ("--no-auth-warning", "-a", password)
        where = ("redis-cli", "-h", self.host.address, "-p", "6379")
        return self.host.root(*where, *auth, *words, ok=False).strip()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreSite]:
    folder = tmp_path_factory.mktemp("controller")
    secret = folder / "shared"
    secret.write_text(PASSWORD + "\n")
    secret.chmod(0o600)
    with Lab() as lab:
        host = lab.host("store", boot=False)
        shutil.copytree(debian_packages(folder / "debs"), host.tree / "srv/debs")
        (host.tree / "etc/apt/sources.list").write_text("deb [trusted=yes] file:/srv/debs ./\n")
        host.boot()
        fleet = Fleet(folder, prefix=tuple(lab.argv()))
        fleet.hosts["store"] = {
            "ssh_hostname": host.address, "ssh_user": USER, "ssh_key": str(lab.key),
            "ssh_known_hosts_file": str(lab.known_hosts), "ssh_strict_host_key_checking": "yes",
            "_sudo": True, "shared_store_address": host.address, "shared_store_memory_gib": 0.25,
            "shared_tier_password_file": str(secret),
        }  # fmt: skip
        yield StoreSite(lab, host, fleet)


def altered(host: Host) -> list[str]:
    """Files of the distribution's packages that are not as they came; the lab has no pages."""
    rows = host.root("dpkg", "-V", "redis-server", "redis-tools", ok=False).splitlines()
    return [row for row in rows if "missing     /usr/share/" not in row]


def unchanged(ran: Done) -> bool:
    assert ran.code == 0, ran.text[-6000:]
    return ran.changed() == []


def test_what_stands_against_a_store_is_said_and_nothing_is_touched(site: StoreSite) -> None:
    weak = site.fleet.folder / "weak"
    weak.write_text("short\n")
    weak.chmod(0o600)
    change = {
        "shared_store_address": "10.99.99.99", "shared_store_memory_gib": 60_000.0,
        "shared_store_persistence": "rdb", "shared_tier_password_file": str(weak),
    }  # fmt: skip
    before = dict(site.data)
    site.data.update(change)
    ran = site.run()
    site.fleet.hosts["store"] = before
    assert ran.code == 1, ran.text
    for code in ("store_address", "store_memory", "store_disk", "store_password"):
        assert code in ran.text
    assert not site.host.root("sh", "-c", f"ls -d {ETC} /usr/bin/redis-server", ok=False)


def test_made_over_ssh_then_nothing_changes(site: StoreSite) -> None:
    ran = site.run()
    assert ran.code == 0, ran.text[-6000:]
    host = site.host
    assert host.root("systemctl", "is-active", UNIT).strip() == "active"
    assert host.root("systemctl", "is-enabled", UNIT).strip() == "enabled"
    # the distribution's own server, without a password, was never started and will not be
    own = host.root("systemctl", "show", "-p", "ActiveState,UnitFileState,ActiveEnterTimestamp",
                    "redis-server.service")  # fmt: skip
    assert sorted(own.split()) == ["ActiveEnterTimestamp=", "ActiveState=inactive",
                                   "UnitFileState=disabled"]  # fmt: skip
    assert altered(host) == []
    assert site.ask("ping") == "PONG"
    assert "NOAUTH" in site.ask("ping", password=None)
    assert "NOAUTH" in site.ask("ping", password="wrong-" + "x" * 20)
    listens = host.root("sh", "-c", "ss -ltnH | awk '{print $4}' | grep 6379").split()
    assert listens == [f"{host.address}:6379"]
    ran = site.run()
    assert ran.code == 0, ran.text[-6000:]
    assert ran.changed() == [], ran.text[-6000:]


def test_its_one_user_reaches_kvhosts_keys_alone(site: StoreSite) -> None:
    assert site.ask("set", "kvhost:ns-1:a", "x") == "OK"
    for words in (("set", "other", "x"), ("config", "get", "*"), ("flushall",), ("keys", "*"),
                  ("acl", "list"), ("shutdown",), ("eval", "return 1", "0")):  # fmt: skip
        assert "NOPERM" in site.ask(*words), words
    assert "maxmemory_policy:allkeys-lru" in site.ask("info", "memory")
    assert f"maxmemory:{1 << 28}" in site.ask("info", "memory")


def test_no_secret_where_others_can_read_it(site: StoreSite) -> None:
    host = site.host
    modes = host.root("sh", "-c", f"cd {ETC} && stat -c '%n %U %a' *").splitlines()
    assert sorted(modes) == ["start.env root 600", "store.conf root 644", "users.acl redis 600"]
    assert host.root("stat", "-c", "%U %a", "/var/lib/redis/kvhost").strip() == "redis 750"
    hunt = f"grep -rlsF -e '{PASSWORD}' /etc /run /var /tmp /home /usr/local 2>/dev/null"
    assert host.root("sh", "-c", hunt, ok=False) == ""
    everywhere = host.root("sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
    assert PASSWORD not in everywhere
    assert PASSWORD not in host.root("journalctl", "--no-pager", "-q")
    kept = [p for p in site.fleet.folder.rglob("*") if p.is_file() and "debs" not in p.parts]
    assert [p.name for p in kept if PASSWORD.encode() in p.read_bytes()] == ["shared"]


def drift(site: StoreSite) -> tuple[int, list[str]]:
    process = site.fleet.start("drift", "--json", stderr_apart=True)
    out, err = process.communicate(timeout=60)
    told = json.loads(out)["store"]
    assert told["unreadable"] == [], err
    return process.returncode, sorted(f"{row['what']}: {row['found']}" for row in told["rows"])


def test_what_was_changed_behind_its_back_is_mended(site: StoreSite) -> None:
    host = site.host
    assert drift(site) == (0, [])
    pid = host.root("systemctl", "show", "-P", "MainPID", UNIT).strip()
    host.root("sh", "-c", f"sed -i 's/allkeys-lru/noeviction/' {CONFIG}; chmod 644 {USERS}")
    assert drift(site) == (2, [f"{CONFIG}: another content", f"{USERS}: redis 644"])
    ran = site.run()
    assert ran.code == 0, ran.text[-6000:]
    assert set(ran.changed()) == {"shared: configuration of the store", f"shared: {USERS}"}
    assert "allkeys-lru" in host.read(CONFIG)
    assert host.root("stat", "-c", "%a", USERS).strip() == "600"
    # the server itself never had other files than those: it goes on
    assert host.root("systemctl", "show", "-P", "MainPID", UNIT).strip() == pid
    host.root("systemctl", "disable", "--now", UNIT)
    assert drift(site) == (2, ["the server: not so"] * 2)
    assert site.run().changed() == ["shared: the store runs and asks for its password"]
    assert site.ask("ping") == "PONG"


@pytest.mark.full
def test_another_password_and_a_snapshot_that_outlives_a_restart(site: StoreSite) -> None:
    other = site.fleet.folder / "other"
    other.write_text("another-planted-51c02e7788aa\n")
    other.chmod(0o600)
    new = other.read_text().strip()
    before = dict(site.data)
    site.data.update({"shared_tier_password_file": str(other), "shared_store_persistence": "rdb"})
    try:
        ran = site.run()
        assert ran.code == 0, ran.text[-6000:]
        assert "NOAUTH" in site.ask("ping")
        assert site.ask("get", "kvhost:ns-1:a", password=new) == ""  # nothing was kept until now
        assert site.ask("set", "kvhost:ns-1:a", "y", password=new) == "OK"
        site.host.root("systemctl", "restart", UNIT)
        assert site.ask("get", "kvhost:ns-1:a", password=new) == "y"
    finally:
        site.fleet.hosts["store"] = before
    assert site.run().code == 0
    assert site.ask("ping") == "PONG"


@pytest.mark.full
def test_it_is_back_after_a_reboot(site: StoreSite) -> None:
    site.host.reboot()
    assert unchanged(site.run())
    assert site.ask("ping") == "PONG"


def test_taken_away_and_nothing_is_left_of_it(site: StoreSite) -> None:
    host = site.host
    ran = site.run("--remove")
    assert ran.code != 0
    assert "add -y" in ran.text
    ran = site.run("--remove", "-y")
    assert ran.code == 0, ran.text[-6000:]
    left = f"ls -d {ETC} /etc/systemd/system/{UNIT}.d /var/lib/redis/kvhost {START}"
    assert not host.root("sh", "-c", left, ok=False)
    assert host.root("systemctl", "is-active", UNIT, ok=False).strip() in ("inactive", "")
    assert host.root("systemctl", "--failed", "--no-legend") == ""
    assert altered(host) == []
    ran = site.run("--remove", "-y")
    assert ran.code == 0
    assert ran.changed() == []
