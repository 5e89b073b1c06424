"""Asks for the API key on every path of vLLM but two. Loaded by vLLM (`--middleware`), ASGI.

vLLM's own check guards only some prefixes (/v1, /v2, …): with a key set, POST /invocations still
generates text for anybody (seen with 0.32.0). Open without a key stay GET /health and
GET /metrics, which hold no prompt. The key is in VLLM_API_KEY, as for vLLM itself; without it
nothing is let in: the deploy names this module only when there is a key.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Awaitable, Callable
from typing import Any

OPEN = frozenset({"/health", "/metrics"})
App = Callable[[Any, Any, Any], Awaitable[None]]


class Guard:
    """ASGI middleware: 401 without `Authorization: Bearer KEY`; a websocket is closed."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.key = os.environ.get("VLLM_API_KEY", "")

    def knows(self, headers: list[tuple[bytes, bytes]]) -> bool:
        given = [value for name, value in headers if name.lower() == b"authorization"]
        if len(given) != 1 or not self.key:
            return False
        scheme, _, token = given[0].partition(b" ")
        # digests, so that the comparison tells nothing of the key's length
        same = hmac.compare_digest(
            hashlib.sha256(token).digest(), hashlib.sha256(self.key.encode()).digest()
        )
        return scheme.lower() == b"bearer" and same

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)  # start and stop of the server
            return
        public = scope["type"] == "http" and scope["method"] == "GET" and scope["path"] in OPEN
        if public or self.knows(scope["headers"]):
            await self.app(scope, receive, send)
            return
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        body = b'{"error": "Unauthorized"}'
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": body})
