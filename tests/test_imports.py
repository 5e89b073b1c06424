"""How the modules of kvhost/ import each other."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

REPO = Path(__file__).parents[1]


def test_any_module_of_kvhost_may_be_the_first_that_is_imported() -> None:
    """Modules that import each other can be loaded only by whoever begins at the right one."""
    files = {
        ".".join(path.relative_to(REPO).with_suffix("").parts): path
        for path in (REPO / "kvhost").rglob("*.py")
    }
    imported: dict[str, set[str]] = {}
    for name, path in files.items():
        names = imported[name] = set()
        for node in ast.parse(path.read_text()).body:  # not what a function imports
            if isinstance(node, ast.ImportFrom) and node.module:
                found = {f"{node.module}.{alias.name}" for alias in node.names}
                names |= {one if one in files else node.module for one in found}
    assert "kvhost.services.vllm" in imported["kvhost.services.describe"]
    TopologicalSorter(imported).prepare()  # a CycleError names them
