"""Settings of the shared tier: what is taken and refused, and what a cache server is told of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvhost.basics import SHARED_PASSWORD_VARIABLE
from kvhost.plan.shared import shared_notes
from kvhost.report import Part, SharedStore
from kvhost.secrets import Secret, SecretError, certificates, shared_password
from kvhost.services import shared, store, vllm
from kvhost.settings import settings_digest
from tests.plan_cases import changed
from tests.settings_cases import check, refused
from tests.store_tools import load

pytestmark = pytest.mark.fleet
IN_ENV = {SHARED_PASSWORD_VARIABLE: "planted-4471aa"}
NAMESPACE = "/var/lib/kvhost/tier/ns-" + "a" * 24
STORE: dict[str, object] = {"shared_store_address": "10.0.0.5", "shared_store_memory_gib": 1.0}


@pytest.mark.parametrize("url", [
    "redis://10.0.0.5:6379", "redis://127.0.0.1:6379", "redis://[fd00::1]:6379",
    "redis://172.31.0.1:1", "rediss://203.0.113.7:6379", "rediss://store.example.org:6380",
    "rediss://reader@store.example.org:6380", "redis://localhost:6379", "rediss://my_store:1",
])  # fmt: skip
def test_a_store_on_a_private_address_or_with_tls(url: str) -> None:
    assert check({"shared_tier": url}, IN_ENV).shared_tier == url


@pytest.mark.parametrize(("url", "said"), [
    ("redis://203.0.113.7:6379", "no private address, and without TLS"),
    ("redis://store.example.org:6379", "no private address, and without TLS"),
    ("redis://100.64.0.1:6379", "no private address, and without TLS"),  # a provider's, shared
    ("redis://169.254.1.1:6379", "no private address, and without TLS"),
    ("redis://u:planted-9a@10.0.0.5:6379", "has a password in it (not shown)"),
    ("redis://10.0.0.5", "must be redis://HOST:PORT"),
    ("10.0.0.5:6379", "must be redis://HOST:PORT"),
    ("redis://10.0.0.5:6379/3", "something behind the port"),
    ("redis://10.0.0.5:99999", "not a URL that can be read"),
    ("s3://bucket", "does not say by which server and whether with TLS"),
    ("mooncake://10.0.0.5:50051", "Mooncake is not in this version"),
    ("unix:///run/redis.sock", "cannot be shared"),
    ("redis://10.0.0.5:0", "has port 0"),
    ("rediss://0.0.0.0:6379", "names no host"),
    ("rediss://[::]:6379", "names no host"),
    ("rediss://224.0.0.1:6379", "names no host"),
    ("rediss://`id`:1", "names no host"),
    ("rediss://a;reboot:1", "names no host"),
    ("rediss://a..b:1", "names no host"),
    ("rediss://-bad-:1", "names no host"),
    ("rediss://10.5:1", "names no host"),
    ("rediss://0x0a000005:1", "names no host"),
    ("redis://planted@b@10.0.0.5:1", "has a user (not shown)"),
    ("redis://$(id)@10.0.0.5:1", "has a user (not shown)"),
    ("redis://@10.0.0.5:1", "has a user (not shown)"),
    ("redis://[2001:db8::1]:6379", "'rediss://[2001:db8::1]:6379'"),
])  # fmt: skip
def test_what_no_host_may_use(url: str, said: str) -> None:
    found = refused({"shared_tier": url}, IN_ENV)["shared_tier"]
    assert said in found
    assert "planted" not in found


S3: dict[str, object] = {"shared_tier": "s3+https://s3.example.org/kv-cache",
                         "shared_tier_access_key": "kvhost"}  # fmt: skip


@pytest.mark.parametrize("url", [
    "s3+http://10.0.0.5:9000/kv-cache", "s3+http://[fd00::1]/kv1", "s3+http://localhost:1/kv.a-b",
    "s3+https://s3.eu-central-1.amazonaws.com/kv-cache", "s3+https://203.0.113.7:9000/kv-cache",
])  # fmt: skip
def test_a_bucket_on_a_private_address_or_with_tls(url: str) -> None:
    assert check({**S3, "shared_tier": url}, IN_ENV).shared_tier == url


@pytest.mark.parametrize(("url", "said"), [
    ("s3+http://203.0.113.7/kv-cache", "'s3+https://203.0.113.7/kv-cache'"),
    ("s3+http://s3.example.org:9000/kv-cache", "'s3+https://s3.example.org:9000/kv-cache'"),
    ("s3+ftp://10.0.0.5/kv-cache", "of S3 s3+https://HOST/BUCKET"),
    ("s3+https:///kv-cache", "of S3 s3+https://HOST/BUCKET"),
    ("s3+https://s3.example.org", "names no bucket"),
    ("s3+https://s3.example.org/", "names no bucket"),
    ("s3+https://s3.example.org/kv-cache/", "something behind the bucket"),
    ("s3+https://s3.example.org/kv-cache/a", "something behind the bucket"),
    ("s3+https://s3.example.org/kv-cache?region=x", "something behind the port"),
    ("s3+https://planted:planted@s3.example.org/kv-cache", "has a password in it (not shown)"),
    ("s3+https://planted@s3.example.org/kv-cache", "that is shared_tier_access_key"),
    ("s3+https://s3.example.org/kv", "names a bucket that no S3 takes"),
    ("s3+https://s3.example.org/KV-cache", "names a bucket that no S3 takes"),
    ("s3+https://s3.example.org/kv_cache", "names a bucket that no S3 takes"),
    ("s3+https://s3.example.org/kv..cache", "names a bucket that no S3 takes"),
    ("s3+https://s3.example.org/-kv", "names a bucket that no S3 takes"),
    ("s3+https://s3.example.org/10.0.0.5", "names a bucket that no S3 takes"),
    ("s3+https://s3.example.org/xn--kv", "names a bucket that no S3 takes"),
    ("s3+https://s3.example.org/" + "k" * 64, "names a bucket that no S3 takes"),
    ("s3+https://s3.example.org:0/kv-cache", "has port 0"),
    ("s3+https://0.0.0.0/kv-cache", "names no host"),
    ("S3+HTTPS://s3.example.org", "names no bucket"),
])  # fmt: skip
def test_what_no_host_may_use_of_s3(url: str, said: str) -> None:
    found = refused({**S3, "shared_tier": url}, IN_ENV)["shared_tier"]
    assert said in found
    assert "planted" not in found


@pytest.mark.parametrize(("change", "key", "said"), [
    ({"shared_tier_access_key": None}, "shared_tier, shared_tier_access_key",
     "knows a secret key by its access key"),
    ({"shared_tier_access_key": "two planted"}, "shared_tier_access_key", "(not shown)"),
    ({"shared_tier_region": "eu central"}, "shared_tier_region", "no name of a region"),
    (STORE, "shared_tier, shared_store_address", "makes a Redis or Valkey"),
    ({"shared_tier": "redis://10.0.0.5:1"}, "shared_tier, shared_tier_access_key",
     "is of S3 alone"),
    ({"shared_tier": "s3+http://10.0.0.5/kv-cache", "shared_tier_ca_file": "ca.pem"},
     "shared_tier, shared_tier_ca_file", "only with TLS"),
])  # fmt: skip
def test_what_s3_needs_and_cannot_have(change: dict[str, object], key: str, said: str) -> None:
    found = refused({k: v for k, v in {**S3, **change}.items() if v is not None}, IN_ENV)
    assert said in found[key]
    assert "planted" not in str(found)


@pytest.mark.parametrize("runner", ["vllm", "llama_server"])
@pytest.mark.parametrize(("key", "value"), [
    ("shared_tier_timeout_s", 5.0), ("shared_tier_password_file", "secrets/shared"),
    ("shared_tier_ca_file", "ca.pem"), ("shared_tier_access_key", "kvhost"),
    ("shared_tier_region", "eu-west-1"),
])  # fmt: skip
def test_what_is_said_of_a_store_that_none_names(runner: str, key: str, value: object) -> None:
    (named,) = refused({"runner": runner, key: value})
    assert key in named


RUNNERS: dict[str, dict[str, object]] = {
    "vllm": {},
    "native": {"cache_kind": "native"},
    "llama_server": {"runner": "llama_server"},
    "ollama": {"runner": "ollama", "model_source": "llama3.2:3b"},
}


@pytest.mark.parametrize("name", RUNNERS)
def test_a_store_has_a_password_whatever_runs_beside_it(name: str) -> None:
    ours = {**RUNNERS[name], "shared_tier_password_file": "secrets/shared"}
    found = check({**ours, **STORE})
    assert found.shared_tier_password_file == "secrets/shared"
    (keys,) = refused(ours)
    (said,) = refused(ours).values()
    assert "shared_tier_password_file" in keys
    assert ("shared_store_address" in keys + said) is (name != "vllm")
    assert ("shared_tier = " in said) is (name == "vllm"), "what this runner would refuse too"


@pytest.mark.parametrize("name", [name for name in RUNNERS if name != "vllm"])
def test_a_runner_that_shares_nothing_does_not_by_having_the_store(name: str) -> None:
    found = refused({**RUNNERS[name], **STORE, "shared_tier": "redis://10.0.0.5:6379"}, IN_ENV)
    assert any("shared_tier" in keys.split(", ") for keys in found), found


def test_no_store_without_a_password() -> None:
    uses: dict[str, object] = {"shared_tier": "redis://127.0.0.1:6379"}
    for data in (uses, STORE):
        keys, said = next(iter(refused(data).items()))
        assert "shared_tier_password_file" in keys
        assert "KVHOST_SHARED_PASSWORD" in said
        check(data, IN_ENV)
        check({**data, "shared_tier_password_file": "secrets/shared"})


@pytest.mark.parametrize(("change", "key", "said"), [
    ({"shared_store_address": "0.0.0.0"}, "shared_store_address", "name the one address"),
    ({"shared_store_address": "203.0.113.7"},
     "shared_store_address, shared_store_cert_file, shared_store_key_file", "TLS is not set"),
    ({"shared_store_memory_gib": None}, "shared_store_address, shared_store_memory_gib",
     "not guessed"),
    ({"shared_store_eviction": "noeviction"}, "shared_store_eviction",
     "refuses every write once it is full"),
    ({"shared_store_eviction": "volatile-lru"}, "shared_store_eviction", "never removed"),
    ({"shared_store_eviction": "lru"}, "shared_store_eviction", "allkeys-lru or allkeys-lfu"),
    ({"shared_store_persistence": "both"}, "shared_store_persistence", "none or rdb or aof"),
    ({"shared_store_cert_file": "a.pem"}, "shared_store_cert_file, shared_store_key_file",
     "only with its key"),
])  # fmt: skip
def test_what_no_store_may_be(change: dict[str, object], key: str, said: str) -> None:
    given = {k: v for k, v in {**STORE, **change}.items() if v is not None}
    assert said in refused(given, IN_ENV)[key]


def test_with_tls_the_store_may_have_any_address() -> None:
    tls: dict[str, object] = {"shared_store_cert_file": "a.pem", "shared_store_key_file": "a.key"}
    check({**STORE, **tls, "shared_store_address": "203.0.113.7"}, IN_ENV)


def test_certificates_are_of_use_with_tls_alone() -> None:
    ca: dict[str, object] = {"shared_tier_ca_file": "ca.pem"}
    assert "shared_tier_ca_file, shared_tier" in refused(ca)
    assert "only with TLS" in next(
        iter(refused({**ca, "shared_tier": "redis://10.0.0.5:1"}, IN_ENV).values())
    )


def test_the_cache_server_has_its_own_tier_first_then_the_shared_one() -> None:
    ours = check({"shared_tier": "rediss://store:6380", "shared_tier_ca_file": "ca.pem"}, IN_ENV)
    cache = vllm.cache_service(ours, ours.paths, NAMESPACE)
    given = [json.loads(cache.argv[n + 1]) for n, w in enumerate(cache.argv) if w == "--l2-adapter"]
    assert [one["type"] for one in given] == ["fs_native", "plugin"]
    params = given[1]["adapter_params"]
    assert params["namespace"] == "ns-" + "a" * 24
    assert (params["host"], params["port"], params["tls"]) == ("store", 6380, True)
    assert params["ca"] == "/var/lib/kvhost/etc/shared-ca.pem"
    assert cache.env["PYTHONPATH"] == "/var/lib/kvhost/lib"
    text = cache.launch_spec(ours.paths)
    assert "planted" not in text
    assert json.loads(text)["secret_env"] == {
        SHARED_PASSWORD_VARIABLE: "/var/lib/kvhost/secrets/shared-password"
    }
    # new certificates, another version of the module: the server is restarted
    assert "/var/lib/kvhost/etc/shared-ca.pem" in cache.watch
    assert "/var/lib/kvhost/lib/kvhost_shared.py" in cache.watch


def test_the_cache_server_is_told_of_a_bucket() -> None:
    ours = check({**S3, "shared_tier_region": "eu-west-1"}, IN_ENV)
    cache = vllm.cache_service(ours, ours.paths, NAMESPACE)
    given = json.loads(cache.argv[-1 - cache.argv[::-1].index("--l2-adapter") + 1])
    params = given["adapter_params"]
    place = load("kvhost_store").place_of(params)
    assert place == load("kvhost_s3").Place(
        "s3.example.org", 443, "kv-cache", "kvhost", "eu-west-1", tls=True
    )
    assert str(place) == S3["shared_tier"]
    assert "/var/lib/kvhost/lib/kvhost_s3.py" in cache.watch
    plain = check({"shared_tier": "s3+http://10.0.0.5/kv-cache", "shared_tier_access_key": "k"},
                  IN_ENV)  # fmt: skip
    where = shared.place(plain, plain.paths)
    assert where is not None
    assert (where["port"], where["tls"], where["region"]) == (80, False, "us-east-1")


def test_without_a_shared_tier_nothing_is_different() -> None:
    plain = check({})
    cache = vllm.cache_service(plain, plain.paths, NAMESPACE)
    assert cache.argv.count("--l2-adapter") == 1
    assert not cache.secret_env
    assert "PYTHONPATH" not in cache.env
    assert shared.adapter(plain, plain.paths, NAMESPACE) is None
    # a store on a host is none of its engine's, and changes no receipt of before
    assert settings_digest(check(STORE, IN_ENV)) == settings_digest(plain)
    other = check({"shared_tier": "redis://10.0.0.5:6379"}, IN_ENV)
    assert settings_digest(other) != settings_digest(plain)


def test_the_password_is_read_where_it_is_of_use(tmp_path: Path) -> None:
    uses = check({"shared_tier": "redis://10.0.0.5:6379"}, IN_ENV)
    found = shared_password(uses, IN_ENV)
    assert found is not None
    assert found.get_secret_value() == "planted-4471aa"
    assert shared_password(check({}), IN_ENV) is None
    file = tmp_path / "shared"
    file.write_text("from-the-file\n")
    named = check({**STORE, "shared_tier_password_file": str(file)})
    file.chmod(0o644)
    with pytest.raises(SecretError, match="chmod 600"):
        shared_password(named, {})
    file.chmod(0o600)
    found = shared_password(named, IN_ENV)
    assert found is not None
    assert found.get_secret_value() == "from-the-file"


def test_a_key_in_the_place_of_certificates_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ca.pem"
    with pytest.raises(SecretError, match="cannot be read on the controller"):
        certificates("shared_tier_ca_file", str(path))
    path.write_text("-----BEGIN CERTIFICATE-----\nx\n-----BEGIN PRIVATE KEY-----\n")
    with pytest.raises(SecretError, match="no private key"):
        certificates("shared_tier_ca_file", str(path))
    path.write_text("-----BEGIN CERTIFICATE-----\nx\n")
    assert certificates("shared_tier_ca_file", str(path)).endswith("x\n")


FINE: dict[str, Any] = {
    "systemd": True, "apt": True, "packages": {"redis-server": "available"},
    "versions": {"redis-server": "5:7.0.15-1~deb12u10"}, "address": True, "address_why": None,
    "port_taken": None, "other": None, "there": False, "memory_bytes": 8 << 30,
    "disk_free_bytes": 100 << 30,
}  # fmt: skip


@pytest.mark.parametrize(("change", "code"), [
    ({}, None),
    ({"systemd": False}, "store_needs_systemd"),
    ({"apt": False}, "store_needs_apt"),
    ({"versions": {"redis-server": "5:6.0.16-1ubuntu1"}}, "store_too_old"),
    ({"versions": {"redis-server": None}}, None),
    ({"address": False, "address_why": "EADDRNOTAVAIL"}, "store_address"),
    ({"port_taken": "EADDRINUSE"}, "store_port"),
    ({"other": "# Written by kvhost for /srv/other."}, "store_of_others"),
    ({"memory_bytes": 1 << 30}, "store_memory"),
    ({"disk_free_bytes": 1 << 30}, "store_disk"),
])  # fmt: skip
def test_what_a_host_must_have_for_a_store(change: dict[str, Any], code: str | None) -> None:
    ours = check({**STORE, "shared_store_persistence": "rdb"}, IN_ENV)
    password = Secret("x" * store.SHORTEST_PASSWORD)
    found = [one.code for one in store.store_refusals(ours, {**FINE, **change}, password)]
    assert found == ([code] if code else [])
    short = Secret("x" * (store.SHORTEST_PASSWORD - 1))
    assert [one.code for one in store.store_refusals(ours, FINE, short)] == ["store_password"]


def test_which_server_it_is() -> None:
    def kind(redis: str, valkey: str) -> str:
        return store.kind_of({"redis-server": redis, "valkey-server": valkey}).name

    assert kind("available", "available") == "redis-server"
    assert kind("none", "available") == "valkey-server"
    assert kind("available", "installed") == "valkey-server"
    assert kind("installed", "installed") == "redis-server"


def test_the_stores_files_hold_no_password_but_as_a_digest() -> None:
    tls: dict[str, object] = {"shared_store_cert_file": "a.pem", "shared_store_key_file": "a.key"}
    for data in (STORE, {**STORE, **tls, "shared_store_persistence": "aof"}):
        ours = check(data, IN_ENV)
        text = store.config_text(ours, store.KINDS[0]) + store.drop_in_text(ours, store.KINDS[0])
        assert "planted" not in text + store.users_text(Secret(IN_ENV[SHARED_PASSWORD_VARIABLE]))
        assert "maxmemory-policy allkeys-lru" in text
        assert "protected-mode yes" in text
        assert ("port 0\ntls-port 6379" in text) is ("shared_store_cert_file" in data)
        assert ("appendonly yes" in text) is ("shared_store_persistence" in data)


def test_the_plan_says_that_kvhost_makes_no_bucket() -> None:
    away = Part[SharedStore](status="ok", data=SharedStore(answers=False, why="no route"))
    report = changed({}).model_copy(update={"shared": away})
    told = list(shared_notes(check(S3, IN_ENV), report))[-1]
    assert "s3+https://s3.example.org/kv-cache does not answer from here (no route)" in told
    assert "kvhost makes no S3 store" in told


def test_the_plan_says_whom_it_shares_with_and_that_the_store_is_away() -> None:
    ours = check({"shared_tier": "redis://10.0.0.5:6379"}, IN_ENV)
    away = Part[SharedStore](status="ok", data=SharedStore(answers=False, why="no route"))
    there = Part[SharedStore](status="ok", data=SharedStore(answers=True, why=None))
    for part, notes in ((away, 2), (there, 1)):
        report = changed({}).model_copy(update={"shared": part})
        told = list(shared_notes(ours, report))
        assert len(told) == notes
        assert ("does not answer from here (no route)" in told[-1]) is (notes == 2)
    assert list(shared_notes(check({}), changed({}))) == []
