"""What a plan says of the tier that hosts share. Pure; nothing of it refuses a run."""

from __future__ import annotations

from collections.abc import Iterator

from kvhost.report import HostReport
from kvhost.schema.shared_values import is_s3
from kvhost.settings import Settings


def shared_notes(settings: Settings, report: HostReport) -> Iterator[str]:
    """Whom KV is shared with, and whether the store answers: without it the host goes on."""
    if settings.shared_tier is None:
        return
    yield (
        f"KV is shared through {settings.shared_tier} with the hosts that use it and have the same "
        "namespace; who has its password can read the prompts in it."
    )
    store = report.shared
    why = store.why if store.data is None else store.data.why
    if store.data is None or not store.data.answers:
        s3 = is_s3(settings.shared_tier)
        makes = "kvhost makes no S3 store" if s3 else "kvhost shared makes a store"
        yield (
            f"The store at {settings.shared_tier} does not answer from here ({why}): until "
            f"it does this host has its own tier alone ({makes})."
        )
