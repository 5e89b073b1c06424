"""Bytes of KV cache: of a token, of a sequence, of a chunk's file. Pure; the one source of it.

Bytes are those of one rank unless a function says "all ranks". A rank is one GPU of tensor
parallelism: it keeps its share of the KV heads, or a copy of one where there are fewer heads than
ranks; a latent (MLA) is the same on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from kvhost.sizing.arch import Architecture
from kvhost.sizing.layer import Layer

#: bytes of one element of the KV cache, in vLLM
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
#: what vLLM computes in where a model says nothing of its dtype, or float32 (auto)
COMPUTED = "bfloat16"
#: llama.cpp's blocks of 32 elements, in bytes: the scale (and minimum) counted (ggml-common.h)
BLOCK_BYTES = {"q8_0": 34, "q5_1": 24, "q5_0": 22, "q4_1": 20, "q4_0": 18, "iq4_nl": 18}
BLOCK = 32
#: what vLLM keeps a recurrent state in (MambaDType)
STATE_DTYPES = ("float32", "float16", "bfloat16")
_ALIASES = {"fp16": "float16", "f16": "float16", "half": "float16", "bf16": "bfloat16",
            "fp32": "float32", "f32": "float32", "float": "float32"}  # fmt: skip
DTYPES = (*DTYPE_BYTES, *BLOCK_BYTES)
#: as --help says them
_SHOWN = ("bf16 (or bfloat16)", "fp16 (float16)", "fp32 (float32)", *DTYPES[3:])


class SizeError(ValueError):
    """A question that has no exact answer: what is wrong, and what to ask instead."""


def dtype_named(name: str) -> str:
    """The one name of a dtype. Raises SizeError for one that is not known."""
    found = _ALIASES.get(name.lower(), name.lower())
    if found not in DTYPES:
        raise SizeError(f"KV dtype {name!r} is not known; one of {', '.join(_SHOWN)}")
    return found


def state_dtype_named(name: str) -> str:
    """The one name of a recurrent state's dtype. Raises SizeError for one that vLLM has none of."""
    found = _ALIASES.get(name.lower(), name.lower())
    if found not in STATE_DTYPES:
        known = ", ".join(("auto", *STATE_DTYPES))
        raise SizeError(f"a state of dtype {name!r:.40}: vLLM keeps it in one of {known}")
    return found


def element_bytes(dtype: str) -> Fraction:
    """Bytes of one element of the cache, the scales of its block counted in."""
    if dtype in BLOCK_BYTES:
        return Fraction(BLOCK_BYTES[dtype], BLOCK)
    return Fraction(DTYPE_BYTES[dtype])


def attention_bytes(layers: int, kv_heads: int, head_size: int, dtype: str) -> int:
    """Bytes of a token where all layers are alike, all ranks: K and V of every head."""
    return int(2 * layers * kv_heads * head_size * element_bytes(dtype))


@dataclass(frozen=True)
class Part:
    """Layers alike, on one rank: ``per_token`` bytes of one token in all of them together."""

    kind: str
    layers: int
    per_token: int
    #: tokens that are kept, None for all
    window: int | None
    #: bytes of a sequence whatever its length (state)
    fixed: int
    #: bytes of a token in one layer, as a page of the engine has it
    layer_token: int
    layer_fixed: int


@dataclass(frozen=True)
class KvSize:
    """The cache of a model at a dtype, on each of ``ranks``."""

    parts: tuple[Part, ...]
    ranks: int
    dtype: str

    @property
    def per_token(self) -> int:
        """Bytes that the next token adds while no window is full; what is stored for each token
        (a stored chunk holds all layers that attend). Without the encoder's tokens."""
        return sum(part.per_token for part in self.parts if part.kind != "cross")

    @property
    def lasting(self) -> int:
        """Bytes that a further token of a long sequence adds: layers that keep every token."""
        return sum(part.per_token for part in self.parts if part.window is None)

    @property
    def fixed(self) -> int:
        """Bytes of a sequence that do not grow with it: states, and the encoder's tokens."""
        states = sum(part.fixed for part in self.parts)
        return states + sum(p.per_token * (p.window or 0) for p in self.parts if p.kind == "cross")

    def sequence(self, tokens: int) -> int:
        """Bytes of a sequence of so many tokens while it runs, without rounding to pages."""
        grown = sum(
            part.per_token * (tokens if part.window is None else min(tokens, part.window))
            for part in self.parts
            if part.kind != "cross"
        )
        return grown + self.fixed

    def stored(self, tokens: int) -> int:
        """Bytes of a prefix on the drive, all ranks: every token in every attending layer, and
        the state at its end."""
        return self.ranks * (self.per_token * tokens + self.fixed)

    def tokens_in(self, room: int) -> int | None:
        """Tokens of one sequence that fit into so many bytes; None: it never ends (no layer
        grows), 0: not one."""
        if self.sequence(1) > room:
            return 0
        if not self.lasting and self.sequence(1 << 40) <= room:
            return None
        low, high = 1, 2
        while self.sequence(high) <= room:
            low, high = high, high * 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.sequence(middle) <= room else (low, middle)
        return low


def size_of(
    architecture: Architecture,
    dtype: str,
    *,
    state_dtype: str,
    recurrent: str = "auto",
    ranks: int = 1,
) -> KvSize:
    """The cache of an architecture. ``dtype``: of K and V; ``state_dtype``: of what is computed,
    which states are kept in; ``recurrent``: vLLM's mamba_ssm_cache_dtype, "auto" is the model's.

    Raises SizeError when heads cannot be shared out over the ranks, or a row of a quantised cache
    is no multiple of its block.
    """
    if ranks < 1:
        raise SizeError(f"{ranks} ranks: 1 or more")
    if architecture.heads is not None and architecture.heads % ranks:
        raise SizeError(
            f"{architecture.heads} attention heads cannot be shared out over {ranks} GPUs; take a "
            f"divisor of {architecture.heads}"
        )
    states = (state_dtype, None if recurrent == "auto" else state_dtype_named(recurrent))
    parts = [_part(layer, dtype, states, ranks) for layer in architecture.layers]
    return KvSize(tuple(parts), ranks, dtype)


def _part(layer: Layer, dtype: str, states: tuple[str, str | None], ranks: int) -> Part:
    if layer.kind == "state":
        fixed = _state(layer, *states, ranks)
        return Part("state", layer.count, 0, 0, layer.count * fixed, 0, fixed)
    heads = layer.heads if layer.kind == "latent" else _share(layer.heads, ranks, "KV heads")
    each = layer.width if layer.kind == "latent" else layer.width // 2
    if dtype in BLOCK_BYTES and each % BLOCK:
        raise SizeError(
            f"{dtype} has blocks of {BLOCK} elements, and a row of this model has {each}: take f16"
        )
    token = int(heads * layer.width * element_bytes(dtype))
    return Part(layer.kind, layer.count, layer.count * token, layer.window, 0, token, 0)


def _share(heads: int, ranks: int, what: str) -> int:
    """Heads of one rank: a part of them, or a copy of one where ranks are more."""
    if heads % ranks and ranks % heads:
        raise SizeError(f"{heads} {what} cannot be shared out over {ranks} GPUs, nor repeated")
    return max(1, heads // ranks)


def _state(layer: Layer, dtype: str, recurrent: str | None, ranks: int) -> int:
    """Bytes of one layer's state of one sequence, one rank. Groups are repeated
    where they cannot be shared out (vLLM, mamba_utils.py)."""
    groups = layer.groups if layer.groups % ranks == 0 else ranks
    convolution = layer.convolution + groups * layer.group
    if layer.recurrent % ranks or convolution % ranks:
        raise SizeError(f"the state's channels cannot be shared out over {ranks} GPUs")
    element = element_bytes(recurrent or state_dtype_named(layer.recurrent_dtype or dtype))
    return int(convolution // ranks * element_bytes(dtype) + layer.recurrent // ranks * element)


@dataclass(frozen=True)
class Fit:
    """What fits into a place: tokens of one sequence, and sessions of a given length."""

    place: str
    room: int
    tokens: int | None
    sessions: int


def fit(place: str, kv: KvSize, room: int, session: int, *, stored: bool = False) -> Fit:
    """``room``: bytes, all ranks together if ``stored`` (RAM and drive), else of one rank."""
    if stored:
        each = max(1, kv.stored(session))
        left = room - kv.ranks * kv.fixed
        tokens: int | None = 0
        if left >= 0:
            tokens = left // (kv.ranks * kv.per_token) if kv.per_token else None
        return Fit(place, room, tokens, max(0, room // each))
    return Fit(place, room, kv.tokens_in(room), max(0, room // max(1, kv.sequence(session))))


@dataclass(frozen=True)
class Times:
    """Seconds to have a prefix of ``tokens`` ready: restored from a drive, and computed anew."""

    tokens: int
    bytes: int
    restore: float
    recompute: float

    @property
    def factor(self) -> float:
        """How many times faster restoring is; below 1 it is slower."""
        return self.recompute / self.restore if self.restore else math.inf


@dataclass(frozen=True)
class Speeds:
    """Bytes a second of the drive, tokens a second of prefill, seconds before the first byte."""

    drive: float
    prefill: float
    overhead: float = 0.0


def times_of(kv: KvSize, tokens: int, speeds: Speeds) -> Times:
    """Linear in the tokens: real prefill of a long prompt is slower than that, so that restoring
    wins by more than is said here."""
    size = kv.stored(tokens)
    restore = speeds.overhead + size / speeds.drive
    return Times(tokens, size, restore, tokens / speeds.prefill)


def break_even(kv: KvSize, speeds: Speeds, chunk: int) -> int | None:
    """The shortest prefix, in whole chunks of tokens, that is sooner restored than computed; None:
    none ever is."""
    gain = 1 / speeds.prefill - kv.ranks * kv.per_token / speeds.drive  # seconds a token
    if gain <= 0:
        return None
    start = speeds.overhead + kv.ranks * kv.fixed / speeds.drive
    return max(1, math.floor(start / gain / chunk) + 1) * chunk


def needed_speed(kv: KvSize, prefill: float) -> float | None:
    """Bytes a second from which a drive is faster than computing, for a long prefix; None where
    nothing is stored for each token: it depends on the length alone then."""
    return kv.ranks * kv.per_token * prefill if kv.per_token else None


def steps(first: int, last: int) -> Iterable[int]:
    """Powers of two from the first to the last, which is included."""
    tokens = first
    while tokens < last:
        yield tokens
        tokens *= 2
    yield last
