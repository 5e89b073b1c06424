"""Looks at a host: all that a run's operations will ask are answered in one round trip.

An answer counts until this run changes the host; the next operation that asks then has those that
are still to come answered anew, in one trip again. What was not foreseen is asked by itself. So the
list of what is foreseen decides how long a run takes, never what it does.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pyinfra import host
from pyinfra.api import FactBase
from typing_extensions import override

from deploys.common.facts import unreadable
from deploys.common.reasons import end_of
from deploys.common.sent import LOOKS, sent

#: ("argv", word, …), ("user", user, word, …), ("file", path) or ("text", path): see onhost/looks.py
Ask = tuple[str, ...]


class LooksText(FactBase[str]):
    """What onhost/looks.py prints; the script and the request travel with the command."""

    @override
    def command(self, request: str) -> str:
        packed = gzip.compress(request.encode(), mtime=0)
        files = {"request.gz": base64.encodebytes(packed).decode()}
        return sent(LOOKS, '"$d/request.gz"', files)

    @staticmethod
    @override
    def default() -> str:
        return ""


class NotLooked(Exception):
    """Nothing was looked at, and why: the lock is another's, or the host gave no answer."""


@dataclass
class Looks:
    """What is known of one host in one run."""

    lock_path: str | None = None
    #: what the operations will ask, in their order
    asks: tuple[Ask, ...] = ()
    #: arguments of `runlock.py take`, and what is done once it is taken
    take: tuple[str, ...] | None = None
    taken: Callable[[], None] | None = None
    locked: bool = False
    fresh: bool = False
    #: of ``asks``, the first that the operation at work has asked
    since: int | None = None
    answers: dict[Ask, Any] = field(default_factory=dict)
    lock: dict[str, Any] = field(default_factory=dict)

    def gather(self, asks: Iterable[Ask], *, take: bool = False) -> None:
        """One round trip. Raises NotLooked."""
        wanted = list(dict.fromkeys(asks))
        words = list(self.take or ()) if take else None
        request = {"asks": wanted, "lock": self.lock_path, "take": words}
        said = host.get_fact(LooksText, request=json.dumps(request))
        try:
            answer = json.loads(said.splitlines()[-1])
            if "refused" in answer:
                raise NotLooked(str(answer["refused"]))
            answers, lock = dict(zip(wanted, answer["answers"], strict=True)), answer["lock"]
        except (ValueError, LookupError, TypeError):
            raise NotLooked(end_of(said) or "no answer") from None
        self.told(answers, lock)
        if take:
            self.locked = True
            if self.taken is not None:
                self.taken()

    def told(self, answers: Mapping[Ask, Any], lock: dict[str, Any]) -> None:
        """What the host has just answered, and the state of its run lock after that."""
        if not self.fresh:
            self.answers.clear()
        self.answers.update(answers)
        self.lock, self.fresh = lock, True

    def answer(self, asked: Ask) -> Any:
        """Raises NotLooked."""
        place = self.asks.index(asked) if asked in self.asks else None
        if self.since is None:
            self.since = place
        if not self.fresh and place is not None:
            self.gather(self.asks[place:])
        elif not self.fresh or asked not in self.answers:
            self.gather([asked])
        return self.answers[asked]

    def take_lock(self) -> None:
        """The lock, and anew all that was looked at without it. Raises NotLooked."""
        self.fresh = False
        self.gather(self.asks[self.since :] if self.since is not None else (), take=True)


_looks: dict[str, Looks] = {}


def expect(looks: Looks) -> None:
    """From now on the looks of the host that is worked on are these."""
    _looks[host.name] = looks


def looks() -> Looks | None:
    """Those of the host that is worked on; None where no run began."""
    return _looks.get(host.name)


def ask(asked: Ask) -> Any:
    """The answer to one look, as onhost/looks.py gives it; None if none could be had."""
    try:
        return (looks() or Looks()).answer(asked)
    except NotLooked:
        return None


def ask_json(argv: tuple[str, ...]) -> dict[str, Any]:
    """The JSON that a command prints as its last line: {"status": ok or unreadable, "data", "why"}.

    "exit" is there when the command failed.
    """
    return json_of(ask(("argv", *argv)))


def json_of(answer: Any) -> dict[str, Any]:
    """The same of the answer to a command."""
    if answer is None:
        return unreadable("the command could not be run")
    lines = [line for line in answer["out"].splitlines() if line.strip()]
    if answer["exit"] != 0:
        why = " | ".join(lines[-3:]) or "no output"
        return {**unreadable(end_of(why)), "exit": answer["exit"]}
    if not lines:
        return unreadable("it printed nothing")
    return parsed(lines[-1])


def ask_json_file(path: str) -> dict[str, Any]:
    """A JSON file on the host; status "absent" when it is known not to be there."""
    answer = ask(("text", path))
    if answer is None:
        return unreadable("the file could not be asked for")
    if answer["status"] != "ok":
        return {"status": answer["status"], "why": answer["why"], "data": None}
    return parsed(answer["text"])


def ask_file(path: str) -> dict[str, Any] | None:
    """{"kind", "owner", "group", "mode", "sha256", "target"} of what lies there, or None."""
    answer: dict[str, Any] | None = ask(("file", path))
    return answer


def parsed(text: str) -> dict[str, Any]:
    try:
        return {"status": "ok", "why": None, "data": json.loads(text)}
    except ValueError:
        return unreadable(f"not JSON: {text[:200]}")
