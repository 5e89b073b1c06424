"""The client of the shared tier over a real redis-server: what is shared, what is not, and that a
store which is away, slow, full or of another password costs nothing but hits."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.store_tools import (
    PASSWORD,
    Client,
    RedisServer,
    certificate,
    key,
    load,
    redis,
    says,
    shared_module,
    trickle,
)

pytestmark = pytest.mark.fleet
NS = "ns-" + "a" * 24
OTHER = "ns-" + "b" * 24
BIG = os.urandom(3 << 20)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with redis(tmp_path / "store") as made:
        yield made


@pytest.fixture
def clients() -> Iterator[list[Client]]:
    made: list[Client] = []
    yield made
    for one in made:
        one.close()


def test_what_one_host_stored_another_reads_byte_for_byte(
    server: RedisServer, clients: list[Client]
) -> None:
    a, b = Client(server.port), Client(server.port)
    clients += [a, b]
    assert a.put(one=BIG, two=b"x" * 4096, three=BIG[::-1])
    assert b.there("one", "two", "three", "four") == [True, True, True, False]
    assert b.get("one", "three", "four", size=len(BIG)) == [BIG, BIG[::-1], None]
    assert b.get("two", size=4096) == [b"x" * 4096]
    assert (b.store.state()["loaded"], a.store.state()["stored"]) == (3, 3)
    # b computes it too: it is there already, and does not cross the network again
    assert b.put(one=BIG)
    assert (b.store.state()["stored"], b.store.state()["there_already"]) == (0, 1)


def test_another_namespace_is_a_miss(server: RedisServer, clients: list[Client]) -> None:
    a, b = Client(server.port, NS), Client(server.port, OTHER)
    clients += [a, b]
    assert a.put(one=BIG)
    assert b.there("one") == [False]
    assert b.get("one", size=len(BIG)) == [None]
    assert a.there("one") == [True]
    assert b.put(one=BIG[::-1])
    assert a.get("one", size=len(BIG)) == [BIG]  # each its own
    assert {name.split(":")[1] for name in server.names()} == {NS, OTHER}


def test_a_key_holds_neither_the_models_path_nor_a_salt(
    server: RedisServer, clients: list[Client]
) -> None:
    a = Client(server.port)
    clients.append(a)
    assert a.put(one=b"1", one__tenant_7=b"2")
    chunk = hashlib.sha256(b"one").hexdigest()
    salt = hashlib.sha256(b"tenant_7").hexdigest()
    assert server.names() == sorted(f"kvhost:{NS}:00000001:0:{chunk}:{s}" for s in ("-", salt))
    assert a.get("one", "one__tenant_7", size=1) == [b"1", b"2"]


def test_a_value_of_another_size_is_a_miss_and_the_connection_goes_on(
    server: RedisServer, clients: list[Client]
) -> None:
    a = Client(server.port)
    clients.append(a)
    assert a.put(one=BIG, two=b"y" * 10)
    assert a.get("one", "two", size=10) == [None, b"y" * 10]
    assert a.get("two", "one", size=len(BIG)) == [None, BIG]
    assert a.store.state()["answers"]  # nobody waited for the rest of a short one


def test_a_store_that_is_away_at_the_start_comes_later(
    tmp_path: Path, clients: list[Client], caplog: pytest.LogCaptureFixture
) -> None:
    with redis(tmp_path / "store") as server:
        server.stop()
        began = time.monotonic()
        with caplog.at_level(logging.INFO):
            a = Client(server.port)
            clients.append(a)
            assert a.there("one") == [False]
            assert not a.put(one=b"1")
            assert a.get("one", size=1) == [None]
            assert time.monotonic() - began < 1
            assert "Connection refused" in (a.store.state()["why"] or "")
            server.start()
            a.until(True)
            assert a.put(one=b"1")
            assert a.there("one") == [True]
        lines = [r.message for r in caplog.records if "shared tier" in r.message]
        assert len(lines) == 2, lines  # once away, once back
        assert "is not used" in lines[0]
        assert "answers" in lines[1]


def test_a_store_that_dies_in_use_and_comes_back(tmp_path: Path, clients: list[Client]) -> None:
    with redis(tmp_path / "store") as server:
        a = Client(server.port)
        clients.append(a)
        assert a.put(one=BIG)
        server.stop(signal.SIGKILL)
        assert a.there("one") == [False]
        a.until(False)
        assert not a.put(two=BIG)
        server.start()
        a.until(True)
        assert a.there("one") == [False]  # it kept nothing: persistence none
        assert a.put(one=BIG)
        # restarted between two requests, before anybody noticed: that costs nothing at all
        server.stop()
        server.start()
        assert a.put(two=b"2")
        assert a.get("two", size=1) == [b"2"]
        assert a.store.state()["answers"]


def test_a_store_that_hangs_costs_one_time_out(server: RedisServer, clients: list[Client]) -> None:
    a = Client(server.port, timeout=0.5)
    clients.append(a)
    assert a.put(one=BIG)
    server.hold()
    began = time.monotonic()
    assert a.there("one") == [False]
    first = time.monotonic() - began
    assert 0.4 < first < 2
    for _ in range(20):  # nobody waits a second time
        assert a.get("one", size=len(BIG)) == [None]
    assert time.monotonic() - began < first + 0.5
    assert "no answer within 0.5 s" in (a.until(False) or "")
    server.go_on()
    a.until(True)
    assert a.get("one", size=len(BIG)) == [BIG]


def test_a_store_that_trickles_is_away_after_the_time_out(
    server: RedisServer, clients: list[Client]
) -> None:
    filler = Client(server.port)
    clients.append(filler)
    assert filler.put(one=BIG)
    with socket.create_server(("127.0.0.1", 0)) as door:
        threading.Thread(target=trickle, args=(door, server.port), daemon=True).start()
        a = Client(door.getsockname()[1], timeout=0.5)
        clients.append(a)
        assert a.there("one") == [True]
        began = time.monotonic()
        assert a.get("one", size=len(BIG)) == [None]
        assert time.monotonic() - began < 1.5
        assert a.there("one") == [False]


@pytest.mark.parametrize(("given", "said"), [
    ("another-password-entirely", "it refuses the password (shared_tier_password_file"),
    (None, "it asks for a password: set shared_tier_password_file"),
])  # fmt: skip
def test_a_wrong_password_is_one_clear_line(
    server: RedisServer, clients: list[Client], caplog: pytest.LogCaptureFixture,
    given: str | None, said: str,
) -> None:  # fmt: skip
    with caplog.at_level(logging.INFO):
        a = Client(server.port, password=given)
        clients.append(a)
        assert a.there("one") == [False]
        assert not a.put(one=BIG)
        time.sleep(2.5)  # it asks again meanwhile, and has nothing new to say
    assert said in (a.store.state()["why"] or "")
    lines = [r.message for r in caplog.records if "shared tier" in r.message]
    assert len(lines) == 1, lines
    assert not [r for r in caplog.records if PASSWORD in r.message]
    assert given is None or given not in "".join(lines)
    assert server.names() == []


def test_a_full_store_evicts_and_one_that_may_not_is_said(
    tmp_path: Path, clients: list[Client], caplog: pytest.LogCaptureFixture
) -> None:
    limit = ["maxmemory 64mb"]  # what is on its way to it counts too
    with redis(tmp_path / "lru", lines=[*limit, "maxmemory-policy allkeys-lru"]) as server:
        a = Client(server.port)
        clients.append(a)
        assert a.put(**{f"n{n}": BIG for n in range(40)})  # 120 MB into 64
        held = a.there(*(f"n{n}" for n in range(40)))
        assert 0 < sum(held) < 22
        assert a.store.state()["answers"]
    with redis(tmp_path / "full", lines=[*limit, "maxmemory-policy noeviction"]) as server:
        b = Client(server.port)
        clients.append(b)
        assert not b.put(**{f"n{n}": BIG for n in range(40)})
        assert b.store.state()["failed"] > 0
        assert caplog.text.count("refuses: OOM") == 1
        assert sum(b.there(*(f"n{n}" for n in range(40)))) > 0  # what is there is still read


def test_a_test_of_the_hosts_own_tier_is_not_answered_from_elsewhere(
    tmp_path: Path, server: RedisServer, clients: list[Client]
) -> None:
    a = Client(server.port)
    clients.append(a)
    assert a.put(one=b"1")
    a.store.pause = str(tmp_path / "pause.json")
    assert a.there("one") == [True]
    holder = subprocess.Popen(["sleep", "60"])
    ticks = int(Path(f"/proc/{holder.pid}/stat").read_text().rpartition(")")[2].split()[19])
    Path(a.store.pause).write_text(json.dumps({"pid": holder.pid, "start_ticks": ticks}))
    assert a.there("one") == [False]
    assert not a.put(two=b"2")
    holder.kill()
    holder.wait()
    assert a.there("one", "two") == [True, False]  # one that was killed holds nothing back
    Path(a.store.pause).write_text("no JSON")
    assert a.there("one") == [True]


def test_what_is_no_store_is_said(clients: list[Client]) -> None:
    with says(b"HTTP/1.1 400 Bad Request\r\n\r\n") as port:
        a = Client(port)
        clients.append(a)
        assert "this is no answer of Redis" in (a.store.state()["why"] or "")


def test_tls_is_checked_and_works(tmp_path: Path, clients: list[Client]) -> None:
    folder = tmp_path / "store"
    folder.mkdir()
    certificate(folder, "good", "IP:127.0.0.1")
    certificate(folder, "foreign", "IP:127.0.0.1")
    files = [f"tls-cert-file {folder}/good.pem", f"tls-key-file {folder}/good.key",
             f"tls-ca-cert-file {folder}/good.pem", "tls-auth-clients no"]  # fmt: skip
    with redis(folder, lines=files, tls=True) as server:
        a = Client(server.port, tls=True, ca=f"{folder}/good.pem")
        b = Client(server.port, tls=True, ca=f"{folder}/foreign.pem")
        c = Client(server.port)
        clients += [a, b, c]
        assert a.put(one=BIG)
        assert a.get("one", size=len(BIG)) == [BIG]
        assert "its certificate: " in (b.store.state()["why"] or "")
        assert not c.store.state()["answers"]
        assert [b.there("one"), c.there("one")] == [[False], [False]]


def test_a_name_of_lmcaches_of_another_form_is_no_key() -> None:
    shared = shared_module()
    with pytest.raises(ValueError, match="values to unpack"):
        shared.store_key(NS, "model-alone")
    assert shared.store_key(NS, key("one")).startswith(f"kvhost:{NS}:00000001:0:")


@pytest.mark.parametrize(("said", "means"), [
    ("WRONGPASS invalid username-password pair or user is disabled.", "it refuses the password"),
    ("ERR invalid password", "it refuses the password"),
    ("NOAUTH Authentication required.", "it asks for a password"),
    ("ERR AUTH <password> called without any password configured", "it has no password"),
    ("LOADING Redis is loading the dataset in memory", "still reading"),
    ("DENIED Redis is running in protected mode", "protected-mode"),
    ("NOPERM this user has no permissions", "it refuses: NOPERM"),
])  # fmt: skip
def test_what_a_refusal_means(said: str, means: str) -> None:
    assert means in load("kvhost_resp").meaning(said)
