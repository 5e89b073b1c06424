"""`kvhost verify --url` against the real vLLM with connectors that kvhost does not set up."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvhost.onhost import model_builtin
from kvhost.reports import kept as reports
from tests import foreign_engine
from tests.e2e_tools import free_ports

pytestmark = [pytest.mark.verdict, pytest.mark.engine, pytest.mark.full]
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "builtin"
    words = [sys.executable, model_builtin.__file__, "--out", str(folder)]
    subprocess.run(words, check=True, capture_output=True)
    return folder


@dataclass(frozen=True)
class Server:
    """``lmcache``: LMCache's configuration, KV stands for the directory."""

    name: str
    persisted: str
    cause: str | None
    connector: dict[str, object] | None
    lmcache: str | None = None
    env: tuple[tuple[str, str], ...] = ()


ON_CPU = {
    "kv_connector": "LMCacheConnectorOnCpu",
    "kv_connector_module_path": "lmcache_on_cpu",
    "kv_role": "kv_both",
}
SERVERS = (
    Server(
        "ExampleConnector",
        "PASS",
        None,
        {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": "KV"},
        },
    ),
    Server(
        "LMCacheConnectorV1 with local_disk",
        "FAIL",
        "index-in-memory",
        {**ON_CPU},
        "chunk_size: 256\nlocal_cpu: true\nmax_local_cpu_size: 1\n"
        'local_disk: "file://KV/"\nmax_local_disk_size: 5\n',
        (("PYTHONHASHSEED", "0"),),
    ),
    Server("no connector", "FAIL", "connector-missing", None),
)


@pytest.mark.parametrize("server", SERVERS, ids=lambda server: server.name)
def test_server(server: Server, engine: Path, model: Path, tmp_path: Path) -> None:
    kv, (port,) = tmp_path / "kv", free_ports(1)
    kv.mkdir()
    url = f"http://127.0.0.1:{port}"
    argv = [str(engine / "bin/vllm"), "serve", str(model), "--host", "127.0.0.1"]
    argv += ["--port", str(port), "--enforce-eager", "--enable-prompt-tokens-details"]
    argv += ["--max-model-len", "8192", "--max-num-batched-tokens", "8192"]
    if server.connector is not None:
        config = json.dumps(server.connector).replace('"KV"', json.dumps(str(kv)))
        argv += ["--kv-transfer-config", config]
    env = {**dict(server.env), "PYTHONPATH": str(ROOT / "tests/doubles")}
    if server.lmcache is not None:
        (tmp_path / "lmcache.yaml").write_text(server.lmcache.replace("KV", str(kv)))
        env["LMCACHE_CONFIG_FILE"] = str(tmp_path / "lmcache.yaml")
    (tmp_path / "serve.json").write_text(json.dumps({"argv": argv, "env": env, "url": url}))
    restart = [sys.executable, "-m", "tests.foreign_engine", "restart", str(tmp_path)]
    words = [sys.executable, "-m", "kvhost.cli", "verify", "--url", url, "--name", "box"]
    words += ["--metrics-url", url + "/metrics", "--restart-command", shlex.join(restart)]
    words += ["--prompt-tokens", "2056", "--storage-dir", str(kv)]
    foreign_engine.start(tmp_path)
    try:
        foreign_engine.wait(tmp_path)
        subprocess.run(
            words,
            cwd=ROOT,
            env={**os.environ, "KVHOST_REPORTS": str(tmp_path / "reports")},
            timeout=600,
            check=False,
        )
    finally:
        foreign_engine.stop(tmp_path)
    report = reports.latest_report(tmp_path / "reports", "box")
    assert report is not None
    slug = report.verdict.causes[0].slug if report.verdict.causes else None
    assert (report.persisted, slug) == (server.persisted, server.cause), report.verdict.summary
