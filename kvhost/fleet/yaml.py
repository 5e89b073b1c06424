"""fleet.yaml as YAML: read with its lines; whatever cannot be read of it is one clear fault."""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from kvhost.basics import printable
from kvhost.schema.problems import holds_a_secret

#: a fleet of 10,000 hosts is about 1 MB; more is another file, and its reading takes minutes
LONGEST = 4 * 2**20
#: values, counting again what an anchor repeats: a few lines of aliases can stand for billions
MOST_VALUES = 500_000


@dataclass(frozen=True)
class Fault:
    """One thing wrong in the file: its line (from 1), the key as hosts.NAME.KEY, what to write."""

    line: int
    key: str
    what: str
    write: str


def _hidden(fault: Fault) -> Fault:
    """A secret may stand where nobody expects it, as an address or the name of a file."""
    if not holds_a_secret([fault.what, fault.write]):
        return fault
    what = "holds what looks like a secret (not shown), and a secret never stands in this file"
    return Fault(fault.line, fault.key, what, "{env: NAME} or {file: secrets/NAME}")


class FleetError(ValueError):
    """Every fault of a fleet.yaml; `str()` is the list for people."""

    def __init__(self, path: Path, faults: Sequence[Fault]) -> None:
        self.path = path
        self.faults = tuple(sorted(map(_hidden, faults), key=lambda f: (f.line, f.key)))
        noun = "problem" if len(faults) == 1 else "problems"
        lines = [f"{len(faults)} {noun} in {path}. No host was reached."]
        for fault in self.faults:
            lines.append(f"{path.name}:{fault.line}: {fault.key}: {fault.what}")
            lines.append(f"   write: {fault.write}")
        super().__init__("\n".join(lines))


def yaml() -> YAML:
    """Reads and writes with comments and order kept."""
    made = YAML(typ="rt")
    made.preserve_quotes = True
    made.width = 1000
    return made


def read_yaml(path: Path) -> CommentedMap:
    """The file as a mapping, with its lines. Raises FleetError."""
    try:
        root = yaml().load(_text(path))
    except FleetError:
        raise
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise _unusable(path, _words(error), "YAML (docs/fleets.md)", mark) from None
    except UnicodeDecodeError:
        raise _unusable(path, "is not UTF-8", "the file anew, as UTF-8") from None
    except RecursionError:
        raise _unusable(path, "is nested too deeply", "YAML (docs/fleets.md)") from None
    except OSError as error:
        why = error.strerror or "cannot be read"
        raise _unusable(path, why, "kvhost init DIR makes one") from None
    except YAMLError:
        raise _unusable(path, "is not YAML", "YAML (docs/fleets.md)") from None
    except ValueError:
        what = "has a number far too large, or a date that there is not"
        raise _unusable(path, what, "text in quotes") from None
    if root is None:
        return CommentedMap()
    if not isinstance(root, CommentedMap):
        raise _unusable(path, "must begin with a key", "hosts:")
    return root


def _text(path: Path) -> str:
    """Raises OSError, UnicodeDecodeError, FleetError."""
    about = path.stat()
    if not stat.S_ISREG(about.st_mode):  # a pipe would be waited for
        raise _unusable(path, "is not a regular file", "kvhost init DIR makes one")
    if about.st_size > LONGEST:
        raise _unusable(path, f"has {about.st_size} bytes; at most {LONGEST}", "several files")
    return path.read_text(encoding="utf-8-sig")


def _unusable(path: Path, what: str, write: str, mark: Any = None) -> FleetError:
    return FleetError(path, [Fault(mark.line + 1 if mark else 1, "the file", what, write)])


def _words(error: MarkedYAMLError) -> str:
    """What is wrong, without the values that ruamel quotes: one of them may be a secret."""
    words = " ".join(str(error.problem or error.context).split("\n", 1)[0].split())
    twice = re.match(r'found duplicate key "([A-Za-z0-9_.-]{1,61})" with value ', words)
    if twice:
        words = f"{twice[1]} stands there twice"
    elif words.startswith("found duplicate key"):
        words = "a key stands there twice"
    return "is not YAML" if holds_a_secret(words) else printable(words)


def plain(root: CommentedMap, path: Path) -> Any:
    """Without what ruamel hangs on: dict, list, str, int, float, bool, None; dates stay.

    Raises FleetError if it holds itself, or more than MOST_VALUES.
    """
    try:
        return _plain(root, iter(range(MOST_VALUES)))
    except RecursionError:
        what = "something holds itself by an anchor, or is nested too deeply"
    except OverflowError:
        what = f"has more than {MOST_VALUES} values, with what its anchors repeat"
    raise _unusable(path, what, "it without anchors")


def _plain(node: Any, left: Iterator[int]) -> Any:
    if next(left, None) is None:
        raise OverflowError
    if isinstance(node, Mapping):
        return {str(k) if isinstance(k, str) else k: _plain(v, left) for k, v in node.items()}
    if isinstance(node, (list, tuple)):
        return [_plain(item, left) for item in node]
    for kind in (str, float):
        if isinstance(node, kind):
            return kind(node)
    if isinstance(node, int) and not isinstance(node, bool):
        return int(node)
    return node


def line_of(root: CommentedMap, loc: Sequence[Any]) -> int:
    """Line (from 1) of the deepest key of ``loc`` that is in the file."""
    line, node = 1, root
    for step in loc:
        try:
            if isinstance(node, CommentedMap) and step in node:
                line = node.lc.key(step)[0] + 1
            elif isinstance(node, CommentedSeq) and isinstance(step, int) and step < len(node):
                line = node.lc.item(step)[0] + 1
            else:
                break
        except (KeyError, TypeError):  # merged in by <<, which has no line of its own
            break
        node = node[step]
    return line
