"""What can be said of an Ollama: which KV type is in force, and that nothing persists. Pure.

Ollama keeps its KV in memory, and only while the model is loaded: the verdict on persistence is
no PASS and no FAIL, but "by design". What can be right or wrong is the KV type: Ollama goes back to
f16 with a line in its log (ollama#8921, #13337), or with none.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from kvhost.ollama.facts import Allocated, Load, Model, OllamaEvidence, OllamaFacts
from kvhost.sizing.kv_bytes import dtype_named, element_bytes
from kvhost.verdict.types import Cause, Condition, Thresholds, Verdict, Weight

#: "yes": the wanted type is in force; "no": another one is; "unknown": it cannot be told
InForce = Literal["yes", "no", "unknown"]
KV_TYPES = ("f16", "q8_0", "q4_0")
INSTEAD = (
    "Ollama keeps no KV cache on disk, in any version: after a restart every prompt is computed "
    "anew. For a cache that survives, take runner = 'vllm' (LMCache on a drive), or "
    "runner = 'llama_server' for a GGUF (saved slots)."
)
REASONS = {
    "no_flash_on_gpu": "this GPU has no flash attention in Ollama",
    "no_flash_with_model": "Ollama has no flash attention for this model's architecture",
    "type_not_with_model": "Ollama does not take this KV type with this model",
    "flash_off": "flash attention is off",
    "unknown_type": "Ollama does not know this KV type",
    "needs_flash": "the runner ended: a quantised KV needs flash attention, which it has not here",
}


@dataclass(frozen=True)
class KvVerdict:
    """``found``: the type in force, None where it cannot be told; ``how``: what told it.

    Bytes are those of one token in all layers: by the formula for the type that is in force, and as
    the log has it; None where either cannot be told.
    """

    wanted: str
    found: str | None
    in_force: InForce
    how: str
    why: str
    token_bytes: int | None
    token_bytes_f16: int | None
    token_bytes_log: int | None
    change: str = ""


def judge_kv(facts: OllamaFacts, wanted: str) -> KvVerdict:
    """Three-valued: nothing is taken for certain that neither log nor API says."""
    model, load = facts.model.data, facts.log.data.load if facts.log.data else None
    if facts.api.status != "ok":
        return _unknown(wanted, f"Ollama does not answer: {facts.api.why}")
    if model is None:
        return _unknown(wanted, f"the model {facts.name}: {facts.model.why}")
    if load is not None and load.failed is not None:
        why = REASONS[load.failed.slug]
        return _verdict(
            wanted, None, "no", "the log", f"the model does not load: {why}", model, load
        )
    if facts.asked is not None and facts.asked.status != "ok":
        return _unknown(wanted, f"the model does not load: {facts.asked.why}")
    if facts.loaded.status != "ok":
        return _unknown(wanted, f"the model is not in memory: {facts.loaded.why}")
    if facts.log.data is None:
        return _unknown(wanted, f"the log: {facts.log.why}")
    if load is None:
        return _unknown(wanted, "the log since the server's start has no load of this model")
    return _judged(wanted, model, load)


def _judged(wanted: str, model: Model, load: Load) -> KvVerdict:
    rows = {kind for one in load.allocated for kind in ((one.k,) + ((one.v,) if one.v_mib else ()))}
    told = {kind or "f16" for kind in (load.told.k, load.told.v)} if load.told else set()
    if len(rows) > 1 or (not rows and len(told) > 1):
        both = " and ".join(sorted(rows or told))
        return _verdict(
            wanted, both, "no", "the log", f"K and V, or layers, differ: {both}", model, load
        )
    if rows:
        found, how = rows.pop(), "what llama.cpp says that it allocated"
    elif told:
        found = told.pop()
        how = "what the server told its runner"
        if contradicted(model, load, found):
            what = f"told {found}, but the size of its KV buffers is of another type"
            return _verdict(wanted, None, "unknown", how, what, model, load)
    else:
        what = "neither what the runner was told nor what it allocated is in the log"
        return _verdict(wanted, None, "unknown", "", what, model, load)
    if found == wanted:
        return _verdict(wanted, found, "yes", how, f"{found} is in force", model, load)
    because = (
        "; ".join(dict.fromkeys(REASONS[one.slug] for one in load.why)) or "the log says no reason"
    )
    what = f"{found} is in force, not {wanted}: {because}"
    return _verdict(wanted, found, "no", how, what, model, load)


def _unknown(wanted: str, why: str) -> KvVerdict:
    return KvVerdict(wanted, None, "unknown", "", why, None, None, None, _CHANGE["unknown"])


_CHANGE = {
    "yes": "",
    "no": "ollama_kv_cache_type = 'f16' if that is what you want, another model, or "
    "runner = 'llama_server', which fails where it cannot",
    "unknown": "load the model once after a restart of the server, so that its log has the load",
}


def _verdict(
    wanted: str, found: str | None, in_force: InForce, how: str, why: str, model: Model, load: Load
) -> KvVerdict:
    return KvVerdict(
        wanted,
        found,
        in_force,
        how,
        why,
        token_bytes(model, found) if found in KV_TYPES else None,
        token_bytes(model, "f16"),
        bytes_in_log(load),
        _CHANGE[in_force],
    )


def token_bytes(model: Model, kind: str | None) -> int | None:
    """Bytes of one token's K and V in all layers, as kvhost size has them; None where the model's
    shape does not tell it exactly (windows, states, latents, other heads in each layer)."""
    shape = model.shape
    odd = ("attention.kv_lora_rank", "full_attention_interval", "ssm.state_size")
    if kind is None or any(shape.get(key) for key in (*odd, "attention.sliding_window")):
        return None
    layers, heads, kv_heads, width = (
        shape.get(key)
        for key in (
            "block_count",
            "attention.head_count",
            "attention.head_count_kv",
            "embedding_length",
        )
    )
    if not isinstance(layers, int) or not isinstance(kv_heads, int):
        return None
    size = width // heads if isinstance(width, int) and isinstance(heads, int) and heads else None
    key, value = shape.get("attention.key_length", size), shape.get("attention.value_length", size)
    key, value = key or size, value or size
    if not isinstance(key, int) or not isinstance(value, int):
        return None
    return int(layers * kv_heads * (key + value) * element_bytes(dtype_named(kind)))


def bytes_in_log(load: Load) -> int | None:
    """The same from llama.cpp's lines: one cache that says how many cells it has."""
    if len(load.allocated) != 1 or not load.allocated[0].cells:
        return None
    return round(Fraction(_mib(load.allocated[0]) * (1 << 20)) / load.allocated[0].cells)


def _mib(one: Allocated) -> float:
    return one.k_mib + one.v_mib


def contradicted(model: Model, load: Load, kind: str) -> bool:
    """Whether the sizes of the KV buffers can only be of another type. A third as slack: they are
    padded, and their log lines rounded; the types differ by nearly a half."""
    each, cells = token_bytes(model, kind), load.cells
    if each is None or not cells or load.buffers is None:
        return False
    least, most = load.buffers
    return not (least <= each * cells * 4 / 3 and most >= each * cells * 3 / 4)


PAGE = "docs/troubleshooting.md"


@dataclass(frozen=True)
class Row:
    """A likely cause. Each slug is a heading of docs/troubleshooting.md; a test compares."""

    slug: str
    title: str
    change: str


TABLE = (
    Row(
        "ollama-other-kv-type",
        "Ollama keeps KV in another type than was asked for",
        "ollama_kv_cache_type = 'f16', or a model and a GPU that have flash attention in Ollama",
    ),
    Row(
        "ollama-kv-type-unknown",
        "Neither Ollama's log nor its API says which KV type is in force",
        "restart the server and load the model: kvhost verify then reads the lines of that load",
    ),
    Row(
        "ollama-keeps-nothing",
        "Ollama keeps no KV cache on disk, in any version",
        "runner = 'vllm' with a tier on a drive, or runner = 'llama_server' for a GGUF",
    ),
)


def verdict_of(evidence: OllamaEvidence) -> Verdict:
    """Never PASS, never FAIL: NO_BY_DESIGN, with what is asked of an Ollama as its conditions."""
    facts, kv = evidence.facts, judge_kv(evidence.facts, evidence.wanted)
    model, api, loaded = facts.model.data, facts.api.data, facts.loaded.data
    pinned = evidence.wanted_digest
    same = {"yes": True, "no": False, "unknown": None}[kv.in_force]
    slugs = ["ollama-keeps-nothing"]
    if same is not True:
        slugs.insert(0, "ollama-kv-type-unknown" if same is None else "ollama-other-kv-type")
    digest = model.digest if model else None
    conditions = [
        _condition(
            "answers",
            "Ollama answers",
            api.version if api else None,
            "an answer",
            api is not None,
        ),
        _condition(
            "model",
            "the model is there",
            digest[:12] if digest else None,
            pinned[:12] if pinned else "in its list",
            digest is not None and (pinned is None or digest.startswith(pinned)),
        ),
        _condition("kv_type", "KV type in force", kv.found, evidence.wanted, same),
        _condition(
            "token_bytes",
            "bytes of KV a token, by log",
            kv.token_bytes_log,
            f"{kv.token_bytes} by its shape" if kv.token_bytes else "not known of this model",
            None if None in (kv.token_bytes, kv.token_bytes_log) else agree(kv),
            "note",
        ),
        _condition(
            "context",
            "tokens of context",
            loaded.context_length if loaded else None,
            "said",
            None,
            "note",
        ),
    ]
    return Verdict(
        event="none",
        persisted="NO_BY_DESIGN",
        worth_it="unknown",
        summary=f"{INSTEAD} KV type: {kv.why}.",
        ttft_cold_s=None,
        ttft_warm_s=None,
        ttft_restored_s=None,
        ttft_control_s=None,
        conditions=conditions,
        causes=[
            Cause(slug=one.slug, title=one.title, change=one.change, link=f"{PAGE}#{one.slug}")
            for one in TABLE
            if one.slug in slugs
        ],
        thresholds=Thresholds(),
    )


def agree(kv: KvVerdict) -> bool:
    """Whether log and formula say the same, to the rounding of the log's MiB."""
    return abs((kv.token_bytes or 0) - (kv.token_bytes_log or 0)) <= 1


def _condition(
    name: str,
    question: str,
    figure: str | int | None,
    threshold: str,
    met: bool | None,
    weight: Weight = "fail",
) -> Condition:
    return Condition(
        id=name, question=question, figure=figure, threshold=threshold, met=met, weight=weight
    )
