"""The client of the shared tier over a real S3 server (OpenStack Swift): what is shared, what is
not, and that a store which is away, slow, broken or of another key costs nothing but hits."""

from __future__ import annotations

import hashlib
import http.server
import logging
import os
import signal
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from tests.s3_tools import ACCESS, BUCKET, SwiftServer, s3
from tests.store_tools import PASSWORD, Client, certificate, load, redis, says, trickle

pytestmark = pytest.mark.fleet
OTHER = "ns-" + "b" * 24
BIG = os.urandom(3 << 20)
PAGE = 3


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SwiftServer]:
    options = (f"max_bucket_listing = {PAGE}",)
    with s3(tmp_path_factory.mktemp("store"), options=options) as made:
        yield made


@pytest.fixture
def server(store: SwiftServer) -> SwiftServer:
    """The same for all, with an empty bucket."""
    store.client().forget(store.names())
    return store


@pytest.fixture
def clients() -> Iterator[list[Client]]:
    made: list[Client] = []
    yield made
    for one in made:
        one.close()


def client(server: SwiftServer, clients: list[Client], *words: Any, **given: Any) -> Client:
    timeout = given.pop("timeout", 5.0)
    password = given.pop("password", PASSWORD)
    made = Client(server.place(**given), *words, password=password, timeout=timeout)
    clients.append(made)
    return made


# the signature: the examples of AWS's own page (sig-v4-header-based-auth.html)
_SECRET = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
_EXAMPLES = [
    ("GET", "/test.txt", {}, b"", {"range": "bytes=0-9"},
     "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41"),
    ("PUT", "/test%24file.text", {}, b"Welcome to Amazon S3.",
     {"date": "Fri, 24 May 2013 00:00:00 GMT", "x-amz-storage-class": "REDUCED_REDUNDANCY"},
     "98ad721746da40c64f1a55b78f14c238d841ea1380cd77a1b5971af0ece108bd"),
    ("GET", "/", {"lifecycle": ""}, b"", {},
     "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543"),
    ("GET", "/", {"max-keys": "2", "prefix": "J"}, b"", {},
     "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "path", "query", "body", "more", "signature"), _EXAMPLES)
def test_a_signature_is_that_of_awss_own_examples(
    method: str, path: str, query: dict[str, str], body: bytes, more: dict[str, str],
    signature: str,
) -> None:  # fmt: skip
    module = load("kvhost_s3")
    headers = {
        "host": "examplebucket.s3.amazonaws.com", "x-amz-date": "20130524T000000Z",
        "x-amz-content-sha256": hashlib.sha256(body).hexdigest(), **more,
    }  # fmt: skip
    said = module.authorization(
        "AKIAIOSFODNN7EXAMPLE", _SECRET, "us-east-1", method, path, module.encoded(query), headers
    )
    assert said.endswith(f",Signature={signature}")


def test_what_one_host_stored_another_reads_byte_for_byte(
    server: SwiftServer, clients: list[Client]
) -> None:
    a, b = client(server, clients), client(server, clients)
    assert a.put(one=BIG, two=b"x" * 4096, three=BIG[::-1])
    assert b.there("one", "two", "three", "four") == [True, True, True, False]
    assert b.get("one", "three", "four", size=len(BIG)) == [BIG, BIG[::-1], None]
    assert b.get("two", size=4096) == [b"x" * 4096]
    assert (b.store.state()["loaded"], a.store.state()["stored"]) == (3, 3)
    # b computes it too: it is there already, and does not cross the network again
    assert b.put(one=BIG)
    assert (b.store.state()["stored"], b.store.state()["there_already"]) == (0, 1)
    many = {f"n{n}": bytes([n]) * 1000 for n in range(40)}
    assert a.put(**many)
    assert b.get(*many, size=1000) == list(many.values())


def test_another_namespace_is_a_miss(server: SwiftServer, clients: list[Client]) -> None:
    a, b = client(server, clients), client(server, clients, OTHER)
    assert a.put(one=BIG)
    assert b.there("one") == [False]
    assert b.get("one", size=len(BIG)) == [None]
    assert b.put(one=BIG[::-1])
    assert a.get("one", size=len(BIG)) == [BIG]  # each its own


def test_a_key_holds_neither_the_models_path_nor_a_salt(
    server: SwiftServer, clients: list[Client]
) -> None:
    a = client(server, clients)
    assert a.put(one=b"1", one__tenant_7=b"2")
    chunk = hashlib.sha256(b"one").hexdigest()
    salt = hashlib.sha256(b"tenant_7").hexdigest()
    listed = server.ask("GET", query={"list-type": "2"}).decode()
    for tenant in ("-", salt):
        name = f"<Key>kvhost/{'ns-' + 'a' * 24}/00000001/0/{chunk}/{tenant}</Key>"
        assert name in listed
    assert listed.count("<Key>") == 2
    assert a.get("one", "one__tenant_7", size=1) == [b"1", b"2"]


def test_a_value_of_another_size_is_a_miss_and_the_client_goes_on(
    server: SwiftServer, clients: list[Client], caplog: pytest.LogCaptureFixture
) -> None:
    a = client(server, clients)
    assert a.put(one=BIG, two=b"y" * 10)
    assert a.get("one", "two", size=10) == [None, b"y" * 10]
    assert a.get("two", "one", size=len(BIG)) == [None, BIG]
    assert a.store.state()["answers"]
    assert "refuses" not in caplog.text  # it is a plain miss


def test_what_is_not_what_was_stored_is_a_miss_and_said_once(
    server: SwiftServer, clients: list[Client], caplog: pytest.LogCaptureFixture
) -> None:
    a = client(server, clients)
    assert a.put(one=b"right", two=b"fine!")
    name = next(n for n in server.names() if hashlib.sha256(b"one").hexdigest() in n)
    server.ask("PUT", name, body=b"wrong")  # by another tool: no digest
    digest = {load("kvhost_s3").DIGEST: hashlib.sha256(b"right").hexdigest()}
    for body, more in ((b"wrong", {}), (b"wrong", digest)):
        server.ask("PUT", name, body=body, more=more)
        assert a.get("one", "two", size=5) == [None, b"fine!"]
    assert a.store.state()["answers"]
    assert caplog.text.count("is not the SHA-256 of what came") == 1


def cut(door: socket.socket, port: int, bytes_left: list[int]) -> None:
    """A proxy that ends a connection after so many bytes of answers, once."""
    while True:
        try:
            near, _ = door.accept()
        except OSError:
            return
        far = socket.create_connection(("127.0.0.1", port))
        threading.Thread(target=_forth, args=(near, far), daemon=True).start()
        threading.Thread(target=_back, args=(near, far, bytes_left), daemon=True).start()


def _forth(near: socket.socket, far: socket.socket) -> None:
    try:
        while data := near.recv(1 << 16):
            far.sendall(data)
    except OSError:
        pass
    finally:
        far.close()


def _back(near: socket.socket, far: socket.socket, bytes_left: list[int]) -> None:
    try:
        while data := far.recv(1 << 16):
            if bytes_left:
                bytes_left[0] -= len(data)
                if bytes_left[0] < 0:
                    bytes_left.clear()
                    near.shutdown(socket.SHUT_RDWR)
                    return
            near.sendall(data)
    except OSError:
        pass


def test_a_body_that_ends_early_is_a_miss(
    server: SwiftServer, clients: list[Client], caplog: pytest.LogCaptureFixture
) -> None:
    assert client(server, clients).put(one=BIG)
    left: list[int] = []
    with socket.create_server(("127.0.0.1", 0)) as door:
        threading.Thread(target=cut, args=(door, server.port, left), daemon=True).start()
        a = client(server, clients, port=door.getsockname()[1])
        assert a.there("one") == [True]
        left.append(1 << 20)
        assert a.get("one", size=len(BIG)) == [None]
        assert a.store.state()["answers"]
        assert "a value ended before its length" in caplog.text
        assert a.get("one", size=len(BIG)) == [BIG]
        door.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize(("given", "said"), [
    ({"password": "another-password-entirely"}, "refuses the access key or its secret key"),
    ({"password": None}, "it asks for a secret key: set shared_tier_password_file"),
    ({"access": "kvhost:nobody"}, "refuses the access key or its secret key"),
    ({"bucket": "no-such-bucket"}, "it has no such bucket, and kvhost makes none"),
    ({"region": "eu-west-1"}, "in another region or elsewhere (shared_tier_region)"),
])  # fmt: skip
def test_what_is_wrong_is_one_clear_line(
    server: SwiftServer, clients: list[Client], caplog: pytest.LogCaptureFixture,
    given: dict[str, Any], said: str,
) -> None:  # fmt: skip
    with caplog.at_level(logging.INFO):
        a = client(server, clients, **given)
        assert a.there("one") == [False]
        assert not a.put(one=BIG)
        a.store.look()  # it asks again meanwhile, and has nothing new to say
    assert said in (a.store.state()["why"] or "")
    lines = [r.message for r in caplog.records if "shared tier" in r.message]
    assert len(lines) == 1, lines
    assert PASSWORD not in caplog.text
    assert "entirely" not in caplog.text
    assert server.names() == []


def test_a_store_that_is_away_at_the_start_dies_and_comes_back(
    server: SwiftServer, clients: list[Client], caplog: pytest.LogCaptureFixture
) -> None:
    server.end_front(signal.SIGTERM)
    try:
        with caplog.at_level(logging.INFO):
            began = time.monotonic()
            a = client(server, clients)
            assert a.there("one") == [False]
            assert not a.put(one=b"1")
            assert a.get("one", size=1) == [None]
            assert time.monotonic() - began < 3
            assert "Connection refused" in (a.store.state()["why"] or "")
    finally:
        server.front()
    with caplog.at_level(logging.INFO):
        a.until(True, 20)
        assert a.put(one=BIG)
        server.end_front(signal.SIGKILL)  # in use
        try:
            assert a.there("one") == [False]
            a.until(False)
            assert not a.put(two=BIG)
        finally:
            server.front()
        a.until(True, 20)
        assert a.get("one", size=len(BIG)) == [BIG]
        server.end_front(signal.SIGTERM)  # restarted before anybody noticed: that costs nothing
        server.front()
        assert a.put(two=b"2")
        assert a.get("two", size=1) == [b"2"]
    lines = [r.message for r in caplog.records if "shared tier" in r.message]
    assert [("not used" in line, "answers" in line) for line in lines] == [
        (True, False), (False, True),
    ] * 2, lines  # fmt: skip


def test_a_store_that_hangs_costs_one_time_out(server: SwiftServer, clients: list[Client]) -> None:
    a = client(server, clients, timeout=2.0)
    assert a.put(one=b"1")
    server.hold()
    try:
        began = time.monotonic()
        assert a.there(*(f"n{n}" for n in range(40))) == [False] * 40
        first = time.monotonic() - began
        assert 1.9 < first < 6
        for _ in range(20):  # nobody waits a second time
            assert a.get("one", size=1) == [None]
        assert time.monotonic() - began < first + 0.5
        assert "no answer within 2 s" in (a.until(False) or "")
    finally:
        server.go_on()
    a.until(True)
    assert a.get("one", size=1) == [b"1"]


def test_a_store_that_trickles_is_away_after_the_time_out(
    server: SwiftServer, clients: list[Client]
) -> None:
    assert client(server, clients).put(one=BIG)
    with socket.create_server(("127.0.0.1", 0)) as door:
        threading.Thread(target=trickle, args=(door, server.port), daemon=True).start()
        a = client(server, clients, port=door.getsockname()[1], timeout=1.5)
        assert a.there("one") == [True]
        began = time.monotonic()
        assert a.get("one", size=len(BIG)) == [None]
        assert time.monotonic() - began < 5
        assert not a.store.state()["answers"]


class Double(http.server.BaseHTTPRequestHandler):
    """What no server here does on demand; ``says`` is status, headers and body."""

    protocol_version = "HTTP/1.1"
    says: ClassVar[tuple[int, bytes]] = (200, b"")

    def do_GET(self) -> None:
        status, body = self.says
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, *_: Any) -> None:
        pass


@pytest.mark.parametrize(("status", "body", "why"), [
    (503, b"<Error><Code>SlowDown</Code></Error>", "it answers 503 SlowDown"),
    (500, b"<Error><Code>InternalError</Code></Error>", "it answers 500 InternalError"),
    (403, b"<Error><Code>RequestTimeTooSkewed</Code></Error>", "the clock of this host"),
    (403, b"<Error><Code>InvalidAccessKeyId</Code></Error>", "shared_tier_access_key"),
    (403, b"<Error><Code>AccessDenied</Code></Error>", "that may not read there"),
    (301, b"<Error><Code>PermanentRedirect</Code></Error>", "in another region or elsewhere"),
    (405, b"<Error><Code>Odd</Code><Message>a &lt; b</Message></Error>", "405 Odd: a < b"),
    (404, b"<html>no such page</html>", "this is no answer of S3"),
    (401, b"who are you", "this is no answer of S3: HTTP 401"),
])  # fmt: skip
def test_what_a_refusal_means(
    clients: list[Client], monkeypatch: pytest.MonkeyPatch, status: int, body: bytes, why: str
) -> None:
    monkeypatch.setattr(Double, "says", (status, body))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Double) as double:
        threading.Thread(target=double.serve_forever, args=(0.02,), daemon=True).start()
        try:
            place = load("kvhost_s3").Place(
                "127.0.0.1", double.server_port, BUCKET, ACCESS, "us-east-1"
            )
            a = Client(place, timeout=5.0)
            clients.append(a)
            assert why in (a.store.state()["why"] or "")
            said = b"<Error><Code>NoSuchKey</Code></Error>"
            monkeypatch.setattr(Double, "says", (404, said))
            a.store.look()
            assert a.store.state()["answers"]
            monkeypatch.setattr(Double, "says", (503, b""))  # busy while in use: away
            assert a.there("one") == [False]
            assert "it answers 503" in (a.store.state()["why"] or "")
        finally:
            double.shutdown()


def test_what_is_no_store_is_said(clients: list[Client]) -> None:
    with says(b"-ERR unknown command\r\n") as port:
        a = Client(load("kvhost_s3").Place("127.0.0.1", port, BUCKET, ACCESS, "us-east-1"))
        clients.append(a)
        assert "this is no answer of S3: '-ERR" in (a.store.state()["why"] or "")


@contextmanager
def with_tls(folder: Path, name: str, port: int) -> Iterator[int]:
    """A port that speaks TLS before a server that does not."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / f"{name}.pem", folder / f"{name}.key")

    def serve(door: socket.socket) -> None:
        while True:
            try:
                raw, _ = door.accept()
            except OSError:
                return
            threading.Thread(target=one, args=(raw,), daemon=True).start()

    def one(raw: socket.socket) -> None:
        try:
            near = context.wrap_socket(raw, server_side=True)
        except OSError:
            return
        far = socket.create_connection(("127.0.0.1", port))
        threading.Thread(target=_forth, args=(near, far), daemon=True).start()
        _back(near, far, [])

    with socket.create_server(("127.0.0.1", 0)) as door:
        threading.Thread(target=serve, args=(door,), daemon=True).start()
        try:
            yield door.getsockname()[1]
        finally:
            door.shutdown(socket.SHUT_RDWR)


def test_tls_is_checked_and_works(
    server: SwiftServer, tmp_path: Path, clients: list[Client]
) -> None:
    certificate(tmp_path, "good", "IP:127.0.0.1")
    certificate(tmp_path, "foreign", "IP:127.0.0.1")
    with with_tls(tmp_path, "good", server.port) as port:
        a = client(server, clients, port=port, tls=True, ca=f"{tmp_path}/good.pem")
        b = client(server, clients, port=port, tls=True, ca=f"{tmp_path}/foreign.pem")
        c = client(server, clients, port=port, timeout=1.0)
        assert a.put(one=BIG)
        assert a.get("one", size=len(BIG)) == [BIG]
        assert "its certificate: " in (b.store.state()["why"] or "")
        assert not c.store.state()["answers"]
        assert [b.there("one"), c.there("one")] == [[False], [False]]


def test_what_is_removed_is_that_of_all_pages_and_nothing_else(server: SwiftServer) -> None:
    asked = server.client()
    ours = [f"kvhost:ns-1:00000001:0:{n:02x}:{'-' if n % 2 else 'ab'}" for n in range(3 * PAGE + 1)]
    for name in (*ours, "kvhost:ns-2:00000001:0:aa:-", "others:file"):
        asked.put(name, memoryview(b"x"))
    server.ask("PUT", "kvhost:ns-1:a&b", body=b"x")
    assert sorted(asked.find("kvhost:ns-1:*:*:*:*")) == ours
    tenant = [name for name in ours if name.endswith(":ab")]
    assert sorted(asked.find("kvhost:*:*:*:*:ab")) == tenant
    asked.forget(tenant)
    assert sorted(asked.find("kvhost:ns-1:*:*:*:*")) == [n for n in ours if n not in tenant]
    asked.forget(list(asked.find("kvhost:ns-1:*")))
    assert list(asked.find("kvhost:*")) == ["kvhost:ns-2:00000001:0:aa:-"]
    assert b"others/file" in server.ask("GET", query={"list-type": "2"})
    server.ask("DELETE", "others:file")
    asked.close()


def test_a_bucket_that_keeps_versions_is_said_when_something_is_removed(tmp_path: Path) -> None:
    module = load("kvhost_s3")
    with s3(tmp_path / "store") as server:
        status = b"<VersioningConfiguration><Status>Enabled</Status></VersioningConfiguration>"
        server.ask("PUT", query={"versioning": ""}, body=status)
        asked = server.client()
        asked.put("kvhost:ns-1:a", memoryview(b"x"))
        with pytest.raises(module.Said, match="the bucket keeps versions"):
            asked.forget(["kvhost:ns-1:a"])
        assert server.names() == []


def test_a_bucket_that_is_gone_in_use_is_a_store_that_is_away(
    server: SwiftServer, clients: list[Client]
) -> None:
    a = client(server, clients)
    assert a.get("one", size=len(BIG)) == [None]
    server.ask("DELETE")
    try:
        assert not a.put(one=BIG)
        assert "it has no such bucket" in (a.store.state()["why"] or "")
        assert a.there("one") == [False]
    finally:
        server.ask("PUT")
    a.until(True)
    assert a.put(one=BIG)


def test_what_a_check_of_two_hosts_stored_is_removed_and_counted(
    server: SwiftServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = tmp_path / "secret"
    secret.write_text(PASSWORD + "\n")
    chunks = [f"00000100:0:{n:02x}" for n in range(3)]
    for chunk in chunks[:2]:
        server.client().put(f"kvhost:ns-1:{chunk}:-", memoryview(b"x"))
    store = {"place": server.params(), "namespace": "ns-1", "password_file": str(secret)}
    forget = load("shared_check").Check.forget
    assert forget(SimpleNamespace(own={"store": store}), chunks) == 2
    assert server.names() == []
    secret.write_text("another-password-entirely\n")
    assert forget(SimpleNamespace(own={"store": store}), chunks) is None
    said = capsys.readouterr().err
    assert "what the test stored stays there: s3+http://" in said
    assert "entirely" not in said


def test_a_host_is_asked_whether_the_store_answers_from_it(
    server: SwiftServer, tmp_path: Path
) -> None:
    asked = load("report").shared
    assert asked(str(server.place())) == {"answers": True, "why": None}
    assert asked(f"s3+https://127.0.0.1:{server.port}/{BUCKET}")["answers"]  # of TLS the port alone
    assert "it says" in asked(f"redis://127.0.0.1:{server.port}")["why"]
    with redis(tmp_path / "other") as other:
        assert asked(f"redis://planted@127.0.0.1:{other.port}")["answers"]
        assert not asked(f"s3+http://127.0.0.1:{other.port}/{BUCKET}")["answers"]
        other.stop()
        said = asked(f"s3+http://127.0.0.1:{other.port}/{BUCKET}")
        assert said == {"answers": False, "why": "Connection refused"}
