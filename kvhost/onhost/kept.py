"""Which environments are kept; the plan and generations.py on a host decide by this."""

from __future__ import annotations

import os
from typing import Any


def kept(*generations: Any, current: str | None, wanted: str | None = None) -> set[str]:
    """Names below envs/ that are not cleared away: of the generations (manifests, or failed.json),
    of the target of the link ``current``, and of what is ``wanted``."""
    paths = [row.get("env") for row in generations if isinstance(row, dict)]
    return {os.path.basename(str(path).rstrip("/")) for path in (*paths, current, wanted) if path}
