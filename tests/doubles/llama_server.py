"""llama-server's endpoints of slots, as far as the keeper asks them: a server in this process.

Models build 11434, as seen: /slots tells a slot's last task only once it has worked; a save writes
what is in the slot to a file of the slots' directory and tells its length and tokens; a restore
reads a file. What it is told is noted, so that a test sees which files it was given.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

BUILD = "b11434-double"


class LlamaDouble:
    """``contents``: slot -> its bytes; ``tasks``: slot -> number of its last task."""

    def __init__(self, folder: Path, slots: int = 2) -> None:
        self.folder, self.build = folder, BUILD
        self.contents: dict[int, bytes] = dict.fromkeys(range(slots), b"")
        self.tasks: dict[int, int] = {}
        self.busy: set[int] = set()
        self.restored: list[tuple[int, str]] = []
        self.saves = 0
        #: bytes that a save leaves out at the end of its file
        self.short = 0
        self.key: str | None = None
        double = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                pass

            def answer(self, status: int, body: Any) -> None:
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def do_GET(self) -> None:
                if double.key and self.headers.get("Authorization") != f"Bearer {double.key}":
                    self.answer(401, {"error": "Invalid API Key"})
                else:
                    self.answer(*double.get(self.path))

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                self.answer(*double.post(self.path, json.loads(body)))

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()

    def fill(self, slot: int, content: bytes) -> None:
        """A request that the slot worked on."""
        self.contents[slot] = content
        self.tasks[slot] = max(self.tasks.values(), default=0) + 1

    def forget(self) -> None:
        """Another process: its slots are empty."""
        self.contents = dict.fromkeys(self.contents, b"")
        self.tasks, self.restored = {}, []

    def get(self, path: str) -> tuple[int, Any]:
        if path == "/slots":
            return 200, [
                {"id": n, "is_processing": n in self.busy}
                | ({"id_task": self.tasks[n], "n_prompt_tokens": len(c)} if n in self.tasks else {})
                for n, c in self.contents.items()
            ]
        if path == "/props":
            return 200, {"build_info": self.build}
        return 200, {"status": "ok"}

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        where, _, action = path.partition("?action=")
        slot, file = int(where.rpartition("/")[2]), body.get("filename")
        if action == "save":
            self.saves += 1
            content = self.contents[slot]
            data = content[: len(content) - self.short]
            (self.folder / file).write_bytes(data)
            return 200, {"n_written": len(content), "n_saved": len(content)}
        self.restored.append((slot, file))
        self.contents[slot] = (self.folder / file).read_bytes()
        return 200, {"n_read": len(self.contents[slot]), "n_restored": 1}

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
