"""Settings that mean nothing, or too little is known of, with vLLM's own tiering."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvhost.schema.problems import Problem
from kvhost.schema.runner_args import could_mean, flag_name

if TYPE_CHECKING:
    from kvhost.schema.settings import Settings

#: of LMCache's server, which there is not, and why each would do nothing
_OF_THE_SERVER = {
    "l2_adapter": "vLLM writes its files itself",
    "cache_port": "there is no cache server to listen on it",
    "cache_http_port": "there is no cache server to listen on it",
    "heartbeat_s": "there is no cache server to be asked",
    "mq_timeout_s": "there is no cache server to be waited for",
    **dict.fromkeys(
        (
            *("shared_tier", "shared_tier_ca_file", "shared_tier_timeout_s"),
            *("shared_tier_access_key", "shared_tier_region"),
        ),
        "a shared tier is a second tier of LMCache's server",
    ),
}
_EVENTS = {
    "cache": "there is no cache server to restart",
    "both": "there is one service, the runner, and no cache server beside it",
    "other": "a second vLLM beside the first is only tried with LMCache's server",
}

_HASH = "--prefix-caching-hash-algo"
_SIZE = "--data-parallel-size"
_EACH = (
    "each vLLM would have a memory of l1_gib of its own, and the sweep before the start of one "
    "would meet what another is writing"
)
_Found = Iterator[tuple[frozenset[str], Problem]]


def native_problems(s: Settings) -> _Found:
    """Yield the keys that a rule looks at, and what is wrong with them together."""
    if not s.native:
        return
    # a default that is written out asks for nothing
    fields = type(s).model_fields
    given = {key for key in s.model_fields_set if getattr(s, key) != fields[key].default}
    for key, why in _OF_THE_SERVER.items():
        if key in given:
            yield _found(key, f"means nothing with cache_kind native: {why}", f"{key} left out")
    if "verify_events" in given:
        for event in (one for one in s.verify_events if one in _EVENTS):
            yield _found(
                "verify_events",
                f"{event} is no event with cache_kind native: {_EVENTS[event]}",
                "verify_events left out (runner), or of runner, kill, reboot",
            )
    if any(could_mean(word, _HASH) for word in s.runner_extra_args):
        yield _found(
            "runner_extra_args",
            f"{_HASH} is not for cache_kind native: the names of the files are made with it, and "
            "with some (xxhash) they are others after every start",
            f"runner_extra_args without {_HASH}",
        )
    if any(map(_is_data_parallel, s.runner_extra_args)):
        yield _found(
            "runner_extra_args",
            f"{_SIZE}, and what belongs to it, is not for cache_kind native: {_EACH}",
            "runner_extra_args without it",
        )
    if s.more_runners:
        yield _found(
            "more_runners",
            f"cache_kind native is for one runner: {_EACH}",
            "more_runners left out, or cache_kind = 'mp'",
        )


def _is_data_parallel(word: str) -> bool:
    """By any of the flags for it, of which -dpa, -dpr … are the short ones."""
    name = flag_name(word)
    return could_mean(word, _SIZE) or name.startswith(("--data-parallel-", "-dp")) or name == "-d"


def _found(key: str, what: str, write: str) -> tuple[frozenset[str], Problem]:
    return frozenset((key, "cache_kind")), Problem(f"{key}, cache_kind", what, write)
