"""Runners and GPUs that are each fine and together are not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvhost.schema.problems import Problem, short
from kvhost.schema.runner_args import count_flag

if TYPE_CHECKING:
    from kvhost.schema.settings import Settings

#: of a GPU that runners share: what CUDA contexts and fragmentation take beside their shares
MOST_SHARED = 0.95

_Found = Iterator[tuple[frozenset[str], Problem]]


def runner_problems(s: Settings) -> _Found:
    """Yield the keys that a rule looks at, and what is wrong with them together."""
    yield from _names(s)
    yield from _bounds(s)
    yield from _counts(s)
    yield from _shares(s)
    yield from _tested(s)


def _tested(s: Settings) -> _Found:
    names = [entry.name for entry in s.more_runners]
    if s.verify_runner is not None and s.verify_runner not in names:
        there = f"there are {', '.join(names)}" if names else "there is only the first"
        yield _found(
            ("verify_runner", "more_runners"),
            f"no further runner is called {short(s.verify_runner)}; {there}",
            f"verify_runner = {names[0]!r}" if names else "verify_runner left out",
        )


def _names(s: Settings) -> _Found:
    names = [entry.name for entry in s.more_runners]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield _found(("more_runners",), f"two runners are called {name}", "a name for each")


def _bounds(s: Settings) -> _Found:
    for entry in s.more_runners:
        share, kv = entry.gpu_memory_share, entry.engine_kv_gib
        if share is not None and not 0 < share <= MOST_SHARED:
            what = f"gpu_memory_share of {entry.name} must be more than 0 and at most 0.95"
            yield _found(("more_runners",), what, "gpu_memory_share = 0.45")
        if kv is not None and not 1 <= kv <= 4096:
            what = f"engine_kv_gib of {entry.name} must be at least 1 and at most 4096 GiB"
            yield _found(("more_runners",), what, "engine_kv_gib = 1")


def _gpus(s: Settings) -> dict[str, tuple[tuple[str, ...], float | None]]:
    """Runner -> its GPUs and its share of their memory."""
    first = {"the runner": (tuple(s.gpus), s.gpu_memory_share)}
    return first | {
        f"the runner {entry.name}": (tuple(entry.gpus or ()), entry.gpu_memory_share)
        for entry in s.more_runners
    }


def _counts(s: Settings) -> _Found:
    pipeline = count_flag(s.runner_extra_args, "pipeline-parallel-size", "pp")
    needed = s.tensor_parallel_size * pipeline
    for who, (gpus, _) in _gpus(s).items():
        if gpus and len(gpus) != needed:
            keys = ("gpus", "tensor_parallel_size", "more_runners", "runner_extra_args")
            times = f" times --pipeline-parallel-size {pipeline}" if pipeline > 1 else ""
            yield _found(
                keys,
                f"{who} has {len(gpus)} GPUs and needs {needed} (tensor_parallel_size "
                f"{s.tensor_parallel_size}{times})",
                f"gpus with {needed} UUIDs for it, or another tensor_parallel_size",
            )


def _shares(s: Settings) -> _Found:
    users: dict[str, list[str]] = {}
    shares = _gpus(s)
    for who, (gpus, _) in shares.items():
        for gpu in gpus:
            users.setdefault(gpu, []).append(who)
    keys = ("gpus", "gpu_memory_share", "more_runners")
    for gpu, on_it in users.items():
        if len(on_it) < 2:
            continue
        given = [shares[one][1] for one in on_it]
        both = " and ".join(on_it)
        if None in given:
            yield _found(
                keys,
                f"{both} are on {gpu}, and each would take most of its memory",
                f"gpu_memory_share = {0.9 / len(on_it):.2f} for each of them, or a GPU for each",
            )
        elif (total := sum(share or 0 for share in given)) > MOST_SHARED:
            yield _found(
                keys,
                f"{both} share {gpu}, and their gpu_memory_share are {total:.2f} together, more "
                f"than {MOST_SHARED}",
                f"gpu_memory_share = {0.9 / len(on_it):.2f} for each of them",
            )


def _found(keys: tuple[str, ...], what: str, write: str) -> tuple[frozenset[str], Problem]:
    return frozenset(keys), Problem(", ".join(keys), what, write)
