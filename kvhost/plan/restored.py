"""What restoring asks of a host's drive: bytes of a token, of a file, tokens of context. Pure."""

from __future__ import annotations

import math
from typing import Any

from kvhost.plan.native import chunk_in_tiering
from kvhost.plan.types import ModelNeed
from kvhost.services.runners import pipeline, ranks
from kvhost.settings import Settings

#: of a file of the cache, where the model does not tell
SOME_FILE = 8 << 20
SOME_CONTEXT = 65536
#: the file of a llama-server's slot holds all of its tokens; beyond this its size changes no speed
MOST_SLOT = 256 << 20
PAGE = 4096


def restored(settings: Settings, need: ModelNeed | None) -> dict[str, Any]:
    """``bytes_per_token``: of all ranks, a copy counted as often as it is stored, None where the
    model does not tell; ``file_bytes``: of one file, in whole pages."""
    slots = settings.runner == "llama_server"
    if need is None:
        file = MOST_SLOT if slots else SOME_FILE
        return {"bytes_per_token": None, "file_bytes": file, "context": SOME_CONTEXT}
    context = min(need.max_context, settings.max_model_len)
    of_rank = need.kv_of_rank(settings.tensor_parallel_size, pipeline(settings))
    if slots:
        file = min(MOST_SLOT, math.ceil(of_rank * context))
    elif settings.native:
        file = chunk_in_tiering(settings, need)
    else:
        file = math.ceil(of_rank * settings.chunk_size)
    return {
        "bytes_per_token": math.ceil(of_rank * ranks(settings)),
        "file_bytes": max(PAGE, -(-file // PAGE) * PAGE),
        "context": context,
    }
