#!/usr/bin/env python3
"""How both collectors of evidence run a step: its outcome recorded, and shown as a line.

Must lie beside evidence.py or evidence_foreign.py; it is of no use by itself.
"""

from __future__ import annotations

import contextlib
import json
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
        text = row["error"] or ("" if shown is None else json.dumps(shown))
        with contextlib.suppress(OSError):  # nobody listens any more; the test goes on
            line = f"{head}{title} ... {row['seconds']:.1f} s  {text}"
            print(line.rstrip(), file=sys.stderr, flush=True)
    return bool(row["ok"])
