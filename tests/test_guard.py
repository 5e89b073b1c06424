"""The guard in front of vLLM: every path asks for the key, except two that tell nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvhost.onhost.kvhost_guard import Guard

KEY = "sk-right"


def ask(path: str, *authorization: str, method: str = "GET", kind: str = "http") -> Any:
    """Status of a request through the guard; "passed" when it came to the server behind it."""
    seen: list[Any] = []

    async def server(scope: Any, receive: Any, send: Any) -> None:
        seen.append("passed")

    async def send(message: Any) -> None:
        seen.append(message.get("status", message["type"]))

    headers = [(b"Authorization", value.encode()) for value in authorization]
    scope = {"type": kind, "method": method, "path": path, "headers": headers}
    asyncio.run(Guard(server)(scope, None, send))
    return seen[0]


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", KEY)


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/invocations", "/tokenize", "/docs", "/", "/health/../invocations"]
)
def test_every_path_asks_for_the_key(path: str) -> None:
    assert ask(path) == 401
    assert ask(path, "Bearer wrong") == 401
    assert ask(path, f"Bearer {KEY}") == "passed"
    assert ask(path, f"bearer {KEY}") == "passed"


@pytest.mark.parametrize(
    "given", [(f"Basic {KEY}",), (KEY,), ("Bearer",), (f"Bearer {KEY}", f"Bearer {KEY}")]
)
def test_another_scheme_or_two_headers_do_not_open(given: tuple[str, ...]) -> None:
    assert ask("/v1/models", *given) == 401


@pytest.mark.parametrize("path", ["/health", "/metrics"])
def test_health_and_metrics_can_be_read_and_nothing_else_done_there(path: str) -> None:
    assert ask(path) == "passed"
    assert ask(path, method="POST") == 401
    assert ask(path + "/") == 401


def test_options_is_no_way_around() -> None:
    assert ask("/invocations", method="OPTIONS") == 401


def test_a_websocket_is_closed_without_the_key() -> None:
    assert ask("/v1/realtime", kind="websocket") == "websocket.close"
    assert ask("/v1/realtime", f"Bearer {KEY}", kind="websocket") == "passed"


def test_without_a_key_in_the_environment_nothing_is_let_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("VLLM_API_KEY")
    assert ask("/v1/models", "Bearer ") == 401
