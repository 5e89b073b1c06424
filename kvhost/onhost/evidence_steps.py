#!/usr/bin/env python3
"""How both collectors of evidence run a step: its outcome recorded, and shown as a line.

Must lie beside evidence.py or evidence_foreign.py; it is of no use by itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvhost.onhost import evidence_probe as probe
else:  # on the host the files lie beside each other, in no package
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import evidence_probe as probe

#: the last one: the connection is gone
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
Json = dict[str, Any]


class Interrupted(BaseException):
    """A signal arrived; not an Exception, so that no step takes it for its own failure."""


class InUse(Exception):
    """Somebody else uses the server, and the config does not say to disrupt it."""


#: of what steps give back, in the words of who reads along
WORDS = {
    "usage_cached_tokens": "cached tokens",
    "busy": "requests now",
    "foreign": "requests of others",
    "own": "requests of kvhost's own",
    "finished": "requests so far",
}


def figures(shown: Any) -> str:
    """What a step gave, in short: "8.75 s, 0 cached tokens". What is not known is left out, as is
    what is itself a list or a table; all of it is in the evidence.

    >>> figures({"ttft_s": 8.754, "usage_cached_tokens": 0, "new_bytes": 69000000})
    '8.75 s, 0 cached tokens, 69.0 MB new'
    """
    if not isinstance(shown, dict):
        return "" if shown is None else str(shown)
    parts = []
    for key, value in shown.items():
        words = WORDS.get(key, key.replace("_", " "))
        if value is None or isinstance(value, (dict, list, tuple)):
            continue
        if key == "ttft_s":
            parts.append(f"{value:.2f} s")
        elif key.endswith("_s") and isinstance(value, (int, float)):
            parts.append(f"{words[:-2]} {value:.1f} s")
        elif words.endswith("bytes") and not isinstance(value, (bool, str)):
            parts.append(f"{value / 1e6:.1f} MB {words[:-5].strip()}".strip())
        elif isinstance(value, bool):
            parts.append(words if value else f"not {words}")
        elif isinstance(value, (int, float)) and key != "exit_code":
            if value == 1:
                words = words.replace("tokens", "token").replace("requests", "request")
            parts.append(f"{value:g} {words}")
        else:
            parts.append(f"{words} {value}")
    return ", ".join(parts)


def run_step(
    steps: list[Json], title: str, action: Callable[[], Any], key: str | None, head: str = ""
) -> bool:
    """Runs one step and adds its outcome to ``steps``; False when it failed.

    The line on stderr begins with ``head``; ``key`` is masked in it. Raises Interrupted and InUse,
    which end the collection.
    """
    started = time.monotonic()
    row: Json = {"name": title, "ok": False, "seconds": 0.0, "error": None}
    steps.append(row)
    shown: Any = None
    try:
        shown = action()
        row["ok"] = True
    except Interrupted as error:
        row["error"] = f"interrupted by {error}"
        raise
    except Exception as error:  # recorded for the judge, not swallowed
        row["error"] = probe.scrub(f"{type(error).__name__}: {error}", key, 1000)
        if isinstance(error, InUse):
            raise
    finally:
        row["seconds"] = round(time.monotonic() - started, 2)
        text = row["error"] or figures(shown)
        with contextlib.suppress(OSError):  # nobody listens any more; the test goes on
            line = f"{head}{title} ... {row['seconds']:.1f} s  {text}"
            print(line.rstrip(), file=sys.stderr, flush=True)
    return bool(row["ok"])
