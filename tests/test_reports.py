"""Pages, JUnit XML, JSON and tables made of reports: complete, escaped, and readable by others."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from kvhost import cli
from kvhost.basics import host_folder
from kvhost.ollama.facts import OllamaEvidence
from kvhost.reports import html as report_html
from kvhost.reports import kept as reports
from kvhost.reports import svg as report_svg
from kvhost.reports import views as report_views
from kvhost.reports.junit import junit
from kvhost.reports.kept import Report
from kvhost.reports.views import load_hosts, tokens_by_source
from kvhost.verdict.evidence import EVENTS, Event, Evidence
from kvhost.verdict.facts import Facts
from tests.report_cases import (
    FAILING,
    HOSTILE,
    NOON,
    PASSING,
    REFUSED,
    UNKNOWING,
    keep,
    report_of,
)

pytestmark = pytest.mark.verdict
ROOT = Path(__file__).parents[1]


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four hosts; web-1 with a history of three runs."""
    folder = tmp_path / "reports"
    for day, case in enumerate((PASSING, FAILING, PASSING)):
        keep(folder, case, "web-1", day)
    keep(folder, FAILING, HOSTILE)
    keep(folder, UNKNOWING, "db-2")
    keep(folder, REFUSED, "gpu-7")
    monkeypatch.setenv("KVHOST_REPORTS", str(folder))
    monkeypatch.setenv("COLUMNS", "200")
    return folder


def run(*words: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(cli.main, ["report", *words])
    return done.exit_code, done.stdout, done.stderr


# -- what is shown ----------------------------------------------------------------------------


def test_tokens_are_told_apart_by_where_they_came_from() -> None:
    evidence = report_of(PASSING).result.evidence
    assert isinstance(evidence, Evidence)
    facts = Facts(evidence)
    assert tokens_by_source(facts, "cold") == {"computed": 8200}
    # the cache server looked the warm prompt up in L1, but the engine's own memory served it
    assert tokens_by_source(facts, "warm") == {"computed": 8, "engine": 8192}
    assert tokens_by_source(facts, "restored") == {"computed": 8, "l2": 8192}
    assert tokens_by_source(facts, "nobody") == {}


class Counted(Facts):
    """Facts of one request whose counters grew by what is given: `name` -> tokens."""

    def __init__(self, **grown: float | None) -> None:
        self.grown = grown

    def vllm(self, role: str, field: str) -> float | None:
        return self.grown[field]

    def cache(self, role: str, field: str) -> float | None:
        return self.grown[field]


@pytest.mark.parametrize(
    ("l1", "l2", "external", "told"),
    [
        (0, 512, 256, {"l2": 256}),  # looked up twice, taken once: no more than vLLM took
        (256, 256, 512, {"l1": 256, "l2": 256}),
        (512, 0, 256, {"l1": 256}),
        (0, 256, 512, {"outside": 512}),  # vLLM took more than this server says: another's
        (None, 256, 256, {"outside": 256}),
    ],
)
def test_no_more_comes_from_the_cache_server_than_vllm_took(
    l1: float | None, l2: float, external: float, told: dict[str, float]
) -> None:
    grown = {"from_compute": 0.0, "from_device": 0.0, "from_external": external}
    facts = Counted(**grown, hit_l1_tokens=l1, hit_l2_tokens=l2)
    assert tokens_by_source(facts, "restored") == told


def test_hosts_come_with_their_history_and_what_cannot_be_read(kept: Path) -> None:
    (kept / "db-2" / "2026-03-09T120000Z.json").write_text("{}")
    shutil.copytree(kept / "gpu-7", kept / "moved")
    views = {view.folder: view for view in load_hosts(kept)}
    assert [r.time[:10] for r in views["web-1"].reports] == [f"2026-03-0{n}" for n in (1, 2, 3)]
    assert views["web-1"].standing == "PASS"
    assert views["db-2"].standing == "NONE" and len(views["db-2"].reports) == 1
    assert views["moved"].standing == "NONE" and not views["moved"].reports


def test_an_old_file_that_is_no_report_takes_no_verdict_away(kept: Path) -> None:
    (kept / "web-1" / "2025-01-01T000000Z.json").write_text("{}")
    (view,) = load_hosts(kept, "web-1")
    assert (view.standing, len(view.unreadable)) == ("PASS", 1)


# -- which verdict stands ---------------------------------------------------------------------

#: (case, receipt) of each run, oldest first -> the verdict that stands, exit code, and whether a
#: later test is said to be left out
STANDS: list[tuple[str, list[tuple[str, str | None]], str, int, bool]] = [
    ("left out after a PASS", [(PASSING, "r"), (REFUSED, "r")], "PASS", 0, True),
    ("twice", [(PASSING, "r"), (REFUSED, "r"), (REFUSED, "r")], "PASS", 0, True),
    ("after a FAIL", [(PASSING, "r"), (FAILING, "r"), (REFUSED, "r")], "FAIL", 1, True),
    ("on what was changed since", [(PASSING, "r"), (REFUSED, "s")], "INCONCLUSIVE", 2, False),
    ("on what is not known", [(PASSING, None), (REFUSED, None)], "INCONCLUSIVE", 2, False),
    ("and tested again", [(PASSING, "r"), (REFUSED, "r"), (FAILING, "r")], "FAIL", 1, False),
    ("behind no report", [(PASSING, "r"), ("", None), (REFUSED, "r")], "INCONCLUSIVE", 2, False),
    ("newest is no report", [(PASSING, "r"), ("", None)], "NONE", 2, False),
]


@pytest.mark.parametrize(("name", "runs", "stands", "code", "said"), STANDS)
def test_the_verdict_that_stands_is_the_last_one_that_was_made(
    name: str,
    runs: list[tuple[str, str | None]],
    stands: str,
    code: int,
    said: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KVHOST_REPORTS", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "80")
    keep(tmp_path, PASSING, "other", receipt="r")  # another host's verdict counts for itself alone
    for day, (case, receipt) in enumerate(runs):
        if case:
            keep(tmp_path, case, "web-1", day, receipt)
        else:
            (tmp_path / "web-1" / f"2026-03-{day + 1:02}T120005Z.json").write_text("{}")
    done = CliRunner().invoke(cli.main, ["status"])
    assert done.exit_code == code, done.output
    later = f"web-1: a later test, of 2026-03-0{len(runs)}T120005Z, was left out: the server was in"
    assert (later in done.stdout, "other: a later" in done.stdout) == (said, False)
    as_json = CliRunner().invoke(cli.main, ["status", "--json"])
    assert (as_json.exit_code, later in as_json.stderr) == (code, said)
    told = json.loads(as_json.stdout)
    assert stands == (told["web-1"]["persisted"] if "web-1" in told else "NONE")
    host = next(h for h in json.loads(run("--json")[1])["hosts"] if h["host"] == "web-1")
    assert host["persisted"] == stands and bool(host["left_out"]) == said
    assert host["time"] == (told["web-1"]["time"] if "web-1" in told else None)
    for words in ((), ("web-1",)):
        text = run(*words)[1]
        assert (later in text) == said
        assert stands == "NONE" or f"persisted {stands}" in text or f"  {stands} " in text
    views = load_hosts(tmp_path, "web-1")
    tags = {e.tag for e in ElementTree.fromstring(junit(views)).iter()} & {"failure", "error"}
    assert tags == {"PASS": set(), "FAIL": {"failure"}}.get(stands, {"error"})
    assert faults(junit(views)) == []
    for page in (report_html.host_page(views[0]), report_html.fleet_page(views)):
        assert ("was left out" in page) == said and f"persisted {stands}"[10:] in page


def test_what_was_tested_before_it_was_left_out_counts() -> None:
    def left_out(*found: tuple[Event, str]) -> bool:
        return several(*found).left_out

    assert left_out(("both", REFUSED))
    assert left_out(("cache", PASSING), ("both", REFUSED))
    assert not left_out(("cache", PASSING))
    assert not left_out(("cache", FAILING), ("both", REFUSED))
    assert not left_out(("cache", UNKNOWING), ("both", REFUSED))


@pytest.mark.parametrize("words", [["status"], ["report"], ["report", "web-1"]])
def test_a_line_of_history_fits_a_terminal(
    words: list[str], kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(kept / host_folder(HOSTILE))
    monkeypatch.setenv("COLUMNS", "80")
    text = CliRunner().invoke(cli.main, words).stdout
    lines = [line for line in text.splitlines() if line.startswith("2026-")]
    assert "worth it yes  10.25 s -> " in text and max(map(len, lines)) <= 80


# -- the command ------------------------------------------------------------------------------


def test_every_host_is_a_line_and_a_host_is_a_table_with_history(kept: Path) -> None:
    code, text, _ = run()
    assert code == 0 and len(text.splitlines()) == 4
    code, text, _ = run("web-1")
    assert code == 0 and "from L2, says the cache" in text
    assert [line.split()[2] for line in text.splitlines()[-3:]] == ["PASS", "FAIL", "PASS"]
    code, text, _ = run("web-1", "--history")
    assert code == 0 and len(text.splitlines()) == 3 and "from L2" not in text


def test_a_host_without_a_report_is_an_error_that_names_the_others(kept: Path) -> None:
    code, _, error = run("web-9")
    assert code == 1 and "no report of 'web-9'" in error and "db-2, gpu-7, web-1" in error


def test_no_report_at_all_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVHOST_REPORTS", str(tmp_path))
    code, _, _ = run("--html", str(tmp_path / "out"))
    assert code == 0 and "No report yet" in (tmp_path / "out/index.html").read_text()
    assert "No report yet" in run()[1]


def test_why_a_file_is_no_report_is_said(kept: Path) -> None:
    (kept / "db-2" / "2026-03-09T120000Z.json").write_text("{}")
    (kept / "web-1" / "2026-03-09T120000Z.json").write_bytes(b"\xff\x1b[31m")
    shutil.copytree(kept / "gpu-7", kept / "moved")
    lines = {line.split("/")[-2]: line for line in run()[2].splitlines()}
    assert "schema: Field required" in lines["db-2"] or "host: Field required" in lines["db-2"]
    assert "can't decode" in lines["web-1"]
    assert "it is a report of 'gpu-7'" in lines["moved"]


def test_json_and_history_together_are_refused(kept: Path) -> None:
    assert run("--json", "--history")[0] == 2


def test_a_file_that_cannot_be_written_is_an_error(kept: Path) -> None:
    code, _, error = run("--junit", f"{kept}/web-1/2026-03-01T120005Z.json/x.xml")
    assert code == 1 and "not written" in error


@pytest.mark.parametrize("option", ["--html", "--junit"])
def test_a_folder_that_is_not_there_is_an_error_and_not_made(
    option: str, kept: Path, tmp_path: Path
) -> None:
    code, text, error = run(option, str(tmp_path / "no/such/place"))
    assert (code, text) == (1, "") and "not written" in error and len(error.splitlines()) == 1
    assert not (tmp_path / "no").exists()


def test_a_host_name_cannot_steer_the_terminal(kept: Path) -> None:
    for words in ((), ("--history",), (HOSTILE,), ("web-9",)):
        code, text, error = run(*words)
        assert "\x1b[31m" not in text + error and "\x00" not in text + error, (code, words)


def test_the_json_fits_its_published_schema(kept: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    published = json.loads((ROOT / "docs/schema/fleet-1.json").read_text())
    assert published == report_views.fleet_schema(), (
        "python -m kvhost.reports.views > docs/schema/…"
    )
    code, text, _ = run("--json")
    found = json.loads(text)
    of_reports = json.loads((ROOT / "docs/schema/verdict-2.json").read_text())
    referencing = pytest.importorskip("referencing")
    both = referencing.Registry().with_resource(
        "verdict-2.json", referencing.Resource.from_contents(of_reports)
    )
    checker = jsonschema.Draft202012Validator(published, registry=both)
    checker.validate(found)
    assert code == 0 and {h["host"]: h["persisted"] for h in found["hosts"]} == {
        "web-1": "PASS",
        HOSTILE: "FAIL",
        "db-2": "INCONCLUSIVE",
        "gpu-7": "INCONCLUSIVE",
    }
    for change in ("persisted", "results"):
        bad = json.loads(text)
        bad["hosts"][0]["reports"][0][change] = "MAYBE"
        assert not checker.is_valid(bad)


# -- JUnit XML --------------------------------------------------------------------------------

#: Element -> (attributes that must be there, those that may, children that may), as the schemas of
#: Jenkins' xUnit plugin and of Maven Surefire agree on it.
SHAPE: dict[str, tuple[set[str], set[str], set[str]]] = {
    "testsuites": (
        {"tests", "failures", "errors"},
        {"name", "time", "skipped", "disabled"},
        {"testsuite"},
    ),
    "testsuite": (
        {"name", "tests", "failures", "errors", "skipped", "time"},
        {"timestamp", "hostname", "id", "package"},
        {"properties", "testcase", "system-out", "system-err"},
    ),
    "testcase": (
        {"name", "classname", "time"},
        {"file", "line"},
        {"properties", "skipped", "error", "failure", "system-out", "system-err"},
    ),
    "properties": (set(), set(), {"property"}),
    "property": ({"name", "value"}, set(), set()),
    "failure": ({"message", "type"}, set(), set()),
    "error": ({"message", "type"}, set(), set()),
    "skipped": (set(), {"message", "type"}, set()),
}


def faults(text: str) -> list[str]:
    """What a reader of JUnit XML would stumble over."""
    root = ElementTree.fromstring(text)
    found = [] if root.tag == "testsuites" else [f"root {root.tag}"]
    for element in root.iter():
        needed, may, children = SHAPE.get(element.tag, (set(), set(), set()))
        found += [f"{element.tag}: no {name}" for name in needed - set(element.attrib)]
        found += [f"{element.tag}: {name}?" for name in set(element.attrib) - needed - may]
        found += [f"{element.tag}: <{c.tag}>" for c in element if c.tag not in children]
    for suite in root.iter("testsuite"):
        cases = suite.findall("testcase")
        counts = {"tests": len(cases)}
        for counted, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
            counts[counted] = sum(case.find(tag) is not None for case in cases)
        found += [f"{k} is not {n}" for k, n in counts.items() if suite.get(k) != str(n)]
        stamp = suite.get("timestamp")
        if stamp and not re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d", stamp):
            found.append(f"timestamp {stamp}")
        order = [c.tag for c in suite]
        found += ["properties are not first"] if "properties" in order[1:] else []
    for counted in ("tests", "failures", "errors", "skipped"):
        total = sum(int(s.get(counted, "0")) for s in root.iter("testsuite"))
        found += [] if root.get(counted) == str(total) else [f"{counted} in all is not {total}"]
    return found


def test_junit_has_the_common_shape_and_every_condition(kept: Path, tmp_path: Path) -> None:
    code, text, _ = run("--junit", str(tmp_path / "kvhost.xml"))
    assert (code, text) == (0, "")
    written = (tmp_path / "kvhost.xml").read_text()
    assert faults(written) == []
    root = ElementTree.fromstring(written)
    (case,) = root.findall("testsuite[@name='web-1']/testcase")
    seen = {p.attrib["name"]: p.attrib["value"] for p in case.iter("property")}
    verdict = reports.load_report(reports.list_reports(kept, "web-1")[-1]).verdict
    assert {f"condition.{c.id}" for c in verdict.conditions} <= set(seen)
    assert seen["condition.l2_hits"] == "met: 8192, needed: >= 7782 of 8192 tokens"
    assert (seen["persisted"], case.find("failure"), case.find("error")) == ("PASS", None, None)


def test_the_shapes_parser_finds_faults(kept: Path) -> None:
    good = junit(load_hosts(kept))
    bad = good.replace('failures="1"', 'failures="0"').replace("<testcase", "<testcase mood='x'")
    assert len(faults(bad)) > 3


def test_fail_is_a_failure_and_what_is_not_known_an_error(kept: Path) -> None:
    (kept / "web-1" / "2026-03-09T120000Z.json").write_text("{}")
    root = ElementTree.fromstring(junit(load_hosts(kept)))
    got = {
        suite.attrib["name"]: [child.tag for case in suite.findall("testcase") for child in case]
        for suite in root
    }
    plain = next(name for name in got if name.startswith("<script>"))
    assert got.pop(plain) == ["properties", "failure"]
    assert got == {
        "web-1": ["properties", "error"],  # PASS, but a newer file cannot be read
        "db-2": ["properties", "error"],
        "gpu-7": ["properties", "error"],
    }
    failure = root.find("testsuite/testcase/failure")
    assert failure is not None and failure.attrib["type"] == "evicted"
    assert "docs/troubleshooting.md#evicted" in (failure.text or "")


# -- pages ------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Collects tags with attributes and the text outside of style."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.fixture
def pages(kept: Path, tmp_path: Path) -> dict[str, Page]:
    out = tmp_path / "html"
    assert run("--html", str(out))[0] == 0
    return {path.name: Page(path.read_text()) for path in out.iterdir()}


def attributes(page: Page) -> Iterator[tuple[str, str]]:
    for _, attrs in page.tags:
        for key, value in attrs.items():
            yield key, value or ""


def test_pages_are_whole_load_nothing_and_run_nothing(pages: dict[str, Page]) -> None:
    assert len(pages) == 5 and "index.html" in pages
    for name, page in pages.items():
        assert page.open == [], name
        assert not {tag for tag, _ in page.tags} & {"script", "link", "img", "iframe", "object"}
        for key, value in attributes(page):
            assert not key.startswith("on") and key != "src", (name, key)
            assert key != "href" or re.fullmatch(r"(index|host-[\w.-]+)\.html", value), value
        policy = dict(page.tags)["meta"]  # the last one of a tag wins
        assert policy["name"] == "generator"
    policies = [attrs for _, attrs in pages["index.html"].tags if "http-equiv" in attrs]
    assert "default-src 'none'" in str(policies[0]["content"])


def test_every_link_leads_to_a_page(pages: dict[str, Page]) -> None:
    for page in pages.values():
        for key, value in attributes(page):
            assert key != "href" or value in pages


def test_a_hostile_name_is_only_text(pages: dict[str, Page]) -> None:
    name = next(name for name in pages if "script" in name)
    for page in (pages[name], pages["index.html"]):
        assert "<script>alert(1)</script>\"' onload=x {{ 7*7 }}" in page.text
        assert "49" not in page.text.partition("onload=x")[2][:12]


def test_hostile_words_in_a_report_are_only_text(tmp_path: Path) -> None:
    result = report_of(FAILING).result
    cause = result.verdict.causes[0].model_copy(update={"title": HOSTILE, "change": HOSTILE})
    found = result.verdict.conditions[0].model_copy(
        update={"figure": HOSTILE, "threshold": HOSTILE, "question": HOSTILE}
    )
    verdict = result.verdict.model_copy(
        update={"summary": HOSTILE, "causes": [cause], "conditions": [found]}
    )
    assert not isinstance(result.evidence, OllamaEvidence)
    config = result.evidence.config.model_copy(update={"model": HOSTILE})
    versions = {"vllm": HOSTILE, HOSTILE: "1"}
    evidence = result.evidence.model_copy(update={"config": config, "versions": versions})
    reports.write_report(tmp_path, reports.make_report("a", [(verdict, evidence)], NOON))
    views = load_hosts(tmp_path)
    assert len(views[0].reports) == 1
    for text in (report_html.host_page(views[0]), report_html.fleet_page(views)):
        page = Page(text)
        assert "script" not in {tag for tag, _ in page.tags}
        assert not [key for key, _ in attributes(page) if key == "onload"]
    assert faults(junit(views)) == []


def test_a_hosts_page_shows_all_that_the_verdict_rests_on(pages: dict[str, Page]) -> None:
    page, latest = pages["host-web-1.html"], report_of(PASSING).verdict
    for condition in latest.conditions:
        assert condition.question in page.text
    for words in ("cache, files (L2)", "computed anew", "10.25 s", "8,200", "2026-03-02 12:00"):
        assert words in page.text, words
    assert page.text.count("PASS") >= 4 and len([t for t, _ in page.tags if t == "svg"]) == 3
    failed = pages[next(name for name in pages if "script" in name)]
    assert "docs/troubleshooting.md#evicted" in failed.text


def test_a_test_that_was_refused_has_no_charts_and_no_list_of_what_is_missing(
    pages: dict[str, Page],
) -> None:
    page = pages["host-gpu-7.html"]
    assert "svg" not in {tag for tag, _ in page.tags} and "missing" not in page.text
    assert "Nothing was asked" in page.text


def test_the_fleet_shows_the_worst_first(pages: dict[str, Page]) -> None:
    links = [v for k, v in attributes(pages["index.html"]) if k == "href"][:4]
    assert "script" in links[0]
    assert links[1:] == ["host-db-2.html", "host-gpu-7.html", "host-web-1.html"]


def test_pages_hold_no_digest_and_no_token_of_an_answer(pages: dict[str, Page]) -> None:
    evidence = report_of(PASSING).result.evidence
    assert not isinstance(evidence, OllamaEvidence)
    request = evidence.requests["cold"]
    for page in pages.values():
        assert request.prompt_digest not in page.text
        assert ", ".join(map(str, (request.output_tokens or [])[:3])) not in page.text


def several(*found: tuple[Event, str]) -> Report:
    """A report of more than one event, with the verdicts said."""
    results = []
    for event, case in found:
        one = report_of(case).result
        evidence = one.evidence.model_copy(update={"event": event})
        results.append((one.verdict.model_copy(update={"event": event}), evidence))
    return reports.make_report("web-1", results, NOON)


def test_every_event_is_shown_and_the_worst_stands(tmp_path: Path) -> None:
    reports.write_report(tmp_path, several(("runner", PASSING), ("reboot", FAILING)))
    (view,) = load_hosts(tmp_path)
    page = Page(report_html.host_page(view))
    assert view.standing == "FAIL" and "the worst of 2 events" in page.text
    for words in ("restart of the runner", "reboot of the host", "Conditions: reboot of the host"):
        assert words in page.text
    fleet = Page(report_html.fleet_page([view]))
    assert "PASS restart of the runner FAIL reboot of the host reboot of the host:" in fleet.text
    assert len([tag for tag, _ in fleet.tags if tag == "svg"]) == 2  # of the event that decides
    cases = list(ElementTree.fromstring(junit([view])).iter("testcase"))
    assert [(c.find("failure") is None, c.attrib["name"]) for c in cases] == [
        (True, "KV cache survives: restart of the runner"),
        (False, "KV cache survives: reboot of the host"),
    ]


def test_every_event_has_a_title() -> None:
    assert set(report_views.EVENT_TITLES) == {*EVENTS, "command", "none"}


# -- charts -----------------------------------------------------------------------------------


def test_bars_are_as_long_as_their_figures() -> None:
    rows = [
        report_svg.Bar("cold", [("cold", 10.0)], "10 s"),
        report_svg.Bar("warm", [("computed", 1.0), ("l2", 4.0)], "5 s"),
        report_svg.Bar("none", [], "-"),
    ]
    svg = ElementTree.fromstring(report_svg.bars("<t>", rows))
    rails = [r for r in svg.iter("rect") if r.attrib["class"] == "rail"]
    widths = {r.attrib["class"]: float(r.attrib["width"]) for r in svg.iter("rect")}
    assert len(rails) == 3
    assert widths["cold"] == widths["rail"] == pytest.approx(2.5 * widths["l2"], rel=1e-3)
    left = {r.attrib["class"]: float(r.attrib["x"]) for r in svg.iter("rect")}
    assert left["l2"] == pytest.approx(left["computed"] + widths["computed"], abs=0.1)
    assert svg.attrib["aria-label"] == "<t>"


def test_a_history_has_gaps_where_nothing_was_measured() -> None:
    values: list[float | None] = [1.0, 2.0, None, 3.0, 4.0]
    points = [report_svg.Point("x", {"cold": v}, "pass") for v in values]
    svg = ElementTree.fromstring(report_svg.history("h", points, ("cold",)))
    lines = [len(line.attrib["points"].split()) for line in svg.iter("polyline")]
    assert lines == [2, 2]
    assert len(list(svg.iter("circle"))) == 4 and len(list(svg.iter("path"))) == 5


@pytest.mark.parametrize(
    ("largest", "top"),
    [(0.0, "1 s"), (0.7, "0.75 s"), (10.25, "15 s"), (10.0, "10 s"), (0.004, "0.005 s")],
)
def test_the_axis_ends_at_a_round_number_above_all(largest: float, top: str) -> None:
    point = report_svg.Point("x", {"cold": largest}, "fail")
    svg = ElementTree.fromstring(report_svg.history("h", [point], ("cold",)))
    texts = [t.text for t in svg.iter("text")]
    assert texts[2] == top
    assert all(float(c.attrib["cy"]) >= 12 for c in svg.iter("circle"))


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")
def test_a_real_browser_shows_the_page(kept: Path, tmp_path: Path) -> None:
    assert run("--html", str(tmp_path / "html"))[0] == 0
    shown = subprocess.run(
        [
            str(CHROMIUM),
            "--headless=new",
            "--no-sandbox",  # a test as root; the page is our own
            "--disable-gpu",
            f"--user-data-dir={tmp_path / 'profile'}",
            "--dump-dom",
            (tmp_path / "html" / "host-web-1.html").as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    assert "restart of both services" in shown and shown.count("<svg") == 3
