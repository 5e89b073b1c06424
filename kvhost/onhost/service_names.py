"""The services of a host by name, from what lies in its etc/; the scripts beside it import it."""

from __future__ import annotations

import os
import re

#: in the order of their start; which of them a host has follows from its runner (docs/runners.md)
ORDER = ("cache", "runner", "slots", "pruner")
#: what vLLM has in every case; the others are there where they have a description
ALWAYS = ("cache", "runner", "pruner")
#: in etc/, of runners beside the first (services/runners.py): description, unit, configuration
FURTHER = re.compile(r"(?:(runner-\w+)\.json|kvhost-runner-\w+\.service|vllm-\w+\.yaml)")
#: in etc/, what goes when it is wanted no more: those, and what another runner than vLLM has not
OPTIONAL = re.compile(
    rf"{FURTHER.pattern}|(?:cache|slots)\.json|kvhost-(?:cache|slots)\.service|vllm\.yaml"
)


def further(base: str) -> tuple[str, ...]:
    """The runners beside the first that have a description."""
    try:
        names = sorted(os.listdir(os.path.join(base, "etc")))
    except FileNotFoundError:
        return ()
    matches = (FURTHER.fullmatch(name) for name in names)
    return tuple(match.group(1) for match in matches if match and match.group(1))


def adopted(base: str) -> bool:
    """Whether the runner is an ollama.service of somebody else's, with a drop-in of kvhost's."""
    return os.path.exists(os.path.join(base, "etc", "ollama.conf"))


def names(base: str) -> tuple[str, ...]:
    """All services in the order of their start. Without any description, those of vLLM; none
    where a unit of somebody else's is adopted."""
    if adopted(base):
        return further(base)
    there = {name for name in ORDER if os.path.exists(os.path.join(base, "etc", f"{name}.json"))}
    if "runner" not in there or "cache" in there:
        there |= set(ALWAYS)
    first = [name for name in ORDER if name in there]
    return (*first[:-1], *further(base), first[-1])
