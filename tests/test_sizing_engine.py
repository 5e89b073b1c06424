"""The engine is asked anew what it allocates, architecture by architecture."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.sizing_tools import FIXTURES, compared, engine_record

pytestmark = [pytest.mark.runners, pytest.mark.engine, pytest.mark.full]
SCRIPT = Path(__file__).parents[1] / "bench" / "kv_allocated.py"


def test_the_engine_still_allocates_what_is_said(engine: Path, tmp_path: Path) -> None:
    out = tmp_path / "engine.json"
    words = [str(engine / "bin" / "python"), str(SCRIPT), "--out", str(out)]
    subprocess.run([*words, str(FIXTURES / "tiny.json")], check=True, timeout=3600)
    record = engine_record(out)
    for name in engine_record()["models"]:
        assert record["models"][name]["way"] != "none", record["models"][name]
        told, found = compared(name, record)
        assert found == told, name
