"""Verdicts as JUnit XML, for people's CI.

A host is a testsuite, an event a testcase, its conditions are the testcase's properties. FAIL is a
<failure>. INCONCLUSIVE is an <error>, never <skipped>: a CI counts a skipped test as good, and a
test that cannot tell is not. A newest report that cannot be read is an <error>, too, and a host
that was removed or changed after it. NO_BY_DESIGN
is <skipped>, for nothing could be tested, unless what is asked of such a host is not so.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime
from xml.etree import ElementTree

from kvhost.reports.kept import TIME_FORMAT, Report
from kvhost.reports.views import EventView, HostView, event_views
from kvhost.verdict.view import figure_text

#: Characters that XML 1.0 cannot hold, not even escaped.
_NO_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
ANSWERS = {True: "met", False: "not met", None: "not known"}


def _plain(text: str) -> str:
    return _NO_XML.sub("\ufffd", text)


def _element(parent: ElementTree.Element, tag: str, **attributes: str) -> ElementTree.Element:
    plain = {key.rstrip("_"): _plain(value) for key, value in attributes.items()}
    return ElementTree.SubElement(parent, tag, plain)


def _properties(parent: ElementTree.Element, pairs: Sequence[tuple[str, str]]) -> None:
    place = _element(parent, "properties")
    for name, value in pairs:
        _element(place, "property", name=name, value=value)


def _case(suite: ElementTree.Element, host: str, event: EventView) -> None:
    name = f"KV cache survives: {event.title}"
    case = _element(
        suite, "testcase", classname=f"kvhost.{host}", name=name, time=f"{event.seconds:.3f}"
    )
    pairs = [("event", event.name), ("persisted", event.persisted), ("worth_it", event.worth_it)]
    pairs += [(f"ttft_{role}_s", f"{s:.3f}") for role, s in event.ttft.items() if s is not None]
    for c in event.conditions:
        value = f"{ANSWERS[c.met]}: {figure_text(c.figure)}, needed: {c.threshold}"
        pairs.append((f"condition.{c.id}", value))
    _properties(case, pairs)
    if event.persisted == "PASS":
        return
    open_ = [c.met for c in event.conditions if c.weight == "fail" and c.met is not True]
    if event.persisted == "NO_BY_DESIGN" and not open_:
        _element(case, "skipped", message=event.summary)  # nothing could be tested
        return
    tag = "failure" if event.persisted == "FAIL" or False in open_ else "error"
    causes = [f"{c.title}\n  {c.change}\n  {c.link}" for c in event.causes]
    slug = event.causes[0].slug if event.causes else "no-cause-named"
    place = _element(case, tag, message=event.summary, type=slug)
    place.text = _plain("\n".join([event.summary, *causes]))


def _suite(root: ElementTree.Element, view: HostView) -> None:
    suite = _element(root, "testsuite", name=view.host)
    report = view.stands
    if report is not None and view.since is None:
        _fill(suite, view, report)
    if view.since is not None:
        name = "the verdict is of what is there"
        case = _element(suite, "testcase", classname=f"kvhost.{view.host}", name=name, time="0")
        _element(case, "error", message=f"this host was {view.since.words}", type="of-before")
    if view.latest_unreadable:
        name = "the newest report can be read"
        case = _element(suite, "testcase", classname=f"kvhost.{view.host}", name=name, time="0")
        message = f"not a report: {view.unreadable[-1].name}"
        _element(case, "error", message=message, type="report-unreadable")
    cases = suite.findall("testcase")
    suite.set("tests", str(len(cases)))
    for counted, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(counted, str(len(suite.findall(f"testcase/{tag}"))))
    suite.set("time", f"{sum(float(case.get('time', '0')) for case in cases):.3f}")


def _fill(suite: ElementTree.Element, view: HostView, report: Report) -> None:
    at = datetime.strptime(report.time, TIME_FORMAT)
    suite.set("timestamp", at.isoformat())  # without a zone, as the schema wants it: UTC
    suite.set("hostname", _plain(report.host))
    pairs = [(f"version.{name}", text) for name, text in report.versions.items()]
    pairs += [("later_test_left_out", view.left_out.time)] if view.left_out else []
    _properties(suite, pairs)
    for event in event_views(report):
        _case(suite, report.host, event)


def junit(hosts: Sequence[HostView]) -> str:
    """The report that stands of every host as one JUnit document."""
    root = ElementTree.Element("testsuites", {"name": "kvhost"})
    for view in hosts:
        _suite(root, view)
    for counted in ("tests", "failures", "errors", "skipped"):
        root.set(counted, str(sum(int(suite.get(counted, "0")) for suite in root)))
    root.set("time", f"{sum(float(suite.get('time', '0')) for suite in root):.3f}")
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, "unicode") + "\n"
