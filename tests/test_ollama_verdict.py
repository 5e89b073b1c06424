"""The verdict on an Ollama: a state of its own in reports, pages, exit codes and gates."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from kvhost import cli
from kvhost.basics import SUMMARY_VARIABLE
from kvhost.ollama.facts import OllamaEvidence
from kvhost.ollama.verdict import verdict_of
from kvhost.onhost import metrics
from kvhost.records import journal
from kvhost.reports.html import fleet_page, host_page
from kvhost.reports.junit import junit
from kvhost.reports.kept import Report, load_report, make_report, write_report
from kvhost.reports.views import load_hosts
from kvhost.verdict.types import worst
from kvhost.verdict.view import history_line, verdict_table
from tests.ollama_tools import QWEN_30B, facts_of

pytestmark = [pytest.mark.runners, pytest.mark.verdict]
VERDICT_SERIES = {"kvhost_verdict", "kvhost_verdict_timestamp_seconds"}
NOON = datetime(2026, 11, 30, 12, 0, tzinfo=UTC)


def evidence(wanted: str = "q8_0", log: str = "request-q8_0", **changes: Any) -> OllamaEvidence:
    pinned = changes.pop("pinned", None)
    facts = facts_of(log, QWEN_30B, **changes)
    return OllamaEvidence(
        started_unix=1.0, finished_unix=3.0, wanted=wanted, wanted_digest=pinned, facts=facts
    )


def report(**words: Any) -> Report:
    found = evidence(**words)
    return make_report("box", [(verdict_of(found), found)], NOON)


#: what was asked for -> the exit code of the verdict
CODES: dict[str, tuple[dict[str, Any], int]] = {
    "as asked for": ({}, 3),
    "another type": ({"wanted": "q4_0"}, 1),
    "not known": ({"log": "llama-server-silent"}, 2),
    "the pinned digest": ({"pinned": "ab" * 6}, 3),
    "another digest": ({"pinned": "cd" * 6}, 1),
    "no answer": ({"api": {"status": "unreadable", "why": "refused", "data": None}}, 1),
}


@pytest.mark.parametrize("case", CODES)
def test_it_is_never_a_pass_and_never_a_fail(case: str) -> None:
    words, code = CODES[case]
    verdict = verdict_of(evidence(**words))
    assert (verdict.persisted, verdict.exit_code) == ("NO_BY_DESIGN", code)
    assert verdict.event == "none"
    assert "runner = 'vllm'" in verdict.summary
    assert verdict.causes[-1].slug == "ollama-keeps-nothing"


def test_of_several_hosts_anything_worse_counts() -> None:
    assert worst(["PASS", "NO_BY_DESIGN"]) == "NO_BY_DESIGN"
    assert worst(["INCONCLUSIVE", "NO_BY_DESIGN"]) == "INCONCLUSIVE"
    assert [cli.worst(codes) for codes in ([0, 3], [3, 2], [3, 2, 1], [0], [])] == [3, 2, 1, 0, 2]


def test_a_report_is_kept_and_read_again(tmp_path: Path) -> None:
    made = report()
    assert load_report(write_report(tmp_path, made)) == made
    assert made.versions["ollama"] == "0.0.0"


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVHOST_REPORTS", str(tmp_path))
    return tmp_path


def test_status_has_an_exit_code_of_its_own(kept: Path) -> None:
    write_report(kept, report())
    told = CliRunner().invoke(cli.main, ["status", "--all"])
    assert told.exit_code == 3, told.output
    assert "NO_BY_DESIGN" in told.output and "worth it" not in told.output
    other = report(wanted="q4_0").model_copy(update={"host": "other"})
    write_report(kept, other)
    assert CliRunner().invoke(cli.main, ["status", "--all"]).exit_code == 1


def test_pages_tables_and_junit_say_it(kept: Path) -> None:
    write_report(kept, report(wanted="q4_0"))
    (view,) = load_hosts(kept)
    page = host_page(view) + fleet_page([view])
    for word in ("NO_BY_DESIGN", "KV type in force", "q4_0", "keeps no KV on disk"):
        assert word in page
    case = ElementTree.fromstring(junit([view])).find(".//testcase")
    assert case is not None and case.find("failure") is not None
    verdict = verdict_of(evidence())
    assert verdict_table("box", verdict) is not None
    assert "NO_BY_DESIGN" in history_line(report()).plain
    write_report(kept, report().model_copy(update={"host": "good"}))
    cases = ElementTree.fromstring(junit(load_hosts(kept))).findall(".//testcase")
    assert [c.find("skipped") is not None for c in cases] == [False, True]


def test_a_rolling_change_goes_on_after_such_a_host(tmp_path: Path) -> None:
    """What is asked of it fails its run; its verdict does not stop a batch."""
    row = journal.Row("box", result="changed", persisted="NO_BY_DESIGN")
    assert row.good
    assert not journal.Row("box", result="failed", persisted="NO_BY_DESIGN").good


CLI_CODES = [("deploy.py", 0, "3", 0), ("verify.py", 0, "3", 3), ("verify.py", 1, "1", 1)]
CLI_CODES += [("deploy.py", 1, "2", 2), ("deploy.py", 1, "3", 1)]


@pytest.mark.parametrize(("deploy", "code", "told", "wanted"), CLI_CODES)
def test_exit_codes_of_up_and_verify(
    monkeypatch: pytest.MonkeyPatch, deploy: str, code: int, told: str, wanted: int
) -> None:
    def run(inventory: str, name: str, args: tuple[str, ...]) -> int:
        line = {"host": "box", "persisted": "NO_BY_DESIGN", "time": "now", "code": told}
        with Path(os.environ[SUMMARY_VARIABLE]).open("a") as file:
            file.write(json.dumps(line) + "\n")
        return code

    monkeypatch.setattr(cli, "pyinfra", run)
    assert cli.run_and_tell("inventory.py", deploy, ()) == wanted


@pytest.mark.parametrize("persisted", ["NO_BY_DESIGN", "FAIL"])
def test_figures_give_no_verdict_of_such_a_host_so_that_no_alert_is_about_one(
    tmp_path: Path, persisted: str
) -> None:
    told = {"persisted": persisted, "time": "2026-11-30T120000Z", "events": {}}
    (tmp_path / "state").mkdir()
    (tmp_path / "state/verified.json").write_text(json.dumps(told))
    names = {sample.name for sample in metrics.verdict(str(tmp_path))}
    assert names == (set() if persisted == "NO_BY_DESIGN" else VERDICT_SERIES)
