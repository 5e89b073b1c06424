"""The plan of a host with the runner Ollama: what happens, and every reason not to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvhost.driver.types import DriverFacts, Module
from kvhost.ollama.dropin import DROP_IN, dropin_text, variables
from kvhost.ollama.plan import OllamaInputs, _driver, make_ollama_plan
from kvhost.plan.types import Plan
from kvhost.report import HostReport, Part
from kvhost.settings import settings_digest
from tests.plan_cases import FACTS, healthy, ok
from tests.settings_cases import SHA, check

pytestmark = pytest.mark.runners
LEAST: dict[str, object] = {"runner": "ollama", "model_source": "llama3.2:3b"}
ARCHIVE: dict[str, object] = {"ollama_archive": f"/srv/ollama.tgz#sha256={SHA}"}
FRAGMENT = "/etc/systemd/system/ollama.service"


def unit(**changes: Any) -> dict[str, Any]:
    """ollama_unit.py look, of a unit of Ollama's installer."""
    found = {
        "unit": "ollama.service",
        "load": "loaded",
        "active": "active",
        "enabled": "enabled",
        "fragment": FRAGMENT,
        "user": "ollama",
        "stale": False,
        "invocation": "ab" * 16,
        "program": "/usr/local/bin/ollama",
        "sets": [],
        "ours": None,
        "unreadable": [],
        "process": {},
    }
    return ok({**found, **changes})


def plan(
    given: dict[str, object],
    report: dict[str, Any] | None = None,
    *,
    sent: str | None = None,
    key: bool = False,
    **look: Any,
) -> Plan:
    settings = check({**LEAST, **given})
    found = HostReport.model_validate(report or healthy())
    parts = {"unit": None if settings.ollama_archive else unit(), "archive": None, "models": None}
    facts = replace(FACTS, settings_digest=settings_digest(settings))
    return make_ollama_plan(settings, found, facts, OllamaInputs({**parts, **look}, sent, key))


def with_report(**parts: Any) -> dict[str, Any]:
    return {**healthy(), **parts}


def listening(comm: str, pid: int = 4711) -> dict[str, Any]:
    row = {"address": "127.0.0.1", "port": 11434, "uid": 990, "pid": pid, "comm": comm}
    ports = {"wanted": [11434], "listening": [row]}
    return with_report(ports=ok(ports))


def bad(why: str = "no such") -> dict[str, Any]:
    return {"status": "unreadable", "why": why, "data": None}


def against(why: str | None) -> dict[str, Any]:
    return ok({"against": why})


def models(blocked: str | None) -> dict[str, Any]:
    return ok({"blocked": blocked, "user": "ollama"})


def overruled(value: str | None = "q4_0", name: str = "override.conf") -> dict[str, Any]:
    row = {
        "file": f"{FRAGMENT}.d/{name}",
        "line": 7,
        "variable": "OLLAMA_KV_CACHE_TYPE",
        "value": value,
        "last": False,
    }
    return unit(sets=[row])


#: settings, report, further words -> codes of the refusals, a word that is said
CASES: dict[str, tuple[dict[str, object], dict[str, Any] | None, dict[str, Any], set[str], str]] = {
    "a unit": ({}, None, {}, set(), ""),
    "its own port": ({}, listening("ollama"), {}, set(), ""),
    "another's port": ({}, listening("nginx"), {}, {"port_taken"}, "nginx"),
    "an archive": (ARCHIVE, None, {"archive": against(None)}, set(), ""),
    "an archive, the port is another Ollama's": (
        ARCHIVE,
        listening("ollama"),
        {"archive": against(None)},
        {"port_taken"},
        "ollama",
    ),
    "no systemd": ({}, None, {"unit": bad("systemd is not PID 1")}, {"no_ollama"}, "not PID 1"),
    "no unit": ({}, None, {"unit": unit(load="not-found")}, {"no_ollama"}, "not-found"),
    "masked": ({}, None, {"unit": unit(load="masked")}, {"no_ollama"}, "systemctl unmask"),
    "overruled": ({}, None, {"unit": overruled()}, {"ollama_overruled"}, "override.conf:7"),
    "taken away": ({}, None, {"unit": overruled(None)}, {"ollama_overruled"}, "takes it away"),
    "set before ours": ({}, None, {"unit": overruled(name="aa.conf")}, set(), "aa.conf:7"),
    "an unreadable file": (
        {},
        None,
        {"unit": unit(unreadable=["/etc/default/ollama: Permission denied"])},
        {"unreadable"},
        "Permission denied",
    ),
    "models that are closed": (
        {"model_dir": "/data2/models"},
        None,
        {"models": models("/data2")},
        {"models_closed"},
        "/data2 is closed",
    ),
    "models that are open": ({"model_dir": "/data2/m"}, None, {"models": models(None)}, set(), ""),
    "models, not known": (
        {"model_dir": "/data2/m"},
        None,
        {"models": bad("setpriv is missing")},
        {"unreadable"},
        "setpriv",
    ),
    "another digest": (
        ARCHIVE,
        None,
        {"archive": against("it has the digest 12")},
        {"ollama_archive"},
        "digest 12",
    ),
    "an archive that was not looked at": (
        ARCHIVE,
        None,
        {"archive": bad("no answer")},
        {"ollama_archive"},
        "no answer",
    ),
    "another digest on the controller": (
        {"ollama_archive": f"controller:o.tgz#sha256={SHA}"},
        None,
        {"sent": "o.tgz has another"},
        {"ollama_archive"},
        "o.tgz has another",
    ),
    "not root": (
        {},
        with_report(users=bad("getpwnam")),
        {},
        {"unreadable"},
        "getpwnam",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_reasons_not_to(case: str) -> None:
    given, report, words, codes, said = CASES[case]
    found = plan(given, report, **words)
    assert {refusal.code for refusal in found.refusals} == codes
    every = [*(f"{r.found} {r.what} {r.fix}" for r in found.refusals), *found.notes]
    assert any(said in text for text in every)


def states(found: Plan, start: str) -> str:
    (action,) = [one for one in found.actions if one.what.startswith(start)]
    return action.state


def test_a_drop_in_that_is_in_force_is_kept_and_any_other_is_a_change() -> None:
    settings = check({**LEAST})
    text, process = dropin_text(settings, settings.paths), variables(settings)
    good = {"ours": text, "process": process}
    assert states(plan({}, unit=unit(**good)), "drop-in") == "keep"
    for wrong in (
        {"ours": None},
        {"ours": text + "#"},
        {"stale": True},
        {"process": None},
        {"process": {**process, "OLLAMA_KV_CACHE_TYPE": "q8_0"}},
    ):
        found = plan({}, unit=unit(**{**good, **wrong}))
        assert states(found, "drop-in") == "change", wrong
        (action,) = [one for one in found.actions if one.what.startswith("drop-in")]
        assert "requests in work are lost" in str(action.cost)
        assert DROP_IN in action.what


@pytest.mark.parametrize(
    ("version", "codes"), [("535.309.01", {"ollama_driver"}), ("580.1", set())]
)
def test_an_old_driver_is_refused(version: str, codes: set[str]) -> None:
    module = Module(version=version, open=None)
    facts = DriverFacts.model_construct(loaded=module)
    report = HostReport.model_validate(healthy())
    report = report.model_copy(
        update={"driver": Part.model_construct(status="ok", why=None, data=facts)}
    )
    assert {refusal.code for refusal in _driver(report)} == codes


def test_that_nothing_persists_is_said_before_anything_is_done() -> None:
    assert "keeps no KV cache on disk" in plan({}).notes[0]
    assert "key for the API is not used" in plan({}, key=True).notes[1]
    assert "somebody else's: adopted, not rewritten" in " ".join(plan({}).notes)
