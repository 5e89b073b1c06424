"""What is wrong with settings, in words: one problem, and the error that lists all of them.

A value is shown back only where it cannot be a secret: see `shown` and `names_a_secret`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

# Words of a key, split at "_", that say that its value is one nobody else may read.
_SECRET_WORDS = frozenset(
    {"apikey", "credential", "credentials", "key", "keys", "pass", "passphrase", "passwd"}
    | {"password", "pwd", "secret", "secrets", "token", "tokens"}
)
# What well-known secrets begin with: Hugging Face, OpenAI-style, GitHub, AWS, PEM, JWT, a header.
_SECRET_VALUE = re.compile(
    r"(?<![A-Za-z0-9])(?:hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|gh[pousr]_[A-Za-z0-9]{20,}"
    r"|github_pat_|AKIA[0-9A-Z]{12}|-----BEGIN |eyJ[A-Za-z0-9_-]{8,}\.|[Bb]earer )"
)
# Settings whose value may carry a secret although the name does not say so: a flag with a key in
# it, a URL with a password in it.
_NEVER_SHOWN = frozenset({"runner_extra_args", "engine_wheel"})
_LONGEST_SHOWN = 60


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: `key` (or several, comma-separated), what, and what to write."""

    key: str
    what: str
    write: str


class Refusal(ValueError):
    """Raised by the check of a single value; `write` is the right-hand side to write instead."""

    def __init__(self, what: str, write: object = None) -> None:
        super().__init__(what)
        self.what = what
        self.write = write


class CombinationError(ValueError):
    """Raised where every value is fine by itself and together they are not."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("; ".join(f"{p.key}: {p.what}" for p in problems))
        self.problems = tuple(problems)


class SettingsError(ValueError):
    """Every problem of every host; `str()` is the list for people.

    `problems` maps each distinct problem to the hosts that have it, in the order of the inventory.
    """

    def __init__(self, problems: Mapping[Problem, Sequence[str]], host_count: int) -> None:
        self.problems = {problem: tuple(hosts) for problem, hosts in problems.items()}
        self.host_count = host_count
        super().__init__(_listed(self.problems, host_count))


def _listed(problems: Mapping[Problem, Sequence[str]], host_count: int) -> str:
    noun = "problem" if len(problems) == 1 else "problems"
    lines = [f"{len(problems)} {noun} in the settings. Nothing was touched on any host."]
    for number, (problem, hosts) in enumerate(problems.items(), start=1):
        lines.append(f"{number}. {problem.key} ({_named(hosts, host_count)}): {problem.what}")
        lines.append(f"   write: {problem.write}")
    lines.append(
        "The lines after 'write:' are for group_data; on the command line it is --data key=value. "
        "docs/settings.md lists every setting."
    )
    return "\n".join(lines)


def _named(hosts: Sequence[str], host_count: int) -> str:
    if len(hosts) == host_count and host_count > 1:
        return f"all {host_count} hosts"
    return ("host " if len(hosts) == 1 else "hosts ") + ", ".join(hosts)


def names_a_secret(key: str) -> bool:
    """Whether the name alone says that the value is a secret, or the path to one."""
    words = re.split(r"[^a-z0-9]+", re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", key).lower())
    return not _SECRET_WORDS.isdisjoint(words)


def holds_a_secret(value: object) -> bool:
    """Whether a text, or any text in a list or dictionary, looks like a well-known secret."""
    left, seen = [value], set()  # no recursion: what a file says may be as deep as it likes
    while left:
        one = left.pop()
        if isinstance(one, str):
            if _SECRET_VALUE.search(one):
                return True
        elif isinstance(one, (Mapping, list, tuple, set, frozenset)) and id(one) not in seen:
            seen.add(id(one))
            left.extend(one)
            left.extend(one.values() if isinstance(one, Mapping) else ())
    return False


def shown(key: str, value: object) -> str:
    """The value as an error may show it: on one line, short, and never a secret."""
    kind = type(value).__name__
    if isinstance(value, int) and value.bit_length() > 128:
        return "a number far too large"  # and repr() refuses to write some of these
    if not isinstance(value, (str, int, float, type(None))):
        return f"a value of type {kind}"
    if key in _NEVER_SHOWN or names_a_secret(key) or holds_a_secret(value):
        return f"the {kind} given (not shown)"
    return short(value)


def short(value: object) -> str:
    """The value in quotes on one line (control characters escaped), cut where it is long."""
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else text[: _LONGEST_SHOWN - 3] + "..."


def nearest(name: str, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The most similar of `names` (0 to 1, at least `cutoff`), or None."""
    folded = name.lower().replace("-", "_").replace(" ", "_")
    close = difflib.get_close_matches(folded, sorted(names), n=1, cutoff=cutoff)
    return close[0] if close else None
