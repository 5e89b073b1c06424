"""Why an operation failed on a host, in one line: for the summary at the end of the run.

What was told wins over what a command said, and what came first over what came later: the rest is
what follows from it. No secret that this process knows of is in it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from pyinfra import logger

from kvhost.basics import printable
from kvhost.commands import run_log

if TYPE_CHECKING:  # a run connects before it loads what reads settings
    from kvhost.secrets import Secret

#: characters; the log of the run has the whole of it
LENGTH = 200
#: how a program begins the line with its reason, ours among them: "engine: no space is left"
_NAMED = re.compile(r"(?!(?:hint|info|note|warning):)[a-z_-]+: \S")

_told: dict[str, str] = {}
_heard: dict[str, str] = {}


def hide(secrets: Iterable[Secret | None]) -> None:
    """From now on none of these is in a reason, nor in the journal."""
    run_log.hide(one.get_secret_value() for one in secrets if one is not None)


def failed(host: Any, message: str) -> bool:
    """Says on the terminal why this host fails, and keeps it. False, for an operation to return."""
    host.log_styled(message, fg="red", log_func=logger.error)
    because(host.name, message)
    return False


def because(host: str, reason: str) -> None:
    """Keeps a reason that was said already."""
    _told.setdefault(host, reason)


def listen(host: Any) -> None:
    """What commands that fail on this host say from now on is kept, for where nothing is told."""
    run: Callable[..., tuple[bool, Any]] = host.connector.run_shell_command

    def heard(*args: Any, **kwargs: Any) -> tuple[bool, Any]:
        try:
            ok, output = run(*args, **kwargs)
        except Exception as error:  # of whichever connector: the link is lost, it takes too long
            _heard[host.name] = f"{type(error).__name__}: {error}"
            raise
        if not ok:
            _heard[host.name] = last_words(output.stderr_lines) or last_words(output.stdout_lines)
        return ok, output

    host.connector.run_shell_command = heard


def last_words(lines: Iterable[str]) -> str:
    """The reason in what a program said before it failed: from the last line that begins with a
    program's name on, else the last line."""
    # "| " is how ready.py shows the end of a log, which follows the reason
    said = [
        s for line in lines if (s := line.strip()) and not s.startswith(("| ", "last lines of "))
    ]
    named = [n for n, line in enumerate(said) if _NAMED.match(line)]
    return " ".join(said[named[-1] :] if named else said[-1:])


def end_of(text: str, most: int = 600) -> str:
    """The last characters of what a program said; masked first, for half a secret is not known."""
    return run_log.of_process(os.environ)(text.strip())[-most:]


def forget(host: str) -> None:
    """Another operation begins."""
    _told.pop(host, None)
    _heard.pop(host, None)


def reason(host: str, env: Mapping[str, str]) -> str | None:
    """Why the operation at work on this host failed; None where nobody said anything."""
    text = _told.get(host) or _heard.get(host)
    if not text:
        return None
    line = " ".join(run_log.of_process(env)(text).split())
    return printable(line if len(line) <= LENGTH else f"{line[: LENGTH - 1]}…")
