"""A cache server that does not answer costs the engine a store, not its life; with doubles."""

from __future__ import annotations

import importlib.util
import logging
import sys
import types
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / "kvhost/onhost/kvhost_connector.py"
CONNECTOR = "lmcache.integration.vllm.lmcache_mp_connector"
CONTEXT = "lmcache.v1.multiprocess.transfer_context.shm"


class SlowError(TimeoutError):
    """As LMCacheTimeoutError, which is one."""


@pytest.fixture
def context(monkeypatch: pytest.MonkeyPatch) -> Any:
    """LMCache's class as vLLM's worker sees it once the connector is loaded."""

    class Context:
        answer: Any = None

        def prepare_store(self, key: object, instance_id: int) -> Any:
            if isinstance(self.answer, Exception):
                raise self.answer
            return self.answer

    for name, parts in (
        (CONNECTOR, {"LMCacheMPConnector": object}),
        (CONTEXT, {"EngineDrivenContextShm": Context}),
    ):
        words = name.split(".")
        for count in range(1, len(words)):
            monkeypatch.setitem(sys.modules, ".".join(words[:count]), types.ModuleType("double"))
        module = types.ModuleType(name)
        module.__dict__.update(parts)
        monkeypatch.setitem(sys.modules, name, module)
    spec = importlib.util.spec_from_file_location("kvhost_connector", SCRIPT)
    assert spec
    assert spec.loader
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    assert made.LMCacheMPConnector is object
    return Context()


def test_what_the_server_answers_is_passed_on(context: Any) -> None:
    for answer in (None, ([1], [0]), ([], [])):
        context.answer = answer
        assert context.prepare_store("key", 1) == answer


def test_no_answer_in_time_is_nothing_to_store(
    context: Any, caplog: pytest.LogCaptureFixture
) -> None:
    context.answer = SlowError("PREPARE_STORE timed out after 10.0s")
    with caplog.at_level(logging.WARNING):
        assert context.prepare_store("key", 1) == ([], [])
    assert "not stored, the cache server does not answer: PREPARE_STORE" in caplog.text


def test_any_other_error_stays_one(context: Any) -> None:
    context.answer = ValueError("a slot of another shape")
    with pytest.raises(ValueError, match="another shape"):
        context.prepare_store("key", 1)
