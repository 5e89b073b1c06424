"""Questions that are kept for the next run: only what a run of this user wrote, as it wrote it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvhost.records.last_asked import MOST_BYTES, LastAsked, keep, key_path, load, path_of

pytestmark = pytest.mark.fleet
ASKED = LastAsked(("--base-dir", "/x"), (("argv", "true"), ("file", "/x/y")), "/x/lock")


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    keep(tmp_path / "runs", "a", ASKED)
    assert load(tmp_path / "runs", "a") == ASKED
    return path_of(tmp_path / "runs", "a")


def test_only_what_a_run_wrote_counts(kept: Path, tmp_path: Path) -> None:
    runs, whole = tmp_path / "runs", json.loads(kept.read_text())
    assert key_path().stat().st_mode & 0o777 == kept.stat().st_mode & 0o777 == 0o600
    for other in (
        {"looks": [["argv", "touch", "/x/P"]]}, {"report": ["--x"]}, {"lock": "/"}, {"seal": ""},
    ):  # fmt: skip
        kept.write_text(json.dumps({**whole, **other}))
        assert load(runs, "a") is None, other
    kept.write_text(json.dumps({key: value for key, value in whole.items() if key != "seal"}))
    assert load(runs, "a") is None
    # another host's questions, and another working copy's
    path_of(runs, "b").write_text(json.dumps(whole))
    assert load(runs, "b") is None
    kept.write_text(json.dumps(whole))
    assert load(runs, "a") == ASKED
    key_path().write_bytes(b"")  # no key seals nothing
    assert load(runs, "a") is None
    keep(runs, "a", ASKED)
    assert load(runs, "a") == ASKED


def test_a_file_of_another_kind_is_not_read(kept: Path, tmp_path: Path) -> None:
    runs, text = tmp_path / "runs", kept.read_text()
    kept.chmod(0o620)
    assert load(runs, "a") is None
    kept.chmod(0o600)
    kept.write_text(text + " " * MOST_BYTES)
    assert load(runs, "a") is None
    kept.rename(tmp_path / "there")
    (tmp_path / "there").write_text(text)
    kept.symlink_to(tmp_path / "there")
    assert load(runs, "a") is None
    kept.unlink()
    os.mkfifo(kept)
    began = time.monotonic()
    assert load(runs, "a") is None
    assert time.monotonic() - began < 5


def test_what_is_asked_ahead_is_ended() -> None:
    """By the host: the run that asked may be gone."""
    code = """if True:
        import subprocess
        from deploys.common import early
        from kvhost.records.last_asked import LastAsked
        early.LIMIT_S = 2
        what = LastAsked(("--timeout-s", "1"), (("argv", "sleep", "25"),), "/nowhere/lock")
        subprocess.run(["sh", "-c", early.command(what)], input=early.packed(early.scripts(what)))
    """
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[1], capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    assert time.monotonic() - began < 20
    assert done.stdout.splitlines() == ["begun"]
