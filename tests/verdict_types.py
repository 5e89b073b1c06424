"""A case of the judge."""

from __future__ import annotations

from dataclasses import dataclass

from tests.verdict_edits import Edit


@dataclass(frozen=True)
class Case:
    name: str
    persisted: str
    edit: Edit = lambda e: None
    cause: str | None = None  # the first one named
    base: str = "healthy-fs_native"
    said: str | None = None  # words of the summary
    contradiction: str | None = None  # figure of the condition "agrees"
