"""What a plan says where another runner takes the place of the one that a host has."""

from __future__ import annotations

from typing import Any

import pytest

from kvhost.ollama.plan import OllamaInputs, make_ollama_plan
from kvhost.plan.make import make_plan
from kvhost.plan.replaced import runner_before
from kvhost.plan.types import Plan
from tests.plan_cases import FACTS, GIB, absent, changed, installed_host, namespace, ok
from tests.settings_cases import check
from tests.test_ollama_plan import unit

pytestmark = pytest.mark.runners
SETTINGS: dict[str, dict[str, object]] = {
    "vllm": {},
    "llama_server": {"runner": "llama_server"},
    "ollama": {"runner": "ollama", "model_source": "llama3.2:3b"},
}
RECEIPTS: dict[str, dict[str, Any]] = {
    "vllm": {"namespace": {"fields": {}}},
    "llama_server": {"namespace": {"fields": {"runner": "llama_server"}}},
    "ollama": {"runner": "ollama"},
}
TITLES = {"vllm": "vLLM", "llama_server": "llama-server", "ollama": "Ollama"}
OLD = "/var/lib/kvhost/envs/" + "0" * 16
TIME = "2026-01-01T000000Z"


def plan(before: str, now: str, *, given: dict[str, object] | None = None, **kvhost: Any) -> Plan:
    persisted = "NO_BY_DESIGN" if before == "ollama" else "PASS"
    changes = {
        **installed_host(),
        "kvhost.receipt": ok(RECEIPTS[before]),
        "kvhost.verified": ok({"persisted": persisted, "time": TIME}),
        "kvhost.good": absent() if before == "ollama" else ok({"env": OLD, "time": TIME}),
        "kvhost.tier": ok({"namespaces": [namespace("ns-old", 3 * GIB)], "foreign": []}),
        **{f"kvhost.{key}": value for key, value in kvhost.items()},
    }
    settings, report = check({**SETTINGS[now], **(given or {})}), changed(changes)
    if now == "ollama":
        look = {"unit": unit(), "archive": None, "models": None}
        return make_ollama_plan(settings, report, FACTS, OllamaInputs(look))
    return make_plan(settings, report, FACTS)


@pytest.mark.parametrize("now", SETTINGS)
@pytest.mark.parametrize("before", SETTINGS)
def test_who_replaces_whom_is_said_and_nobody_speaks_of_an_upgrade(before: str, now: str) -> None:
    notes = plan(before, now).notes
    said = [note for note in notes if note.startswith("Another runner:")]
    if before == now:
        assert said == []
        assert ("An upgrade" in " ".join(notes)) is (now != "ollama" and before != "ollama")
        return
    assert said == [
        f"Another runner: {TITLES[now]} replaces {TITLES[before]}, whose services stop."
    ]
    assert "upgrade" not in " ".join(notes)
    (verdict,) = [note for note in notes if note.startswith("The verdict of ")]
    assert f"{TIME}, " in verdict and f"is of {TITLES[before]} and says nothing of" in verdict


def told(before: str, now: str, begin: str, **more: Any) -> str:
    (note,) = [note for note in plan(before, now, **more).notes if note.startswith(begin)]
    return note


def test_what_becomes_of_the_cache() -> None:
    between = told("vllm", "llama_server", "The cache of vLLM, ns-old, 3 GiB,")
    assert "not read by llama-server" in between and "counts for the limit" in between
    left = told("llama_server", "ollama", "The cache of llama-server, ns-old, 3 GiB,")
    assert "nothing reads or prunes it any more; kvhost purge with the settings of before" in left
    none = told("ollama", "vllm", "Ollama kept no KV on disk")
    assert "beside what an earlier runner left in ns-old" in none
    empty = ok({"namespaces": [], "foreign": []})
    assert "The cache of vLLM stays" in told("vllm", "ollama", "The cache of", tier=empty)


def test_what_becomes_of_the_verdict() -> None:
    assert told("vllm", "llama_server", "The verdict").endswith(": its own follows.")
    assert told("vllm", "ollama", "The verdict").endswith("nothing of it persists, by design.")
    never = told("vllm", "ollama", "The verdict", given={"verify": "never"})
    assert never.endswith("it gets none (verify = never).")
    assert "A verdict of before is of" in told("vllm", "ollama", "A verdict", verified=absent())


def test_the_way_back() -> None:
    between = told("vllm", "llama_server", f"The way back: {OLD}, which passed at {TIME},")
    assert "2 GiB more on disk" not in between and between.endswith("to its cache.")
    assert "2 GiB more on disk" in told("vllm", "llama_server", "The way back", envs=ok([]))
    good = ok({"env": OLD, "time": TIME})  # of a runner before Ollama
    assert told("ollama", "vllm", "The way back", good=good).endswith("and not to Ollama.")
    assert "only a run with its settings" in told("vllm", "ollama", OLD)
    assert not [n for n in plan("ollama", "vllm").notes if n.startswith("The way back")]


def test_an_adopted_unit_goes_on() -> None:
    row = {"uid": 0, "mode": "0644", "sha256": "0" * 64}
    files = ok({"/var/lib/kvhost/etc/ollama.conf": row})
    assert "whose unit loses kvhost's drop-in" in told("ollama", "vllm", "Another", files=files)


def test_the_test_is_not_called_another_one() -> None:
    (verify,) = [a for a in plan("ollama", "vllm").actions if a.stage == "verify"]
    assert verify.what == "restart-persistence test"


@pytest.mark.parametrize("receipt", [[], "x", {}, {"namespace": None}, {"runner": "other"}])
def test_a_receipt_that_does_not_say_is_no_other_runner(receipt: Any) -> None:
    assert runner_before(changed({**installed_host(), "kvhost.receipt": ok(receipt)})) is None
