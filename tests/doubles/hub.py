"""A double of a Hugging Face hub: the few requests that huggingface_hub 2.4.0 makes for one model.

Two servers: the hub, and the store that it sends large files to. Real are HTTP, ranges, redirects
and digests. Faults are switched on one at a time; every request is kept in `asked`.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

REPO = "org/tiny"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Asked:
    server: str
    method: str
    path: str
    range: str | None
    authorization: str | None


@dataclass
class Hub:
    """`files`: name -> content. Those of more than 1000 bytes are large ones (LFS)."""

    files: dict[str, bytes]
    token: str | None = None
    #: name -> bytes of its answer after which the connection is cut, once
    cuts: dict[str, int] = field(default_factory=dict)
    #: what is sent in the place of a file
    wrong: dict[str, bytes] = field(default_factory=dict)
    #: seconds between blocks of 64 KiB
    slow: float = 0.0
    asked: list[Asked] = field(default_factory=list)
    endpoint: str = ""
    store: str = ""
    #: what main points to
    head: str = COMMIT

    def gets(self, name: str) -> list[Asked]:
        """GET requests of a file's bytes."""
        return [a for a in self.asked if a.method == "GET" and a.path.endswith(f"/{name}")]


def blob_id(content: bytes) -> str:
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()


def is_large(content: bytes) -> bool:
    return len(content) > 1000


def _handler(hub: Hub, server: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            return

        def note(self) -> None:
            said = self.headers
            row = Asked(server, self.command, self.path, said["Range"], said["Authorization"])
            hub.asked.append(row)

        def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key.replace("_", "-"), value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            self.note()
            path = urlsplit(self.path).path
            wanted = f"Bearer {hub.token}"
            if server == "hub" and hub.token and self.headers["Authorization"] != wanted:
                self.answer(401, b'{"error":"Unauthorized"}', X_Error_Code="GatedRepo")
            elif path.startswith(f"/api/models/{REPO}/revision/"):
                self.info(path.rpartition("/")[2])
            elif path.startswith(f"/{REPO}/resolve/{COMMIT}/"):
                self.resolve(path.removeprefix(f"/{REPO}/resolve/{COMMIT}/"))
            elif server == "store":
                self.content(path.removeprefix("/store/"))
            else:
                self.answer(404, b'{"error":"not here"}', X_Error_Code="RevisionNotFound")

        def info(self, revision: str) -> None:
            if revision not in (COMMIT, "main"):
                self.answer(404, b'{"error":"no"}', X_Error_Code="RevisionNotFound")
                return
            rows = []
            for name, content in hub.files.items():
                row: dict[str, object] = {
                    "rfilename": name, "size": len(content), "blobId": blob_id(content),
                }  # fmt: skip
                if is_large(content):
                    digest = hashlib.sha256(content).hexdigest()
                    row["lfs"] = {"sha256": digest, "size": len(content), "pointerSize": 130}
                rows.append(row)
            sha = hub.head if revision == "main" else revision
            body = {"id": REPO, "modelId": REPO, "sha": sha, "siblings": rows, "tags": []}
            self.answer(200, json.dumps(body).encode(), Content_Type="application/json")

        def resolve(self, name: str) -> None:
            content = hub.files.get(name)
            if content is None:
                self.answer(404, b"{}", X_Error_Code="EntryNotFound")
            elif is_large(content):
                digest = hashlib.sha256(content).hexdigest()
                self.answer(
                    302, Location=f"{hub.store}/store/{name}", X_Repo_Commit=COMMIT,
                    X_Linked_Size=str(len(content)), X_Linked_Etag=f'"{digest}"',
                )  # fmt: skip
            else:
                self.content(name, X_Repo_Commit=COMMIT, ETag=f'"{blob_id(content)}"')

        def content(self, name: str, **headers: str) -> None:
            content = hub.wrong.get(name, hub.files.get(name, b""))
            start = int((self.headers["Range"] or "bytes=0-").removeprefix("bytes=").split("-")[0])
            rest = content[start:]
            self.send_response(206 if self.headers["Range"] else 200)
            for key, value in headers.items():
                self.send_header(key.replace("_", "-"), value)
            self.send_header("Content-Length", str(len(rest)))
            if self.headers["Range"]:
                end = len(content)
                self.send_header("Content-Range", f"bytes {start}-{end - 1}/{end}")
            self.end_headers()
            if self.command == "HEAD":
                return
            cut = hub.cuts.pop(name, None)
            self.close_connection = cut is not None
            rest = rest[:cut]
            for at in range(0, len(rest), 65536):
                self.wfile.write(rest[at : at + 65536])
                self.wfile.flush()
                if hub.slow:
                    threading.Event().wait(hub.slow)

    return Handler


@contextmanager
def serve(hub: Hub) -> Iterator[Hub]:
    """Both servers on free ports of loopback; ended with the block."""
    servers = [
        ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub, name)) for name in ("hub", "store")
    ]
    for server in servers:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
    hub.endpoint, hub.store = (f"http://127.0.0.1:{s.server_port}" for s in servers)
    try:
        yield hub
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()
