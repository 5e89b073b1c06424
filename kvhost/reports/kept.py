"""Verdicts kept at home: reports/HOST/TIME.json, schema kvhost/verdict/2; version 1 is still read.

The published JSON schema is docs/schema/verdict-2.json; `python -m kvhost.reports.kept` prints it.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from kvhost import __version__
from kvhost.basics import SUMMARY_VARIABLE, host_folder, text_of
from kvhost.llama.evidence import LlamaEvidence
from kvhost.ollama.facts import OllamaEvidence
from kvhost.records import journal
from kvhost.verdict.evidence import Evidence
from kvhost.verdict.foreign_evidence import ForeignEvidence
from kvhost.verdict.types import Persisted, Verdict, worst
from kvhost.working_copy import root

#: bytes: more than any report has
_ROOM = 2**20
TIME_FORMAT = "%Y-%m-%dT%H%M%SZ"  # UTC; no colons, so that every filesystem takes it


def reports_dir() -> Path:
    """Where verdicts are kept: reports/ of the working copy, or KVHOST_REPORTS."""
    given = os.environ.get("KVHOST_REPORTS")
    return Path(given) if given else root() / "reports"


def check_writable(folder: Path) -> None:
    """Raises OSError if no report could be kept there: asked before a server is restarted."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(_ROOM))  # a full disk takes the file, and not what is in it
        file.flush()


def tell_summary(host: str, **verdict: str) -> None:
    """For the command that started this run, if it asked: that a host is run, and later the
    verdict that stands for it (persisted, time)."""
    if "persisted" in verdict:
        journal.tell("verdict", host=host, persisted=verdict["persisted"])
    if "rolled_back" in verdict:
        journal.tell(
            "why", host=host, why=f"went back to what passed last: {verdict['rolled_back']}"
        )
    name = os.environ.get(SUMMARY_VARIABLE)
    if name:
        with Path(name).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"host": host, **verdict}) + "\n")


class Result(BaseModel):
    """One event of the test: its verdict with the evidence it rests on."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    verdict: Verdict
    evidence: Evidence | ForeignEvidence | LlamaEvidence | OllamaEvidence = Field(
        discriminator="schema_"
    )


class Report(BaseModel):
    """One run of the test on one host: every event that was tested, in order; ``persisted`` is the
    worst of them. Holds no prompt and no key."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    schema_: Literal["kvhost/verdict/2"] = Field(default="kvhost/verdict/2", alias="schema")
    host: str
    time: str = Field(pattern=r"^\d{4}-\d\d-\d\dT\d{6}Z$")
    persisted: Persisted
    results: list[Result] = Field(min_length=1)
    versions: dict[str, str]
    receipt: str | None = Field(
        default=None,
        description="SHA-256 of the receipt of the host that was tested; null: not known.",
    )

    @model_validator(mode="before")
    @classmethod
    def _from_version_1(cls, data: Any) -> Any:
        """Version 1 held one verdict with its evidence, of the event "both"."""
        if not isinstance(data, dict) or data.get("schema") != "kvhost/verdict/1":
            return data
        rest = {k: v for k, v in data.items() if k not in ("schema", "verdict", "evidence")}
        verdict = data.get("verdict")
        persisted = verdict.get("persisted") if isinstance(verdict, dict) else None
        result = {"verdict": verdict, "evidence": data.get("evidence")}
        return {**rest, "persisted": persisted, "results": [result]}

    @model_validator(mode="after")
    def _is_the_worst(self) -> Report:
        if self.persisted != worst(one.verdict.persisted for one in self.results):
            raise ValueError(f"persisted is {self.persisted}, but that is not the worst result")
        for one in self.results:
            if one.verdict.event != one.evidence.event:
                raise ValueError(
                    f"verdict on {one.verdict.event}, evidence of {one.evidence.event}"
                )
        return self

    @property
    def result(self) -> Result:
        """The one that decides: the first of those with the worst verdict."""
        return next(one for one in self.results if one.verdict.persisted == self.persisted)

    @property
    def verdict(self) -> Verdict:
        """The verdict that decides, see ``result``."""
        return self.result.verdict

    @property
    def exit_code(self) -> int:
        """Of the verdict that decides; 0 is PASS alone."""
        return self.verdict.exit_code

    @property
    def left_out(self) -> bool:
        """Whether a test was left out because the server was in use, and what was tested before it
        all passed: such a run takes nothing away from an earlier verdict."""
        refused = [one for one in self.results if one.evidence.refused is not None]
        tested = [one for one in self.results if one.evidence.refused is None]
        return bool(refused) and all(one.verdict.persisted == "PASS" for one in tested)


def standing(newest_first: Iterable[Report | None]) -> tuple[Report | None, Report | None]:
    """The report whose verdict stands, and the newest one if that was left out since.

    A verdict stands for the receipt it was given for, and for no other: where a receipt is another
    or is not known, the newest report stands. None in ``newest_first`` is a file that is no report,
    behind which nothing stands.
    """
    reports = iter(newest_first)
    newest = next(reports, None)
    if newest is None or not newest.left_out:
        return newest, None
    for earlier in reports:
        if earlier is None:
            break
        if not earlier.left_out:
            same = earlier.receipt is not None and earlier.receipt == newest.receipt
            return (earlier, newest) if same else (newest, None)
    return newest, None


def make_report(
    host: str,
    results: Sequence[tuple[Verdict, Evidence | ForeignEvidence | LlamaEvidence | OllamaEvidence]],
    at: datetime,
    receipt: str | None = None,
) -> Report:
    """A report of one run, at least one event; ``at`` must carry a time zone. ``receipt``: SHA-256
    of what the host's receipt says."""
    versions = {"kvhost": __version__}
    for _, evidence in results:
        versions |= evidence.versions
    return Report(
        host=host,
        time=at.astimezone(UTC).strftime(TIME_FORMAT),
        persisted=worst(verdict.persisted for verdict, _ in results),
        results=[Result(verdict=verdict, evidence=evidence) for verdict, evidence in results],
        versions=versions,
        receipt=receipt,
    )


def write_report(folder: Path, report: Report) -> Path:
    """Writes reports/HOST/TIME.json atomically, 0600 in a folder 0700; never replaces a report.

    Raises OSError, FileExistsError among them.
    """
    place = folder / host_folder(report.host)
    place.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = place / f"{report.time}.json"
    handle, name = tempfile.mkstemp(dir=place, suffix=".tmp")  # 0600 by mkstemp
    temporary = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(report.model_dump_json(by_alias=True, indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.link(temporary, path)  # unlike rename, fails when the name is taken
    finally:
        temporary.unlink()
    return path


def list_reports(folder: Path, host: str | None = None) -> list[Path]:
    """Paths of the reports of one host or of all, oldest first; empty when there are none."""
    pattern = f"{host_folder(host)}/*.json" if host is not None else "*/*.json"
    return sorted(folder.glob(pattern), key=lambda path: (path.stem, path.parent.name))


def load_report(path: Path) -> Report:
    """Raises OSError, or pydantic.ValidationError for another schema or a damaged file."""
    return Report.model_validate_json(text_of(path))


def why_no_report(path: Path) -> str:
    """Why a file does not count as a report of the host whose folder it is in, on one line."""
    try:
        report = load_report(path)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        return f"{where}: {first['msg']}" if where else str(first["msg"]).split("\n", 1)[0]
    except (OSError, ValueError) as error:
        return str(error).split("\n", 1)[0]
    return f"it is a report of {report.host!r}"


def latest_report(folder: Path, host: str) -> Report | None:
    """The newest report of a host, None when there is none. Raises as load_report does."""
    found = list_reports(folder, host)
    return load_report(found[-1]) if found else None


def standing_report(folder: Path, host: str) -> tuple[Report | None, Report | None]:
    """As standing(), of the reports kept of a host; older ones are read only where they count.

    Raises as load_report does for the newest.
    """
    return standing(newest_first(list_reports(folder, host)))


def newest_first(paths: Sequence[Path]) -> Iterable[Report | None]:
    """The reports of one host, read as they are asked for; None for a file that is none of its.

    Raises OSError or ValueError (why_no_report tells) where that is the newest.
    """
    for path in reversed(paths):
        try:
            report = load_report(path)
            if host_folder(report.host) != path.parent.name:  # moved here by hand
                raise ValueError(f"it is a report of {report.host!r}")
        except (OSError, ValueError):
            if path == paths[-1]:
                raise
            yield None
        else:
            yield report


def json_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a report file."""
    schema = Report.model_json_schema(by_alias=True, mode="serialization")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


if __name__ == "__main__":
    json.dump(json_schema(), sys.stdout, indent=1, sort_keys=True)
    sys.stdout.write("\n")
