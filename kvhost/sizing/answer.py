"""The answer of `kvhost size`: all of its figures, from a question. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvhost.plan.gpus import GPU_MEMORY_PART, GPU_RESERVE_BYTES
from kvhost.sizing.arch import Architecture, architecture_of
from kvhost.sizing.declared import declared_kv_dtype
from kvhost.sizing.kv_bytes import (
    BLOCK_BYTES,
    COMPUTED,
    Fit,
    KvSize,
    SizeError,
    Speeds,
    Times,
    break_even,
    dtype_named,
    fit,
    needed_speed,
    size_of,
    steps,
    times_of,
)
from kvhost.sizing.model import ModelFiles


@dataclass(frozen=True)
class Question:
    """What is asked. Rooms in bytes, None where not asked; `context`: tokens of a session."""

    model: ModelFiles
    kv_dtype: str = "auto"
    ranks: int = 1
    context: int | None = None
    gpu_bytes: int | None = None
    ram_bytes: int | None = None
    drive_bytes: int | None = None
    drive_speed: float | None = None
    prefill: float | None = None
    overhead: float = 0.0
    weights_bytes: int | None = None
    chunk: int = 256
    recurrent: str = "auto"


@dataclass(frozen=True)
class Answer:
    """All figures. `short`: bytes that are missing on each GPU for the weights alone; 0 if none."""

    question: Question
    architecture: Architecture
    kv: KvSize
    session: int
    weights: int | None
    short: int
    fits: tuple[Fit, ...]
    times: tuple[Times, ...]
    break_even: int | None
    needed_speed: float | None
    notes: tuple[str, ...]


def answer(question: Question) -> Answer:
    """Raises UnknownArchitecture or SizeError: what cannot be told exactly, and is not guessed."""
    found = architecture_of(question.model.config)
    computed = _computed(found)
    declared = declared_kv_dtype(question.model.config, found) if _is_auto(question) else None
    asked = declared or (computed if _is_auto(question) else dtype_named(question.kv_dtype))
    kv = size_of(
        found, asked, state_dtype=computed, recurrent=question.recurrent, ranks=question.ranks
    )
    session = question.context or min(found.context or 32768, 32768)
    weights = question.weights_bytes or question.model.weights_bytes
    short, fits = _fits(question, kv, session, weights)
    times: tuple[Times, ...] = ()
    even, needed = None, None
    if question.prefill:
        needed = needed_speed(kv, question.prefill)
    if question.prefill and question.drive_speed:
        speeds = Speeds(question.drive_speed, question.prefill, question.overhead)
        last = max(found.context or session, session)
        times = tuple(times_of(kv, tokens, speeds) for tokens in steps(1024, max(1024, last)))
        even = break_even(kv, speeds, question.chunk)
    notes = tuple(_notes(question, found, kv, weights))
    if found.context is not None and session > found.context:
        told = f"A session of {session} tokens is longer than the model takes: {found.context}."
        notes = (told, *notes)
    if declared:
        notes = (
            f"The checkpoint itself declares its KV in fp8, which auto takes ({asked}).",
            *notes,
        )
    return Answer(question, found, kv, session, weights, short, fits, times, even, needed, notes)


def _is_auto(question: Question) -> bool:
    return question.kv_dtype == "auto"


def _computed(found: Architecture) -> str:
    """The dtype that the engine computes in, and keeps the cache in with "auto"."""
    name = dtype_named(found.dtype.removeprefix("torch.")) if found.dtype else COMPUTED
    return COMPUTED if name == "float32" else name


def _fits(
    question: Question, kv: KvSize, session: int, weights: int | None
) -> tuple[int, tuple[Fit, ...]]:
    found, short = [], 0
    if question.gpu_bytes is not None and weights is not None:
        usable = int(question.gpu_bytes * GPU_MEMORY_PART) - GPU_RESERVE_BYTES
        room = usable - weights // question.ranks
        short = max(0, -room)
        found.append(fit("GPU", kv, max(0, room), session))
    for place, room_of in (("RAM", question.ram_bytes), ("drive", question.drive_bytes)):
        if room_of is not None:
            found.append(fit(place, kv, room_of, session, stored=True))
    return short, tuple(found)


def _notes(question: Question, found: Architecture, kv: KvSize, weights: int | None) -> list[str]:
    notes = []
    if missing := question.model.missing:
        notes.append(
            f"Files of the weights are missing ({', '.join(missing[:3])}"
            f"{', …' if len(missing) > 3 else ''}): their size is what the index says of all."
        )
    if question.gpu_bytes is not None and weights is None:
        notes.append("The weights do not lie beside config.json: say how large they are "
                     "(--weights-gib) to see what fits into the GPU.")  # fmt: skip
    if kv.dtype in BLOCK_BYTES:
        notes.append(f"{kv.dtype} is a KV type of llama.cpp; vLLM has none of it.")
    if any(part.window is not None and part.kind == "window" for part in kv.parts):
        notes.append(
            "Layers with a window keep its last tokens while a sequence runs; on the drive every "
            "token is kept in every attending layer, for a prefix may end at any chunk."
        )
    if any(part.kind == "state" for part in kv.parts):
        notes.append(
            "A state holds one place of a sequence and is counted once; LMCache stores one for "
            "each step of the scheduler, which is more. vLLM pads its page to that of attention, "
            "or the other way round; on CPUs with AVX512_BF16 it keeps recurrent states in "
            "float32 (--state-dtype)."
        )
    if kv.ranks > 1 and any(part.kind == "latent" for part in kv.parts):
        notes.append("MLA keeps one latent for all heads: each GPU holds all of it.")
    if question.prefill:
        notes.append("Computing anew is taken as linear in the tokens; a long prompt takes longer.")
    return notes


def to_json(answer: Answer) -> dict[str, Any]:
    """All figures by name; sizes in bytes, times in seconds, speeds in bytes a second."""
    kv = answer.kv
    return {
        "schema": 1,
        "model": answer.question.model.name,
        "model_type": answer.architecture.model_type,
        "kv_dtype": kv.dtype,
        "ranks": kv.ranks,
        "bytes_per_token": kv.per_token,
        "bytes_per_token_all_ranks": kv.per_token * kv.ranks,
        "lasting_bytes_per_token": kv.lasting,
        "fixed_bytes": kv.fixed,
        "layers": [
            {
                "kind": part.kind,
                "layers": part.layers,
                "bytes_per_token": part.per_token,
                "window_tokens": part.window if part.kind != "state" else None,
                "fixed_bytes": part.fixed,
            }
            for part in kv.parts
        ],
        "session": {
            "tokens": answer.session,
            "bytes": kv.sequence(answer.session),
            "stored_bytes_all_ranks": kv.stored(answer.session),
        },
        "weights_bytes": answer.weights,
        "weights_short_bytes": answer.short,
        "fits": [vars(one) for one in answer.fits],
        "times": [{**vars(one), "factor": one.factor} for one in answer.times],
        "break_even_tokens": answer.break_even,
        "needed_drive_bytes_per_s": answer.needed_speed,
        "notes": list(answer.notes),
    }


__all__ = ["Answer", "Question", "SizeError", "answer", "to_json"]
