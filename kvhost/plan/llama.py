"""What a plan says of llama-server, and every reason against it that is its own. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvhost.llama.need import odd_count
from kvhost.plan.types import PlanInputs, Refusal, Stage, unreadable
from kvhost.report import HostReport
from kvhost.settings import Settings

#: name, stage and words of every service
SERVICES: tuple[tuple[str, Stage, str], ...] = (
    ("runner", "runner", "llama-server"),
    ("slots", "cache", "the keeper of its slots"),
    ("pruner", "cache", "the pruner"),
)


def loopback_notes(settings: Settings, others: Sequence[str], *, with_key: bool) -> Iterator[str]:
    """Who can reach what: the endpoints of the slots are on the API's port."""
    if with_key:
        return
    yield (
        f"Loopback is no boundary between users: {len(others)} other users of this host "
        f"({', '.join(others[:4])}) can reach llama-server at port {settings.api_port} without a "
        "key, read and replace what is in its slots, and have it overwrite saved files (/slots). "
        "Set KVHOST_API_KEY or api_key_file."
    )


def llama_model(settings: Settings, report: HostReport, facts: PlanInputs) -> Iterator[Refusal]:
    if settings.model_source.startswith("/"):
        yield from _file(settings, report)
    need = facts.model
    if need is not None and settings.max_model_len > need.max_context:
        yield Refusal(
            "model",
            "context_too_long",
            "max_model_len is more than the model's context",
            f"max_model_len of at most {need.max_context} tokens",
            f"max_model_len = {settings.max_model_len} tokens",
            f"max_model_len = {need.max_context}",
        )


def _file(settings: Settings, report: HostReport) -> Iterator[Refusal]:
    model, path = report.model, settings.model_source
    if model.status == "unreadable":
        yield unreadable("model", f"the model at {path}", model.why)
    elif model.data is None:
        yield Refusal(
            "model",
            "no_model",
            "there is no model where model_source says",
            f"a .gguf file at {path}",
            str(model.why),
            "set model_source to the .gguf file on the host",
        )
    elif model.data.config.data is None:
        yield Refusal(
            "model",
            "no_model",
            "the file that model_source names is no whole GGUF file",
            "a GGUF file of version 2 or 3, as long as its header says",
            str(model.data.config.why),
            "fetch it again, or set model_source to another",
        )
    elif (odd := odd_count(model.data.config.data)) is not None:
        yield Refusal(
            "model",
            "no_model",
            "the header of the file that model_source names is damaged",
            *odd,
            "fetch it again, or set model_source to another",
        )
    elif model.data.blocked_by or model.data.closed:
        by, folder = model.data.blocked_by, path.rpartition("/")[0]
        closed = [f"{folder}/{name}" for name in model.data.closed]
        yield Refusal(
            "model",
            "model_closed",
            f"the service's user {settings.service_user} cannot read the model",
            f"every directory above {path} passable (x) and the file readable (r) to that user",
            f"{by} is not passable" if by else f"{', '.join(closed)} without that right",
            f"chmod o+x {by}" if by else f"chmod o+r {' '.join(closed)}",
        )


def binary_refusals(source: str, look: Mapping[str, Any]) -> Iterator[Refusal]:
    """By what onhost/engine_program.py says of a llama_binary that lies on the host."""
    path = source.rpartition("#sha256=")[0]
    if look["status"] != "ok":
        yield unreadable("engine", f"llama_binary at {path}", look["why"])
    elif look["data"]["against"] is not None:
        yield Refusal(
            "engine",
            "llama_binary",
            "the file that llama_binary names cannot be taken",
            "a program that may be executed, or a .tar.gz with it, with that sha256",
            look["data"]["against"],
            f"sha256sum of the file that you mean; llama_binary = '{path}#sha256=…'",
        )
