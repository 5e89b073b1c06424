"""Whatever a run asks of a host, and would put right, drift asks too: of every runner and way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.fleet
REPO = Path(__file__).parents[1]


def test_drift_asks_what_a_run_asks(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.drift_asks", tmp_path], cwd=REPO, text=True, check=False,
        capture_output=True, env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) > 10
    assert not any(found.values()), found
