"""Settings that are each fine and together are not: one short check a rule, all of them run."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from kvhost.basics import API_KEY_VARIABLE, SHARED_PASSWORD_VARIABLE
from kvhost.paths import HostPaths
from kvhost.schema.drive_combinations import drive_problems
from kvhost.schema.driver_values import driver_problems
from kvhost.schema.native_combinations import native_problems
from kvhost.schema.ollama_combinations import ollama_problems
from kvhost.schema.problems import Problem
from kvhost.schema.runner_combinations import runner_problems
from kvhost.schema.runner_kinds import kind_problems
from kvhost.schema.shared_values import shared_problems
from kvhost.schema.values import is_hub_id, is_loopback

if TYPE_CHECKING:
    from kvhost.schema.settings import Settings

ANSWER_TOKENS = 16  # the greedy tokens that the verdict compares, after the prompt


def combination_problems(
    settings: Settings, in_env: Collection[str]
) -> Iterator[tuple[frozenset[str], Problem]]:
    """Yield the keys that a rule looks at, and what is wrong with them together.

    ``in_env``: the variables with secrets that the controller's environment has.
    """
    for rule in (_model_store,) if settings.runner == "ollama" else _OF_A_TIER:
        yield from rule(settings)
    yield from _bundle(settings)
    yield from _key_beyond_loopback(settings, API_KEY_VARIABLE in in_env)
    yield from runner_problems(settings)
    yield from kind_problems(settings)
    yield from native_problems(settings)
    yield from ollama_problems(settings)
    yield from drive_problems(settings)
    yield from driver_problems(settings)
    yield from shared_problems(settings, SHARED_PASSWORD_VARIABLE in in_env)


_Found = Iterator[tuple[frozenset[str], Problem]]


def _found(keys: tuple[str, ...], what: str, write: str) -> tuple[frozenset[str], Problem]:
    return frozenset(keys), Problem(", ".join(keys), what, write)


def _watermarks(s: Settings) -> _Found:
    if not s.cache_low_watermark < s.cache_high_watermark:
        yield _found(
            ("cache_low_watermark", "cache_high_watermark"),
            f"low ({s.cache_low_watermark}) must be below high ({s.cache_high_watermark}): the "
            "pruner starts at the high one and stops at the low one",
            "cache_low_watermark = 0.85 and cache_high_watermark = 0.95",
        )


def _ports(s: Settings) -> _Found:
    ports = {"api_port": s.api_port, **s.cache_ports}
    ports |= {f"api_port of {one.name}": one.api_port for one in s.more_runners}
    for port in sorted(set(ports.values())):
        same = tuple(key for key, value in ports.items() if value == port)
        if len(same) > 1:
            free = next(n for n in range(8001, 9000) if n not in ports.values())
            keys = tuple(dict.fromkeys("more_runners" if " " in key else key for key in same))
            named = "" if keys == same else f"{' and '.join(same)}: "
            what = f"{named}all are {port}; each needs its own port"
            yield _found(keys, what, f"{same[-1]} = {free}")


def _revision(s: Settings) -> _Found:
    keys = ("model_source", "model_revision")
    example = "model_revision = '0123456789abcdef0123456789abcdef01234567'"
    if is_hub_id(s.model_source) and s.model_revision is None:
        yield _found(
            keys,
            f"{s.model_source!r} is a model on the hub (org/name), and without a commit other "
            "weights could come tomorrow and meet the cache of today",
            f"{example} (the model's page, Files, History), or an absolute path as model_source",
        )
    if not is_hub_id(s.model_source) and s.model_revision is not None:
        yield _found(
            keys,
            f"a commit means something only for org/name on the hub; {s.model_source!r} is known "
            "by the digest of its files",
            "model_revision left out",
        )


def _bundle(s: Settings) -> _Found:
    if s.engine_bundle is not None and s.engine_wheel is not None:
        yield _found(
            ("engine_bundle", "engine_wheel"),
            "a bundle holds what the lock names, and engine_wheel takes another wheel than that",
            "one of both left out",
        )


def _tier(s: Settings) -> _Found:
    if s.tier_dir is None:
        return  # it follows base_dir, or the drive, of which _drive_combinations judges
    base, tier = PurePosixPath(s.base_dir), PurePosixPath(s.resolved_tier_dir)
    keys = ("tier_dir", "base_dir")
    if base.is_relative_to(tier):
        yield _found(
            keys,
            f"{tier} is or holds base_dir, and the cache needs a directory that holds nothing else",
            f"tier_dir = '{base}/tier'",
        )
    elif tier.is_relative_to(base) and tier.relative_to(base).parts[0] in names_in_base():
        yield _found(
            keys,
            f"{tier} lies in {base / tier.relative_to(base).parts[0]}, where kvhost keeps "
            "something else",
            f"tier_dir = '{base}/tier'",
        )


def names_in_base() -> frozenset[str]:
    """First names below base_dir that HostPaths gives to something else than the tier."""
    paths = HostPaths(base_dir="/b", tier_dir="/t")
    named = [name for name, kind in vars(HostPaths).items() if isinstance(kind, property)]
    all_of_them = [PurePosixPath(getattr(paths, name)) for name in named]
    return frozenset(path.parts[2] for path in all_of_them if path.is_relative_to("/b"))


def _model_dir(s: Settings) -> _Found:
    # A source that is no path is relative, and lies in nothing.
    model, tier = PurePosixPath(s.model_source), PurePosixPath(s.resolved_tier_dir)
    if model.is_relative_to(tier) or tier.is_relative_to(model):
        yield _found(
            ("model_source", "tier_dir", "base_dir"),
            f"the model ({model}) and the cache ({tier}) lie in each other, and the pruner removes "
            "files from the cache",
            "tier_dir = '/var/lib/kvhost/tier'",
        )


def _model_store(s: Settings) -> _Found:
    base, store = PurePosixPath(s.base_dir), PurePosixPath(s.resolved_model_dir)
    tier, keys = PurePosixPath(s.resolved_tier_dir), ("model_dir", "tier_dir", "base_dir")
    if s.model_dir is None and not s.claims_a_drive:
        return  # below base_dir, where _tier has judged
    if (s.model_dir is not None and store.is_relative_to(tier)) or tier.is_relative_to(store):
        yield _found(
            keys,
            f"the models ({store}) and the cache ({tier}) lie in each other, and the pruner "
            "removes files from the cache",
            f"model_dir = '{base}/models', or left out",
        )
    elif store.is_relative_to(base) and s.model_dir is not None:
        inside = (*store.relative_to(base).parts, "")[0]
        if inside in names_in_base() - {"models"} or not inside:
            yield _found(
                keys,
                f"{store} is, or lies in, a directory where kvhost keeps something else",
                f"model_dir = '{base}/models', or left out",
            )


def _verify_length(s: Settings) -> _Found:
    keys = ("verify_prompt_tokens", "chunk_size")
    if s.runner == "vllm" and s.verify_prompt_tokens < 2 * s.chunk_size:
        yield _found(
            keys,
            f"a prompt of {s.verify_prompt_tokens} tokens is less than two chunks of "
            f"{s.chunk_size}, too short to prove anything",
            f"verify_prompt_tokens = {2 * s.chunk_size + 8}",
        )
    longest = s.max_model_len - ANSWER_TOKENS
    if s.verify_prompt_tokens > longest:
        yield _found(
            ("verify_prompt_tokens", "max_model_len"),
            f"a prompt of {s.verify_prompt_tokens} tokens and an answer of {ANSWER_TOKENS} do not "
            f"fit into max_model_len {s.max_model_len}",
            f"verify_prompt_tokens = {longest} or less, or a larger max_model_len",
        )


def _verify_hit(s: Settings) -> _Found:
    cached = s.verify_prompt_tokens // s.chunk_size * s.chunk_size
    best = cached / s.verify_prompt_tokens
    if s.runner != "vllm":
        return  # it has no chunks
    # Shorter than two chunks is the other rule's to say.
    if s.verify_prompt_tokens >= 2 * s.chunk_size and best < s.verify_min_hit:
        yield _found(
            ("verify_min_hit", "verify_prompt_tokens", "chunk_size"),
            f"cannot be reached: only whole chunks are cached, at most {cached} of "
            f"{s.verify_prompt_tokens} tokens ({best:.3f}), and {s.verify_min_hit} is asked for",
            f"verify_prompt_tokens = {cached + 8}, or a lower verify_min_hit",
        )


#: of a runner whose KV lies in a tier
_OF_A_TIER = (
    _watermarks,
    _ports,
    _revision,
    _tier,
    _model_dir,
    _model_store,
    _verify_length,
    _verify_hit,
)


def _key_beyond_loopback(s: Settings, api_key_in_env: bool) -> _Found:
    if s.runner == "ollama":
        return  # its API asks for no key: _ollama_combinations.py
    if not is_loopback(s.api_host) and s.api_key_file is None and not api_key_in_env:
        yield _found(
            ("api_host", "api_key_file"),
            f"{s.api_host} can be reached from other machines, and no key is set",
            f"api_key_file = 'secrets/api_key' (a file on the controller), or {API_KEY_VARIABLE} "
            "in the controller's environment, or api_host = '127.0.0.1'",
        )
