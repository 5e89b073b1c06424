"""Cases of the judge on evidence of version 2: every event, its own conditions, and the controls.

fixtures/events/*.json are whole runs that passed, see its README; an edit changes what the case is
about and whatever servers would count with it.
"""

from __future__ import annotations

from tests.verdict_edits import (
    Edit,
    Json,
    both,
    count,
    failed,
    in_life,
    no_step,
    other_token,
    put,
    restored_hits,
    same_process,
)
from tests.verdict_types import Case

R = "requests.restored."
C = 256.0


def case(event: str, name: str, persisted: str, edit: Edit, cause: str | None = None) -> Case:
    return Case(f"{event}: {name}", persisted, edit, cause, base=f"../events/{event}")


def hits(role: str, tokens: float) -> Edit:
    """What was found more for a request, said by every source."""

    def edit(e: Json) -> None:
        count(role, "cache", hit_tokens=tokens, hit_l2_tokens=tokens)(e)
        count(role, "vllm", external_hits=tokens, from_external=tokens, from_compute=-tokens)(e)
        e["requests"][role]["usage_cached_tokens"] += int(tokens)

    return edit


def gap(role: str, nats: float) -> Edit:
    """The first token of the cold answer is that much less likely for this request."""

    def edit(e: Json) -> None:
        first = e["requests"][role]["first_logprobs"]
        first[max(first, key=lambda one: first[one])] -= nats

    return edit


def gone(role: str) -> Edit:
    return lambda e: e["requests"].pop(role)


def unlikely(e: Json) -> None:
    first = e["requests"]["restored"]["first_logprobs"]
    first.pop(max(first, key=lambda one: first[one]))


def another_process(name: str) -> Edit:
    """A service that was to go on is another process afterwards."""

    def edit(e: Json) -> None:
        who = {**e["services"][name]["before"]["proc"], "pid": 7, "start_ticks": 10**9}
        e["services"][name]["after"] = {"record": who, "proc": who, "listens": True}
        in_life(1, f"processes.{name}", who)(e)

    return edit


def shared_only_one(e: Json) -> None:
    """The second of the two shared chunks was not found."""
    hits("half", -C)(e)


def from_l1(e: Json) -> None:
    restored_hits(0, l1=2048)(e)


REFERENCE = "requests.reference."


def cut_finds(chunks: int | None) -> Edit:
    """The killed prompt is found up to so many chunks; None: one more than were complete."""

    def edit(e: Json) -> None:
        wanted = e["killed"]["kept"] + 1 if chunks is None else chunks
        hits("cut", wanted * C - e["requests"]["cut"]["usage_cached_tokens"])(e)

    return edit


def cut_says_else(e: Json) -> None:
    e["requests"]["cut"]["output_tokens"][3] += 1


def as_half_cold(e: Json) -> None:
    e["requests"]["half"]["prompt_digest"] = e["requests"]["half_cold"]["prompt_digest"]


def same_first_process(e: Json) -> None:
    e["resumed"]["pid1_ticks_after"] = e["resumed"]["pid1_ticks"]


INEXACT = put("config.exact_numerics", False)
ENGINE = count("restored", "vllm", external_hits=-2048, prefix_hits=2048)
EVENT_CASES: tuple[Case, ...] = (
    *(
        Case(f"real: event {event}", "PASS", base=f"../events/{event}")
        for event in ("both", "runner", "cache", "kill", "reboot")
    ),
    # controls
    case("both", "half hits more", "FAIL", hits("half", C), "unseen-prompt-hits"),
    case("both", "half hits less", "FAIL", shared_only_one),
    case("both", "half unanswered", "INCONCLUSIVE", failed("half")),
    case(
        "both",
        "no half",
        "INCONCLUSIVE",
        both(gone("half"), no_step("control: the first half of a prompt")),
    ),
    case("both", "half prompt is the whole", "INCONCLUSIVE", as_half_cold),
    case("both", "half not asked for", "INCONCLUSIVE", count("half", "vllm", external_queries=-C)),
    case("both", "half was not cold", "INCONCLUSIVE", hits("half_cold", C), "unseen-prompt-hits"),
    case("both", "moved files hit", "FAIL", hits("moved", 4 * C), "hits-without-files"),
    case("both", "moved files hit in part", "FAIL", hits("moved", C), "hits-without-files"),
    case("both", "not all were moved", "INCONCLUSIVE", put("moved.moved", 3)),
    case("both", "moved unanswered", "INCONCLUSIVE", failed("moved")),
    case(
        "both", "moved not asked for", "INCONCLUSIVE", count("moved", "cache", requested_tokens=-C)
    ),
    case(
        "both",
        "moved sent another prompt",
        "INCONCLUSIVE",
        put("requests.moved.prompt_digest", "x"),
    ),
    case("both", "moved files were read", "INCONCLUSIVE", put("moved.resident_after", 1)),
    case("both", "who read is unknown", "INCONCLUSIVE", put("moved.resident_after", None)),
    case("both", "nothing was moved", "INCONCLUSIVE", put("moved", None)),
    case(
        "both",
        "another look-up in a control",
        "INCONCLUSIVE",
        count("half", "cache", lookups=1),
        "not-alone",
    ),
    # answers
    case("both", "first token less likely", "FAIL", gap("restored", 0.5), "wrong-kv-served"),
    case("both", "first token hardly less likely", "PASS", gap("restored", 0.1)),
    case("both", "first token unlikely", "FAIL", unlikely, "wrong-kv-served"),
    case("both", "likelihood unknown", "INCONCLUSIVE", put(R + "first_logprobs", None)),
    case(
        "both",
        "warm differs too",
        "INCONCLUSIVE",
        both(gap("restored", 0.5), gap("warm", 0.5)),
        "answers-not-repeatable",
    ),
    case("both", "other token, exact", "FAIL", other_token, "wrong-kv-served"),
    case("both", "other token, not exact", "PASS", both(other_token, INEXACT)),
    case(
        "both",
        "other token, not exact, unlikely",
        "FAIL",
        both(other_token, gap("restored", 0.5), INEXACT),
        "wrong-kv-served",
    ),
    case(
        "both",
        "other token, not exact, likelihood unknown",
        "FAIL",
        both(other_token, put(R + "first_logprobs", None), INEXACT),
        "wrong-kv-served",
    ),
    # runner
    case("runner", "all from L2", "PASS", restored_hits(2048, l1=0)),
    case("runner", "all from L1", "PASS", from_l1),
    case("runner", "half of it", "FAIL", restored_hits(512, l1=512)),
    case("runner", "nothing", "FAIL", restored_hits(0, l1=0)),
    case("runner", "cache says nothing, vLLM all", "INCONCLUSIVE", restored_hits(0, external=2048)),
    case(
        "runner",
        "cache restarted too",
        "INCONCLUSIVE",
        another_process("cache"),
        "restarted-by-itself",
    ),
    case("runner", "not restarted", "INCONCLUSIVE", same_process("runner"), "not-restarted"),
    case("runner", "from the engine's memory", "INCONCLUSIVE", ENGINE, "engine-memory"),
    # cache
    case("cache", "not registered", "FAIL", put("registered", False), "not-registered-again"),
    case("cache", "registration unknown", "INCONCLUSIVE", put("registered", None)),
    case(
        "cache",
        "runner restarted too",
        "INCONCLUSIVE",
        another_process("runner"),
        "restarted-by-itself",
    ),
    case("cache", "from the engine's memory", "INCONCLUSIVE", ENGINE, "engine-memory"),
    case("cache", "from L1", "INCONCLUSIVE", from_l1, "served-from-l1"),
    case(
        "cache",
        "another client while it was restarted",
        "INCONCLUSIVE",
        in_life(1, "own_requests", 0),
        "not-alone",
    ),
    # kill
    case("kill", "all was written", "INCONCLUSIVE", put("killed.kept", 8), "kill-too-late"),
    case(
        "kill",
        "nothing was written",
        "INCONCLUSIVE",
        both(put("killed.kept", 0), cut_finds(0)),
        "kill-too-late",
    ),
    case("kill", "what was kept is unknown", "INCONCLUSIVE", put("killed.kept", None)),
    case("kill", "more found than was complete", "FAIL", cut_finds(None)),
    case("kill", "nothing found", "INCONCLUSIVE", cut_finds(0)),
    case("kill", "another answer", "FAIL", cut_says_else, "wrong-kv-served"),
    case("kill", "another answer, not exact", "PASS", both(INEXACT, cut_says_else)),
    case("kill", "the reference was not computed", "INCONCLUSIVE", hits("reference", C)),
    case(
        "kill",
        "the reference is of another prompt",
        "INCONCLUSIVE",
        put(REFERENCE + "prompt_digest", "x"),
    ),
    case("kill", "no reference", "INCONCLUSIVE", failed("reference")),
    case("kill", "not restarted", "INCONCLUSIVE", same_process("cache"), "not-restarted"),
    # reboot
    case("reboot", "it was not", "INCONCLUSIVE", same_first_process, "not-rebooted"),
    case("reboot", "unknown", "INCONCLUSIVE", put("resumed", None)),
    case("reboot", "found nothing", "FAIL", restored_hits(0), "index-in-memory"),
    case("reboot", "of another boot", "INCONCLUSIVE", put("resumed.boot_id_after", "another")),
)
