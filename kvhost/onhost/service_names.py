"""The services of a host by name, from what lies in its etc/; the scripts beside it import it."""

from __future__ import annotations

import os
import re

ORDER = ("cache", "runner", "pruner")
#: in etc/, of runners beside the first (services/runners.py): description, unit, configuration
FURTHER = re.compile(r"(?:(runner-\w+)\.json|kvhost-runner-\w+\.service|vllm-\w+\.yaml)")


def further(base: str) -> tuple[str, ...]:
    """The runners beside the first that have a description."""
    try:
        names = sorted(os.listdir(os.path.join(base, "etc")))
    except FileNotFoundError:
        return ()
    matches = (FURTHER.fullmatch(name) for name in names)
    return tuple(match.group(1) for match in matches if match and match.group(1))


def names(base: str) -> tuple[str, ...]:
    """All services in the order of their start."""
    return (*ORDER[:-1], *further(base), ORDER[-1])
