"""The recipe of docs/remote-access.md, run as it stands there: nginx, TLS, keys, streaming.

A small server stands in for the API. Only places, ports and the certificate are put in. Where
nginx is not installed, Debian's package is unpacked into a directory: no service is started.
"""

from __future__ import annotations

import http.client
import re
import shutil
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.e2e_tools import free_ports

PAGE = Path(__file__).parent.parent / "docs" / "remote-access.md"
ANN, BOB, OWN = "a" * 48, "b" * 48, "k" * 32
PAUSE_S = 0.4
pytestmark = pytest.mark.full


class Api(BaseHTTPRequestHandler):
    """Streams four events with pauses, to whoever has kvhost's own key."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Authorization") != f"Bearer {OWN}":
            self.send_response(401)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for number in range(4):
            event = f"data: {number}\n\n".encode()
            self.wfile.write(b"%x\r\n%s\r\n" % (len(event), event))
            self.wfile.flush()
            time.sleep(PAUSE_S)
        self.wfile.write(b"0\r\n\r\n")

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, format: str, *args: object) -> None:
        pass


class Proxy:
    """nginx with the files of the page."""

    def __init__(self, root: Path, program: str, api_port: int) -> None:
        self.root, self.program = root, program
        (self.port,) = free_ports(1)
        config, self.clients, upstream = re.findall(r"```nginx\n(.*?)```", PAGE.read_text(), re.S)
        for old, new in (
            ("listen 443", f"listen 127.0.0.1:{self.port}"),
            ("127.0.0.1:8000", f"127.0.0.1:{api_port}"),
            ("/etc/nginx/kvhost/", f"{root}/"),
            ("/var/log/nginx/", f"{root}/"),
        ):
            assert old in config
            config = config.replace(old, new)
        (root / "upstream").write_text(upstream.replace("THE-KEY-OF-KVHOST", OWN))
        self.write_clients({"ann": [ANN], "bob": [BOB]})
        name = "llm.example.org"
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2",
             "-subj", f"/CN={name}", "-addext", f"subjectAltName=DNS:{name}",
             "-keyout", root / "server.key", "-out", root / "server.crt"],
            check=True, capture_output=True,
        )  # fmt: skip
        temporary = "".join(
            f"{kind}_temp_path {root}/{kind};\n"
            for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        (root / "nginx.conf").write_text(
            f"pid {root}/pid;\nerror_log {root}/error.log;\nevents {{}}\n"
            f"http {{\n{temporary}{config}\n}}\n"
        )

    def write_clients(self, keys: dict[str, list[str]]) -> None:
        """The page's file of clients, with these keys in place of its own."""
        lines = self.clients.strip().splitlines()
        assert len(lines) == 2
        text = ""
        for name, values in keys.items():
            (line,) = [line for line in lines if line.endswith(f" {name};")]
            for value in values:
                text += re.sub(r"Bearer \w+", f"Bearer {value}", line) + "\n"
        (self.root / "clients").write_text(text)

    def nginx(self, *words: str) -> None:
        argv = [self.program, "-p", str(self.root), "-c", str(self.root / "nginx.conf"), *words]
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=30)
        assert done.returncode == 0, done.stderr

    def reload(self) -> None:
        self.nginx("-t")
        self.nginx("-s", "reload")
        time.sleep(0.5)

    def ask(
        self, key: str | None, path: str = "/v1/completions", method: str = "POST"
    ) -> tuple[int, list[tuple[float, bytes]]]:
        """Status, and (seconds, piece) of what came; the certificate is checked."""
        context = ssl.create_default_context(cafile=str(self.root / "server.crt"))
        plain = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        plain.connect()
        plain.sock = context.wrap_socket(plain.sock, server_hostname="llm.example.org")
        headers = {"Authorization": f"Bearer {key}"} if key is not None else {}
        plain.request(method, path, body=b"{}" if method == "POST" else None, headers=headers)
        began, pieces = time.monotonic(), []
        reply = plain.getresponse()
        while piece := reply.read1(4096):
            pieces.append((time.monotonic() - began, piece))
        plain.close()
        return reply.status, pieces


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> str:
    found = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if found:
        return found
    folder = tmp_path_factory.mktemp("nginx")
    fetch = "apt-get -qq -o DPkg::Lock::Timeout=120"
    command = f"{fetch} download nginx || {{ {fetch} update && {fetch} download nginx; }}"
    subprocess.run(["sh", "-c", command], cwd=folder, check=True, capture_output=True)
    for package in folder.glob("*.deb"):
        subprocess.run(["dpkg", "-x", package, folder / "x"], check=True)
    return str(folder / "x/usr/sbin/nginx")


@pytest.fixture
def proxy(tmp_path: Path, program: str) -> Iterator[Proxy]:
    tmp_path.chmod(0o755)
    api = ThreadingHTTPServer(("127.0.0.1", 0), Api)
    threading.Thread(target=api.serve_forever, daemon=True).start()
    here = Proxy(tmp_path, program, api.server_address[1])
    here.nginx("-t")
    here.nginx()
    yield here
    here.nginx("-s", "quit")
    api.shutdown()
    api.server_close()


def test_tokens_come_as_they_are_made(proxy: Proxy) -> None:
    status, pieces = proxy.ask(ANN)
    assert status == 200
    assert b"".join(piece for _, piece in pieces) == b"".join(b"data: %d\n\n" % n for n in range(4))
    assert len(pieces) == 4
    assert pieces[-1][0] - pieces[0][0] > 2 * PAUSE_S


@pytest.mark.parametrize("key", [None, "", "wrong", OWN, ANN[:-1], ANN + "a"])
def test_without_a_clients_key_nothing_is_answered(proxy: Proxy, key: str | None) -> None:
    assert proxy.ask(key)[0] == 401


@pytest.mark.parametrize(
    "path", ["/metrics", "/health", "/tokenize", "/invocations", "/", "/v1/../metrics"]
)
def test_nothing_but_the_api_is_let_out(proxy: Proxy, path: str) -> None:
    assert proxy.ask(ANN, path, "GET")[0] == 404


def test_a_key_is_changed_while_the_old_one_still_works(proxy: Proxy) -> None:
    new = "c" * 48
    going_on: list[int] = []
    worker = threading.Thread(target=lambda: going_on.append(proxy.ask(ANN)[0]))
    worker.start()
    time.sleep(PAUSE_S)
    proxy.write_clients({"ann": [ANN, new], "bob": [BOB]})
    proxy.reload()
    assert [proxy.ask(key)[0] for key in (ANN, new, BOB)] == [200, 200, 200]
    worker.join()
    assert going_on == [200]  # a request in work is not cut off
    proxy.write_clients({"ann": [new], "bob": [BOB]})
    proxy.reload()
    assert [proxy.ask(key)[0] for key in (ANN, new, BOB)] == [401, 200, 200]


def test_no_key_is_logged(proxy: Proxy) -> None:
    proxy.ask(ANN)
    proxy.ask("wrong-key-in-no-log")
    time.sleep(0.2)
    text = "".join(path.read_text() for path in proxy.root.glob("*.log"))
    assert " ann [" in text
    for key in (ANN, OWN, "wrong-key-in-no-log"):
        assert key not in text
