"""llama-server for tests: a given one, or one that was built before from the same lock.

Building takes minutes (docs/testing.md), so the core tier uses what is there and skips without; the
full tier builds it, by the deploy itself, and keeps it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvhost.engine.locks import read_lock
from kvhost.engine.matrix import load_matrix
from tests.e2e_tools import API_KEY, BASE, REPO, Done, Site
from tests.lab.recipe import lab_dir

HERE = BASE.with_name(BASE.name + "-llama")
LOCK = "llama-server-x86_64"
INFO = load_matrix(REPO / "locks").programs[LOCK]
DOUBLE = REPO / "tests/doubles/llama_program.py"
TOKENS = 1200
WHY_NONE = (
    "no llama-server here: KVHOST_TEST_LLAMA names one, or bin/test --full "
    f"tests/test_llama_engine.py builds one ({INFO.build}) and keeps it"
)


def kept() -> Path:
    """Where one that was built from the present lock is kept."""
    text = read_lock(REPO / "locks", INFO, INFO.pythons[0]).text
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return lab_dir() / f"llama-{digest}" / "llama-server"


def binary() -> Path | None:
    """One that is there, None without."""
    given = os.environ.get("KVHOST_TEST_LLAMA")
    path = Path(given) if given else kept()
    return path if path.exists() else None


def keep(built: Path) -> None:
    """For the runs to come."""
    kept().parent.mkdir(parents=True, exist_ok=True)
    draft = kept().with_suffix(".new")
    shutil.copy(built, draft)
    draft.replace(kept())


@dataclass
class LlamaSite(Site):
    """An installation with runner = llama_server."""

    base: Path = HERE
    data: dict[str, str] = field(default_factory=dict)

    def arguments(self, **data: str) -> list[str]:
        given = {
            "runner": "llama_server",
            "base_dir": str(self.base),
            "api_port": str(self.ports[0]),
            "cache_limit_gib": "2",
            "max_model_len": "4096",
            "verify_prompt_tokens": str(TOKENS),
            "llama_save_interval_s": "3600",
            **self.data,
            **data,
        }
        return [part for key, value in given.items() for part in ("--data", f"{key}={value}")]

    def call(self, path: str, body: Any = None) -> Any:
        """Raises urllib.error.URLError."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.ports[0]}{path}",
            None if body is None else json.dumps(body).encode(),
            {"Content-Type": "application/json", "Authorization": f"Bearer {API_KEY}"},
        )
        with urllib.request.urlopen(request, timeout=120) as reply:
            return json.loads(reply.read())

    def ask(self, prompt: list[int], slot: int) -> tuple[list[int], int]:
        """The greedy answer, and how many tokens of the prompt were there already."""
        told = self.call(
            "/completion",
            {"prompt": prompt, "n_predict": 8, "temperature": 0, "id_slot": slot,
             "return_tokens": True},
        )  # fmt: skip
        return told["tokens"], told["timings"]["cache_n"]

    def slots(self, *words: str) -> Done:
        return self.run(
            "python3", str(self.base / "bin/slots.py"), "--base", str(self.base), *words
        )

    @property
    def namespace(self) -> Path:
        """That of the present configuration."""
        argv = json.loads((self.base / "etc/runner.json").read_text())["argv"]
        return Path(argv[argv.index("--slot-save-path") + 1])

    def saved(self, slot: int) -> Path:
        note = json.loads((self.namespace / f".slot-{slot}.json").read_text())
        return self.namespace / str(note["file"])

    def remove(self) -> None:
        if (self.base / "bin/services.py").exists():
            self.services("shutdown")
        if self.base.exists():
            shutil.rmtree(self.base)
