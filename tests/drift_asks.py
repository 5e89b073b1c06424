"""For test_drift_asks.py, in a Python of its own: what `up` asks of a host and drift does not.

python -m tests.drift_asks FOLDER: prints JSON, name of a setup -> the asks that nothing stands for.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from deploys import cache, engine, model, monitoring, ollama, runner, verify
from deploys import host as host_stage
from deploys.common.context import REPO, Run
from deploys.common.drift import compared
from deploys.common.looks import Ask
from deploys.common.prepare import predicted
from deploys.common.settled import settled
from deploys.common.wanted import ask_of, wanted_of, wanted_of_ollama
from kvhost.engine.locks import EngineLock, read_lock, tools_digest
from kvhost.ollama.dropin import DROP_IN
from kvhost.ollama.server import adopted, lock_of
from kvhost.plan.make import Plan
from kvhost.secrets import Secret
from kvhost.services.namespace import digest_of
from kvhost.settings import Settings, settings_digest
from tests.fleet_tools import RESOLVED
from tests.plan_cases import changed, ok
from tests.test_model_digest import make_model

#: (first words or path's end) of asks that drift answers in another way -> in which
OTHERWISE = {
    "dpkg-query": "the report",
    "getent": "the owners of all files",
    "engine.py status": "the part env",
    "readlink": "the part files, of the link current",
    "services.py": "the part services",
    "ready.py": "the part answers",
    "ollama_ready.py": "the part answers",
    "llama_ready": "the part answers",
    "model_digest.py": "the part model, by what is remembered",
    "own_files.py": "the parts files and directories",
    "test -w": "the state of the program that writes there",
    "systemctl": "the part collector",
    "ollama_unit.py": "the plan's word on the drop-in",
    "ollama_model.py": "a check, by what is remembered",
    ".kvhost-complete.json": "the part env",
    "state/verified.json": "a verdict is no state: kvhost status",
    "secrets/hf-token": "compared where one is set",
    "secrets/api-key": "compared where the API asks for one",
}
HUB = {"model_source": "org/name", "model_revision": "a" * 40}
SETUPS: dict[str, tuple[dict[str, Any], bool]] = {
    "as it comes": ({}, False),
    "systemd": ({}, True),
    "monitoring": ({"monitoring": True}, True),
    "monitoring, supervisord": ({"monitoring": True}, False),
    "of the hub": (HUB, False),
    "of the hub, elsewhere": ({**HUB, "model_dir": "/data/models"}, True),
    "sent": ({"model_source": "controller:FOLDER/model"}, False),
    "shared": ({"shared_tier": "redis://10.0.0.5:6379"}, True),
    "native": ({"cache_kind": "native"}, False),
    "llama": ({"runner": "llama_server"}, True),
    "ollama": ({"runner": "ollama", "model_source": "llama3.2:3b"}, True),
    "ollama, archive": (
        {
            "runner": "ollama",
            "model_source": "llama3.2:3b",
            "ollama_archive": f"/srv/ollama.tgz#sha256={'0' * 64}",
        },
        False,
    ),
}


def run_of(given: dict[str, Any], systemd: bool) -> tuple[Run, dict[str, Any]]:
    """A run as prepare() makes it, of a host that a run has been to, and the receipt of that."""
    secrets = {"in_env": frozenset({"KVHOST_SHARED_PASSWORD"})}
    settings = Settings.model_validate(given, context=secrets)
    pid1 = {"comm": "systemd" if systemd else "sh", "systemd": systemd, "container": None}
    report = changed({"pid1": ok(pid1)})
    if settings.runner == "ollama":
        lock: EngineLock = lock_of(settings, "x86_64")
    else:
        lock = read_lock(REPO / "locks", settled(settings, report).info, "3.11")
    kept = receipt_of(settings, lock)
    report = changed({"pid1": ok(pid1), "kvhost.receipt": ok(kept)})
    run = Run(
        host="a", run_id="r", settings=settings, report=report, plan=Plan((), (), ()), lock=lock,
        tools_digest=tools_digest(REPO / "locks"), python="/usr/bin/python3.11",
        api_key=Secret("sk-1"), with_key=settings.runner != "ollama", hf_token=None,
    )  # fmt: skip
    return run, kept


def receipt_of(settings: Settings, lock: EngineLock) -> dict[str, Any]:
    """What counts of it."""
    fields: dict[str, Any] = {
        "model_digest": "d" * 64, "model_revision": None, "chunk_size": 1, "l2_adapter": "",
        "extra_args": [],
    }  # fmt: skip
    keys = ("dtype", "quantization", "kv_cache_dtype", "kv_cache_layout", "block_size",
            "tensor_parallel", "pipeline_parallel", "rope", "versions", "machine")  # fmt: skip
    fields |= {key: RESOLVED[key] for key in keys}
    if settings.runner == "llama_server":
        fields = {"model_digest": "d" * 64, "build": 1, "machine": "m", "runner": "llama_server"}
    kept: dict[str, Any] = {
        "engine": {"digest": lock.digest},
        "model": {"source": settings.model_source, "digest": "d" * 64, "name": "n"},
        "namespace": {"fields": fields, "chunk_bytes": None},
    }
    if settings.runner != "ollama":  # those that such settings come to
        kept["namespace"]["fields"] = predicted(kept, settings, lock)
        kept["namespace"]["digest"] = digest_of(kept["namespace"]["fields"])
    return kept


def asks_of_up(run: Run) -> tuple[Ask, ...]:
    """As in deploy.py."""
    if run.settings.runner == "ollama":
        return (*host_stage.asks(run), *ollama.asks(run), *monitoring.asks(run))
    return (
        *host_stage.asks(run), *engine.asks(run), *model.asks(run), *cache.check_asks(run),
        *runner.check_asks(run), *engine.switch_asks(run), *cache.asks(run),
        *monitoring.asks(run), *runner.asks(run), *verify.asks(run),
    )  # fmt: skip


def unanswered(run: Run, kept: dict[str, Any], used: set[str]) -> list[str]:
    """``used``: gets the words of OTHERWISE that stood for an ask."""
    of = wanted_of_ollama if run.settings.runner == "ollama" else wanted_of
    asked = ask_of(run, of(run, kept))
    known = {*asked["files"], *asked["directories"], *asked["absent"], *asked["checks"]}
    known |= {tuple(argv) for argv in asked["checks"].values()}
    left = []
    for kind, *words in asks_of_up(run):
        argv = tuple(words)
        one = words[0] if kind in ("file", "text") else argv
        text = " ".join(words)
        reasons = {part for part in OTHERWISE if part in text}
        if one not in known and not reasons:
            left.append(text)
        used.update(reasons if one not in known else ())
    if adopted(run.settings) and DROP_IN not in known:  # ollama_unit.py is told where
        left.append(DROP_IN)
    return left


def the_engines_word() -> list[str]:
    """The namespace of a host on which nothing has changed is the one that the engine's word led
    to, also where it calls a type by another name than the setting."""
    run, kept = run_of({"kv_cache_dtype": "fp8"}, False)
    kept["settings"] = settings_digest(run.settings)
    kept["namespace"]["fields"] = {**kept["namespace"]["fields"], "kv_cache_dtype": "fp8_e4m3"}
    place = run.paths.namespace(digest_of(kept["namespace"]["fields"]))
    return [] if place in wanted_of(run, kept).directories else [place]


def of_the_report() -> list[str]:
    """What drift takes from the report, and did not: a package, a way back, packages unread."""
    run, kept = run_of({}, False)
    back = {"kvhost.failed": ok({"state": "rolling back"})}
    report = changed({"packages": ok({"libnuma1": "absent"}), **back})
    found = compared(replace(run, report=report), wanted_of(run, kept), {})
    told = {row.what for row in found.rows}
    unread = run.report.packages.model_copy(update={"data": None, "why": "no dpkg"})
    report = run.report.model_copy(update={"packages": unread})
    found = compared(replace(run, report=report), wanted_of(run, kept), {})
    wanted = {"package libnuma1", "a way back"} - told
    return [*wanted, *(set() if "packages: no dpkg" in found.unreadable else {"packages"})]


def main() -> None:
    folder = Path(sys.argv[1])
    make_model(folder / "model")
    found: dict[str, list[str]] = {}
    used: set[str] = set()
    for name, (given, systemd) in SETUPS.items():
        text = json.dumps(given).replace("FOLDER", str(folder))
        found[name] = unanswered(*run_of(json.loads(text), systemd), used)
    found["the engine's word"] = the_engines_word()
    found["of the report"] = of_the_report()
    found["exceptions of no use"] = sorted(set(OTHERWISE) - used)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
