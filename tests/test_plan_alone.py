"""One host of several whose state is odd, or whose plan cannot be made: the others have theirs."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvhost import working_copy
from kvhost.plan.make import make_plan
from kvhost.plan.stopped import plan_failed
from kvhost.plan.types import Plan
from kvhost.state_files import SHAPES
from tests.copy_tools import Copy
from tests.plan_cases import FACTS, changed, installed_host, ok
from tests.settings_cases import check

#: what the file holds -> what is said of it
ODD: list[tuple[str, Any, str]] = [
    ("good", {}, "state/good/manifest.json is not as kvhost writes it: no env"),
    ("good", {"env": ["a"]}, "no env"),
    ("good", {"env": "/e", "time": 5}, "time is no text"),
    ("good", [], "no object"),
    ("previous", {"env": {}}, "state/previous/manifest.json is not as kvhost writes it: no env"),
    ("receipt", {"runner": ["vllm"]}, "state/receipt.json is not as kvhost writes it: runner is"),
    ("receipt", {"namespace": None}, "namespace is no object"),
    ("receipt", {"model": "x"}, "model is no object"),
    ("receipt", "x", "no object"),
    ("verified", {"persisted": ["PASS"]}, "state/verified.json is not as kvhost writes it: pers"),
    ("verified", [], "no object"),
    ("failed", {"lock": []}, "state/failed.json is not as kvhost writes it: lock is no text"),
    ("failed", [], "no object"),
    ("drive", {"mount": 5}, "state/drive.json is not as kvhost writes it: mount is no text"),
]


def plan(runner: dict[str, object], name: str, data: Any) -> Plan:
    report = changed({**installed_host(), f"kvhost.{name}": ok(data)})
    return make_plan(check(runner), report, FACTS)


@pytest.mark.parametrize("runner", [{}, {"runner": "llama_server"}])
@pytest.mark.parametrize("name, data, said", ODD)
def test_what_is_not_as_kvhost_writes_it_is_said_to_be_unreadable(
    name: str, data: Any, said: str, runner: dict[str, object]
) -> None:
    found = plan(runner, name, data)
    assert said in " ".join([*found.notes, *(refusal.found for refusal in found.refusals)])
    known = {code for code in (r.code for r in found.refusals) if code == "unreadable"}
    assert known == ({"unreadable"} if name in ("failed", "drive") else set())


JUNK: list[Any] = [None, 5, "x", [], {}, ["a"], {"a": 1}, [[]], True, 1e400]


@pytest.mark.parametrize("junk", JUNK, ids=range(len(JUNK)))
@pytest.mark.parametrize("name", SHAPES)
def test_no_file_of_a_host_ends_a_plan(name: str, junk: Any) -> None:
    """Each key in turn, and the keys below those that hold others."""
    shape = SHAPES[name]
    keys = (*shape.needed, *shape.texts, *shape.objects, "versions", "settings")
    below = ("fields", "digest", "source", "runner", "versions", "chunk_bytes")
    for key in keys:
        for data in (junk, {"env": "/e", key: junk}, {key: dict.fromkeys(below, junk)}):
            if data is not None:
                plan({}, name, data)
                plan({"runner": "llama_server"}, name, data)
    plan({}, name, {"namespace": {"fields": {"runner": junk}}})


def test_what_nobody_thought_of_is_one_line_with_its_place() -> None:
    try:
        dict[str, int]()["a\x1b[31m\nb"]
    except KeyError as error:
        (refusal,) = plan_failed(error).refusals
    assert refusal.code == "plan_failed"
    assert refusal.found.startswith("KeyError: ") and "test_plan_alone.py:" in refusal.found
    assert refusal.found.isprintable()


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    path = tmp_path_factory.mktemp("copy")
    working_copy.make(path)
    return Copy(path)


#: this machine under many names, which pyinfra's @local does not allow
INVENTORY = """\
from pyinfra.connectors.local import LocalConnector

LocalConnector.make_names_data = staticmethod(lambda name=None: iter([(name, {{}}, [])]))
hosts = {hosts!r}
"""


def plans(copy: Copy, **hosts: dict[str, object]) -> tuple[int, str, dict[str, Any]]:
    rows = [(f"@local/{name}", {"accelerator": "cpu", **data}) for name, data in hosts.items()]
    (copy.path / "many.py").write_text(INVENTORY.format(hosts=rows))
    code, text = copy.kvhost("plan", "--inventory", "many.py", "--json")
    told = json.JSONDecoder().raw_decode(text[text.index("\n{") + 1 :])[0]
    return code, text, told


def codes(told: dict[str, Any], host: str) -> set[str]:
    return {refusal["code"] for refusal in told[host]["refusals"]}


@pytest.fixture
def place() -> Iterator[Path]:
    """Where base_dir may lie: not below /tmp, and open to the service's user."""
    path = Path(tempfile.mkdtemp(prefix="kvhost-alone-", dir="/srv"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.mark.fleet
@pytest.mark.skipif(os.geteuid() != 0, reason="makes a directory in /srv")
def test_one_host_is_refused_and_the_others_have_their_plans(copy: Copy, place: Path) -> None:
    state = place / "odd" / "state"
    (state / "good").mkdir(parents=True)
    (state / "good" / "manifest.json").write_text("{}")
    (state / "receipt.json").write_text('{"runner": ["vllm"]}')
    deploy = copy.path / "deploys/common/prepare.py"
    before = deploy.read_text()
    deploy.write_text(
        before + "\n\ndef make_plan(*a, _real=make_plan):  # type: ignore\n"
        "    if host.name.endswith('fails'):\n        return {}['odd']\n    return _real(*a)\n"
    )
    try:
        code, text, told = plans(
            copy,
            odd={"base_dir": str(place / "odd")},
            secret={"base_dir": str(place / "b"), "api_key_file": str(place / "none")},
            fails={"base_dir": str(place / "c")},
            well={"base_dir": str(place / "d")},
        )
    finally:
        deploy.write_text(before)
    assert code == 1
    notes = " ".join(told["odd"]["notes"])
    assert "no env" in notes and "runner is no text" in notes and told["odd"]["actions"]
    assert codes(told, "secret") == {"controller"}
    assert codes(told, "fails") == {"plan_failed"}
    assert re.search(r"\[fails\] +its plan could not be made: KeyError: 'odd'", text), text
    assert told["well"]["actions"] and not codes(told, "well") & {"plan_failed", "controller"}
