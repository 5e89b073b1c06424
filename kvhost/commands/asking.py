"""How the command asks a deploy file for something, and how it hears the answer of every host.

The question travels in the environment, never on a command line, where others could read it; the
answers come back as lines of JSON in a file that only this user can read.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

QUESTION, ANSWERS = "KVHOST_QUESTION", "KVHOST_ANSWERS"


def question() -> dict[str, Any]:
    """What the command asked; {} when pyinfra was started by hand. Raises ValueError."""
    loaded = json.loads(os.environ.get(QUESTION, "{}"))
    if not isinstance(loaded, dict):
        raise ValueError(f"{QUESTION} is not a JSON object")
    return loaded


def answer(host: str, data: dict[str, Any]) -> bool:
    """Tells the command; False when nobody asked."""
    name = os.environ.get(ANSWERS)
    if not name:
        return False
    with Path(name).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"host": host, **data}) + "\n")
    return True


def environment(asked: dict[str, Any], folder: str) -> dict[str, str]:
    """Variables for the deploy; the answers will lie in ``folder``."""
    return {QUESTION: json.dumps(asked), ANSWERS: str(Path(folder, "answers"))}


def answers(folder: str) -> list[dict[str, Any]]:
    """What the hosts answered, in the order in which they did."""
    path = Path(folder, "answers")
    return (
        [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []
    )
