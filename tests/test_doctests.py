"""The examples in the texts of kvhost's modules are true."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

REPO = Path(__file__).parents[1]
#: those of onhost/ are loaded by the names that they have beside each other
MODULES = [
    ".".join(path.relative_to(REPO).with_suffix("").parts)
    for path in sorted((REPO / "kvhost").rglob("*.py"))
    if "\n    >>> " in path.read_text(encoding="utf-8") and path.parent.name != "onhost"
]


def test_there_are_examples() -> None:
    assert "kvhost.basics" in MODULES


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_are_true(name: str) -> None:
    found = doctest.testmod(importlib.import_module(name))
    assert found.attempted and not found.failed
