"""What runs with a host's own Python starts with Python 3.9, the oldest that is promised."""

from __future__ import annotations

import ast
import builtins
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ONHOST = Path(__file__).parents[1] / "kvhost" / "onhost"
#: those named kvhost_* are loaded by the engine, whose Python is 3.11 or later
SCRIPTS = [path for path in sorted(ONHOST.glob("[a-z]*.py")) if path.stem[:7] != "kvhost_"]
#: keyword -> the call that has it only since 3.10
LATER = {"strict": "zip", "slots": "dataclass", "kw_only": "dataclass"}


def evaluated(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that Python evaluates: all but annotations, which stay text."""
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from evaluated(child)


def is_a_type(node: ast.expr) -> bool:
    """None, a class of Python's, a name as classes have it, or such a one with parameters."""
    if isinstance(node, ast.Subscript):
        return is_a_type(node.value)
    if isinstance(node, ast.Constant):
        return node.value is None
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    camel = name[:1].isupper() and not name.isupper()
    return camel or isinstance(getattr(builtins, name, None), type)


def too_new(text: str) -> list[str]:
    """What of a script Python 3.9 could not run."""
    found = []
    for node in evaluated(ast.parse(text, feature_version=(3, 9))):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            found += [ast.unparse(node)] * any(map(is_a_type, (node.left, node.right)))
        if isinstance(node, ast.Call):
            for word in node.keywords:
                if LATER.get(word.arg or "") == ast.unparse(node.func).rpartition(".")[2]:
                    found.append(ast.unparse(node))
    return found


def python39() -> str | None:
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    found = sorted(root.glob("versions/3.9.*/bin/python3.9"))
    return str(found[-1]) if found else shutil.which("python3.9")


@pytest.mark.parametrize(
    "text",
    [
        "A = tuple[int, str | None]",
        "A = Path | int",
        "A = typing.Any | None",
        "class B:\n    a = dict[str, int] | None",
        "def f(a=int | None): pass",
        "def f(a): return isinstance(a, Path | int)",
        "zip([], [], strict=True)",
        "@dataclass(frozen=True, slots=True)\nclass C: pass",
    ],
)
def test_what_is_too_new_is_found(text: str) -> None:
    assert too_new(text)


def test_what_is_not_too_new_is_let_through() -> None:
    assert not too_new(
        "A = os.O_RDONLY | os.O_CLOEXEC | FLAG\nb = {} | dict(a=1) | c\nd = a[0] | 1"
    )
    assert not too_new("a: int | None = None\ndef f(a: int | None) -> str | None: pass")
    with pytest.raises(SyntaxError):
        too_new("match 1:\n    case 1: pass")


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_nothing_is_evaluated_that_python_3_9_lacks(path: Path) -> None:
    assert too_new(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_it_starts_with_python_3_9(path: Path) -> None:
    python = python39()
    if python is None:
        pytest.skip("no python3.9 here, neither in PATH nor of pyenv")
    argv = [python, "-E", "-s", "-S", "-B", str(path), "--help"]
    done = subprocess.run(
        argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
