"""A working copy of a user's own, and the programs that are started in it."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).parents[1]


@dataclass
class Copy:
    """A working copy, and programs started in it that have no terminal."""

    path: Path

    def run(self, *argv: str, **env: str) -> tuple[int, str]:
        keep = {k: v for k, v in os.environ.items() if not k.startswith(("KVHOST_", "SSH_"))}
        done = subprocess.run(
            argv, cwd=self.path, text=True, timeout=120, check=False, start_new_session=True,
            env={**keep, "PYTHONPATH": f"{self.path}:{REPO}", "HOME": str(self.path), **env},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert "Traceback" not in done.stdout, done.stdout
        return done.returncode, done.stdout

    def kvhost(self, *words: str) -> tuple[int, str]:
        return self.run(sys.executable, "-m", "kvhost.cli", *words)

    def pyinfra(self, *words: str, **env: str) -> tuple[int, str]:
        return self.run(str(Path(sys.executable).with_name("pyinfra")), "-y", *words, **env)

    def inventory(self, text: str) -> str:
        (self.path / "some.py").write_text(f"hosts = [{text}]\n")
        return "some.py"
