"""The judge against its case table, and what a taken-out condition would do."""

from __future__ import annotations

import copy
import itertools
import json
import stat
from datetime import UTC, datetime
from pathlib import Path

import pytest
from pydantic import ValidationError
from rich.console import Console

from kvhost.basics import host_folder
from kvhost.reports import kept as reports
from kvhost.verdict import agrees as verdict_agrees
from kvhost.verdict import causes as verdict_causes
from kvhost.verdict import judge as verdict
from kvhost.verdict import rules as verdict_rules
from kvhost.verdict.evidence import Evidence, parse_events, parse_evidence
from kvhost.verdict.judge import judge
from kvhost.verdict.types import EXIT_CODES, Thresholds, Verdict
from kvhost.verdict.view import history_line, verdict_table
from tests.verdict_cases import CASES, FIXTURES, evidence_of
from tests.verdict_edits import Edit, put
from tests.verdict_types import Case

pytestmark = pytest.mark.verdict
ROOT = Path(__file__).parents[1]
HEALTHY = CASES[0]


def judged(case: Case, limits: Thresholds | None = None) -> Verdict:
    return judge(Evidence.model_validate(evidence_of(case)), limits)


def outcome(case: Case, found: Verdict) -> tuple[object, ...]:
    """What the table promises of a case, as far as it is told."""
    cause = found.causes[0].slug if found.causes and case.cause else None
    agrees = next((c.figure for c in found.conditions if c.id == "agrees"), None)
    contradiction = agrees if case.contradiction else None
    said = case.said is None or case.said in found.summary
    return found.persisted, cause, said, contradiction


def expected(case: Case) -> tuple[object, ...]:
    return case.persisted, case.cause, True, case.contradiction


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(case: Case) -> None:
    found = judged(case)
    unmet = [(c.id, c.figure) for c in found.conditions if c.met is not True]
    assert outcome(case, found) == expected(case), unmet


@pytest.mark.parametrize("gone", [rule.id for rule in verdict.RULES])
def test_without_any_one_condition_a_case_is_judged_wrongly(
    gone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = tuple(rule for rule in verdict.RULES if rule.id != gone)
    monkeypatch.setattr(verdict, "RULES", left)
    wrong = [case.name for case in CASES if judged(case).persisted != case.persisted]
    unsaid = [c.name for c in CASES if c.said and c.said not in judged(c).summary]
    assert wrong or unsaid


@pytest.mark.parametrize("gone", verdict_agrees.CHECKS, ids=lambda check: check.__name__)
def test_without_any_one_check_for_contradictions_a_case_passes(
    gone: verdict_agrees.Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = tuple(check for check in verdict_agrees.CHECKS if check is not gone)
    monkeypatch.setattr(verdict_agrees, "CHECKS", left)
    wrong = [c for c in CASES if outcome(c, judged(c)) != expected(c)]
    passed = [c for c in wrong if judged(c).persisted == "PASS"]
    # without chunks the prompt is too short, too: that check only keeps the words right
    assert wrong if gone.__name__ == "_chunk_size" else passed


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (put("services.cache.after.listens", False), "not on its port now"),
        (put("services.cache.before.listens", False), "not on its port before"),
        (put("services.cache.after.record.pid", 7), "its record now names another process"),
    ],
    ids=["off its port now", "off its port before", "another record"],
)
def test_why_another_process_is_not_enough_is_said(edit: Edit, words: str) -> None:
    """The numbers alone say that it was restarted, and the condition that it was not."""
    found = judged(Case("odd", "INCONCLUSIVE", edit))
    row = next(c for c in found.conditions if c.id == "restarted_cache")
    assert row.met is not True and str(row.figure).endswith(f": {words}")
    assert "not-restarted" not in {cause.slug for cause in found.causes}


def test_a_contradiction_is_said_in_the_summary() -> None:
    found = judged(next(case for case in CASES if case.contradiction == "more than one boot"))
    assert found.summary.endswith("its evidence contradicts itself: more than one boot")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (f"requests.restored.{field}", value)
        for field, value in (
            ("usage_cached_tokens", "8192"),
            ("usage_cached_tokens", -1),
            ("usage_prompt_tokens", 8200.0),
            ("http_status", True),
            ("ttft_s", float("nan")),
            ("output_tokens", "2593"),
            ("after.cache.hit_l2_tokens", "8192"),
            ("after.cache.hit_l2_tokens", float("inf")),
            ("after.vllm.external_hits", float("nan")),
            ("after.vllm.external_hits", -8192.0),
            ("before.own_files", -1),
            ("before.own_files", None),
            ("role", "another"),
        )
    ]
    + [
        ("written.new_bytes", -1),
        ("page_cache.resident_after", -1),
        ("page_cache.pages", 32768.5),
        ("config.files_per_chunk", 0),
        ("config.chunk_size", -256),
        ("services.cache.after.proc.pid", "2102"),
        ("services.cache.after.listens", 1),
        ("steps.0.ok", "true"),
    ],
)
def test_what_is_no_such_number_is_refused_by_its_name(path: str, value: object) -> None:
    evidence = evidence_of(HEALTHY)
    if path.startswith("steps"):
        evidence["steps"][0]["ok"] = value
    else:
        put(path, value)(evidence)
    with pytest.raises(ValidationError) as caught:
        parse_evidence(json.dumps(evidence))
    assert path in [".".join(map(str, error["loc"])) for error in caught.value.errors()]


def test_another_service_or_request_is_refused() -> None:
    for part in ("services", "requests"):
        evidence = evidence_of(HEALTHY)
        evidence[part]["another"] = next(iter(evidence[part].values()))
        with pytest.raises(ValidationError, match=rf"{part}.another"):
            parse_evidence(json.dumps(evidence))


def test_every_recorded_evidence_is_in_the_table() -> None:
    used = {case.base for case in CASES if case.name.startswith("real: ")}
    events = {f"../events/{path.stem}" for path in (FIXTURES.parent / "events").glob("*.json")}
    assert used == {path.stem for path in FIXTURES.glob("*.json")} | events


FIELDS = [
    *(f"vllm.{f}" for f in ("requests_finished", "running", "waiting", "prefix_hits")),
    *(f"vllm.{f}" for f in ("external_queries", "external_hits")),
    *(f"cache.{f}" for f in ("lookups", "l2_adapters")),
    *("vllm", "cache", "own_requests", "processes.cache", "processes.runner"),
]
MISSING = [
    *(
        f"requests.{role}.after.{field}"
        for role, field in itertools.product(("cold", "restored", "control"), FIELDS)
    ),
    "requests.cold.after.cache.hit_tokens",
    "requests.control.after.cache.hit_tokens",
    "requests.restored.after.cache.hit_l1_tokens",
    "requests.restored.after.cache.hit_l2_tokens",
    "requests.restored.usage_cached_tokens",
    "requests.restored.output_tokens",
    "requests.restored.http_status",
    "requests.restored.files",
    "requests.restored.before",
    "requests.restored.after",
    "requests.cold.output_tokens",
    "requests.control.after",
    "services.cache.before.proc",
    "services.runner.before.listens",
    "services.runner.after",
    "written",
    "page_cache",
]


@pytest.mark.parametrize("path", MISSING)
def test_a_missing_number_never_passes(path: str) -> None:
    assert judged(Case("", "", put(path, None))).persisted == "INCONCLUSIVE"


@pytest.mark.parametrize(
    ("cold", "control", "after", "worth"),
    [
        (10.0, 10.0, 8.0, "yes"),
        (10.0, 10.0, 8.1, "no"),
        (20.0, 10.0, 8.1, "no"),
        (10.0, 20.0, 8.1, "no"),
        (10.0, 10.0, 99.0, "no"),
        (None, 10.0, 8.0, "yes"),
        (10.0, 10.0, None, "unknown"),
        (None, None, 1.0, "unknown"),
    ],
)
def test_time_decides_whether_it_is_worth_it_and_nothing_else(
    cold: float | None, control: float | None, after: float | None, worth: str
) -> None:
    def edit(e: dict[str, object]) -> None:
        put("requests.cold.ttft_s", cold)(e)
        put("requests.control.ttft_s", control)(e)
        put("requests.restored.ttft_s", after)(e)

    found = judged(Case("", "", edit))
    assert found.worth_it == worth
    assert found.persisted == "PASS"


def test_a_failing_cache_may_be_worth_it_and_still_fails() -> None:
    case = next(case for case in CASES if case.name == "another answer")
    found = judged(case)
    assert (found.persisted, found.worth_it, found.exit_code) == ("FAIL", "yes", 1)


def test_the_threshold_of_hits_is_a_setting() -> None:
    case = next(case for case in CASES if case.name == "too few hits")
    assert judged(case, Thresholds(min_hit=0.9)).persisted == "PASS"


def test_exit_codes() -> None:
    assert EXIT_CODES == {"PASS": 0, "FAIL": 1, "INCONCLUSIVE": 2, "NO_BY_DESIGN": 3}


def test_evidence_of_another_version_or_with_unknown_parts_is_refused() -> None:
    whole = evidence_of(HEALTHY)
    for change in ({"schema": "kvhost/evidence/3"}, {"hits": 8192}):
        with pytest.raises(ValidationError, match=next(iter(change))):
            parse_evidence(json.dumps({**whole, **change}))


def test_every_cause_has_its_place_in_the_troubleshooting_page() -> None:
    page = (ROOT / verdict_rules.PAGE).read_text()
    slugs = [row.slug for row in verdict_causes.TABLE]
    assert len(set(slugs)) == len(slugs)
    assert [slug for slug in slugs if f"\n### {slug}\n" not in page] == []


def test_no_cause_is_named_when_the_cache_survived() -> None:
    assert judged(HEALTHY).causes == []


# -- table ------------------------------------------------------------------------------------


def shown(case: Case, width: int = 80) -> str:
    console = Console(width=width, record=True, file=Path("/dev/null").open("w"))  # noqa: SIM115
    console.print(verdict_table("web-1", judged(case)))
    return console.export_text()


def test_the_table_fits_eighty_columns_and_shows_every_condition() -> None:
    text = shown(HEALTHY)
    assert max(len(line) for line in text.splitlines()) <= 80
    for condition in judged(HEALTHY).conditions:
        assert condition.question in text
    assert "web-1: event both: persisted PASS, worth it yes" in text
    assert "cold 10.25 s, warm 0.19 s, after restart 1.08 s" in text


def test_the_table_names_what_is_missing_not_met_and_why() -> None:
    text = shown(Case("", "", put("requests.restored.usage_cached_tokens", None)))
    row = next(line for line in text.splitlines() if line.startswith("cached, says"))
    assert "missing" in row and row.rstrip().endswith("?")
    text = shown(next(case for case in CASES if case.name == "written anew"))
    assert "persisted FAIL" in text and "docs/troubleshooting.md#rewritten" in text
    row = next(line for line in text.splitlines() if line.startswith("nothing written anew"))
    assert row.rstrip().endswith("NO")


def test_markup_in_a_host_name_is_shown_not_obeyed() -> None:
    console = Console(width=80, record=True, file=Path("/dev/null").open("w"))  # noqa: SIM115
    console.print(verdict_table("[red]x[/red]", judged(HEALTHY)))
    assert "[red]x[/red]: event both: persisted" in console.export_text()


# -- reports ----------------------------------------------------------------------------------

NOON = datetime(2026, 3, 1, 12, 0, 5, tzinfo=UTC)


def report_of(case: Case, host: str = "@local", at: datetime = NOON) -> reports.Report:
    evidence = Evidence.model_validate(evidence_of(case))
    return reports.make_report(host, [(judge(evidence), evidence)], at)


def test_a_report_comes_back_as_it_was_written(tmp_path: Path) -> None:
    report = report_of(HEALTHY)
    path = reports.write_report(tmp_path, report)
    assert reports.load_report(path) == report
    assert path.name == "2026-03-01T120005Z.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert [p.name for p in path.parent.iterdir()] == [path.name]  # no temporary file stays


def of_event(event: str, persisted: str) -> tuple[Verdict, Evidence]:
    evidence = Evidence.model_validate({**evidence_of(HEALTHY), "event": event})
    verdict = judge(evidence).model_copy(update={"persisted": persisted, "event": event})
    return verdict, evidence


@pytest.mark.parametrize(
    ("found", "overall"),
    [
        (("PASS", "PASS"), "PASS"),
        (("PASS", "INCONCLUSIVE"), "INCONCLUSIVE"),
        (("FAIL", "INCONCLUSIVE"), "FAIL"),
        (("INCONCLUSIVE", "FAIL"), "FAIL"),
    ],
)
def test_of_several_events_the_worst_decides(found: tuple[str, str], overall: str) -> None:
    results = [of_event("both", found[0]), of_event("runner", found[1])]
    report = reports.make_report("a", results, NOON)
    assert (report.persisted, report.verdict.persisted) == (overall, overall)
    line = history_line(report).plain
    assert overall in line and f"{report.verdict.event} and 1 more" in line
    with pytest.raises(ValidationError, match="not the worst"):
        reports.Report.model_validate(
            {
                **report.model_dump(by_alias=True),
                "persisted": "PASS" if overall != "PASS" else "FAIL",
            }
        )


def test_a_verdict_on_another_event_than_its_evidence_is_no_report() -> None:
    verdict, _ = of_event("runner", "PASS")
    with pytest.raises(ValidationError, match="verdict on runner, evidence of both"):
        reports.make_report("a", [(verdict, of_event("both", "PASS")[1])], NOON)


def test_a_report_and_evidence_of_version_1_are_still_read(tmp_path: Path) -> None:
    new = json.loads(report_of(HEALTHY).model_dump_json(by_alias=True))
    verdict = {k: v for k, v in new["results"][0]["verdict"].items() if k != "event"}
    old = {k: new[k] for k in ("host", "time", "versions")}
    old |= {"schema": "kvhost/verdict/1", "verdict": verdict, "evidence": evidence_of(HEALTHY)}
    path = tmp_path / "old.json"
    path.write_text(json.dumps(old))
    assert reports.load_report(path) == report_of(HEALTHY)
    events = parse_events(json.dumps(evidence_of(HEALTHY)))
    assert [one.schema_ for one in events] == ["kvhost/evidence/1"]


def test_a_report_is_never_replaced(tmp_path: Path) -> None:
    path = reports.write_report(tmp_path, report_of(HEALTHY))
    before = path.read_bytes()
    with pytest.raises(FileExistsError):
        reports.write_report(tmp_path, report_of(CASES[1]))
    assert path.read_bytes() == before and len(list(path.parent.iterdir())) == 1


def test_the_latest_report_of_a_host_is_found(tmp_path: Path) -> None:
    assert reports.latest_report(tmp_path, "a") is None
    for hour, host in ((9, "a"), (7, "a"), (11, "b")):
        reports.write_report(tmp_path, report_of(HEALTHY, host, NOON.replace(hour=hour)))
    newest = reports.latest_report(tmp_path, "a")
    assert newest is not None and newest.time == "2026-03-01T090005Z"
    assert len(reports.list_reports(tmp_path)) == 3
    assert history_line(newest).plain.startswith("2026-03-01T090005Z  a  PASS")


@pytest.mark.parametrize("host", ["@local", "../../etc", "a/b", ".", "-x", "ä", "", "x" * 300])
def test_any_host_name_gives_a_plain_folder(host: str, tmp_path: Path) -> None:
    path = reports.write_report(tmp_path, report_of(HEALTHY, host))
    assert path.parent.parent == tmp_path
    assert reports.load_report(path).host == host


def test_hosts_that_look_alike_keep_apart() -> None:
    assert host_folder("a/b") != host_folder("a_b")
    assert host_folder("a/b") != host_folder("a:b")


def test_the_published_schema_is_that_of_the_model() -> None:
    published = json.loads((ROOT / "docs/schema/verdict-2.json").read_text())
    assert published == reports.json_schema(), "run: python -m kvhost.reports.kept > docs/schema/…"


def test_the_published_schema_accepts_reports_and_nothing_else() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    checker = jsonschema.Draft202012Validator(reports.json_schema())
    for case in CASES:
        checker.validate(json.loads(report_of(case).model_dump_json(by_alias=True)))
    good = json.loads(report_of(HEALTHY).model_dump_json(by_alias=True))
    for path, value in (("persisted", "MAYBE"), ("schema", "kvhost/verdict/1"), ("results", [])):
        bad = copy.deepcopy(good)
        put(path, value)(bad)
        assert not checker.is_valid(bad)
