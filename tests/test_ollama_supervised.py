"""Ollama's archive where there is no systemd: under supervisord, on this machine."""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e_tools import BASE, Done, Site, make_site
from tests.ollama_site import MODEL, packed

pytestmark = [
    pytest.mark.full,
    pytest.mark.runners,
    pytest.mark.e2e,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: it makes an account and services"),
    pytest.mark.skipif(Path("/run/systemd/system").is_dir(), reason="systemd runs the services"),
]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    made = make_site(tmp_path_factory.mktemp("ollama"))
    made.remove()
    yield made
    made.remove()


def run(site: Site, archive: Path, digest: str, *words: str) -> Done:
    given = {
        "runner": "ollama",
        "model_source": MODEL,
        "base_dir": str(BASE),
        "api_port": str(site.ports[0]),
        "ollama_archive": f"controller:{archive}#sha256={digest}",
        "ollama_kv_cache_type": "q8_0",
    }
    data = [w for key, value in given.items() for w in ("--data", f"{key}={value}")]
    return site.run("bin/up" if not words else words[0], *words[1:], *data)


def test_an_archive_runs_under_supervisord(here: Site, tmp_path: Path) -> None:
    archive, digest = packed(tmp_path / "ollama.tgz")
    done = run(here, archive, digest)
    assert done.code == 0, done.text[-5000:]
    url = f"http://127.0.0.1:{here.ports[0]}/api/version"
    with urllib.request.urlopen(url, timeout=10) as answer:
        assert json.load(answer)["version"].startswith("0.34")
    assert here.record("runner")["service"] == "runner"
    verdict = here.reports()[-1]["results"][0]["verdict"]
    row = next(row for row in verdict["conditions"] if row["id"] == "kv_type")
    assert (row["figure"], row["met"]) == ("q8_0", True)
    again = run(here, archive, digest)
    assert again.code == 0
    assert again.changed() == [], again.text[-3000:]
    verify = run(here, archive, digest, ".venv/bin/kvhost", "verify")
    assert verify.code == 3, verify.text[-3000:]
    gone = run(here, archive, digest, ".venv/bin/kvhost", "remove", "-y")
    assert gone.code == 0, gone.text[-3000:]
