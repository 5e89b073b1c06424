"""`kvhost verify --url`: the test of a server that kvhost did not install.

The restart command comes from the user's command line and from nowhere else; it is shown with the
place where it runs before anything is asked, and runs without a shell. The evidence is collected
where the command runs (kvhost/onhost/evidence_foreign.py) and judged here.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import tempfile
import urllib.parse
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvhost.basics import printable
from kvhost.reports.kept import Report, check_writable, make_report, reports_dir, write_report
from kvhost.verdict.foreign import judge_foreign
from kvhost.verdict.foreign_evidence import parse_foreign
from kvhost.verdict.types import Thresholds

ONHOST = Path(__file__).resolve().parents[1] / "onhost"
SCRIPTS = ("evidence_foreign.py", "evidence_foreign_parts.py", "evidence_probe.py",
           "evidence_steps.py", "bounded.py")  # fmt: skip
LOCAL = "local"
#: Token ids at both ends of a vocabulary are often special; prompts are drawn between them.
SPECIAL_IDS = 20


@dataclass(frozen=True)
class Asked:
    """What the user asked for. ``where``: LOCAL or the name of one host, as pyinfra takes it."""

    url: str
    metrics_url: str
    restart_command: str
    where: str = LOCAL
    cache_metrics_url: str | None = None
    storage_dir: str | None = None
    model: str | None = None
    api_key_file: str | None = None
    vocab_size: int | None = None
    prompt_tokens: int = 4104
    chunk_size: int = 256
    disrupt: bool = False
    name: str | None = None

    @property
    def argv(self) -> list[str]:
        """The command in words, as a shell would split it; no shell runs it."""
        return shlex.split(self.restart_command)

    @property
    def host(self) -> str:
        """The name in reports: that given, or the address, and where that is on a far host."""
        if self.name:
            return self.name
        address = urllib.parse.urlsplit(self.url).netloc.rpartition("@")[2]
        return address if self.where == LOCAL else f"{self.where} {address}"


def problems(asked: Asked) -> list[str]:
    """Everything that is wrong with it, each with what to write instead; empty: nothing."""
    found = []
    for option, url in (
        ("--url", asked.url),
        ("--metrics-url", asked.metrics_url),
        ("--cache-metrics-url", asked.cache_metrics_url),
    ):
        parts = urllib.parse.urlsplit(url) if url is not None else None
        if parts is not None and (parts.scheme not in ("http", "https") or not parts.hostname):
            found.append(f"{option}: http://HOST:PORT is needed, found {url!r}")
        elif parts is not None and parts.username is not None:
            found.append(f"{option}: no user in the URL; the key goes into --api-key-file")
    try:
        if not asked.argv:
            found.append("--restart-command: empty; e.g. 'systemctl restart vllm'")
    except ValueError as error:
        found.append(f"--restart-command: {error}: {asked.restart_command!r}")
    if asked.api_key_file is not None and not Path(asked.api_key_file).is_file():
        found.append(f"--api-key-file: no such file here: {asked.api_key_file}")
    here = asked.where == LOCAL
    if here and asked.storage_dir is not None and not Path(asked.storage_dir).is_dir():
        found.append(f"--storage-dir: no such directory here: {asked.storage_dir}")
    if "," in asked.where or not asked.where.strip():
        found.append(f"--where: 'local' or one host is needed, found {asked.where!r}")
    if asked.vocab_size is not None and asked.vocab_size <= 2 * SPECIAL_IDS + 100:
        found.append(f"--vocab-size: the model's (often 32000 and more), found {asked.vocab_size}")
    if asked.chunk_size < 1 or asked.prompt_tokens < 2 * asked.chunk_size:
        found.append(
            f"--prompt-tokens: at least two chunks of {asked.chunk_size}, found "
            f"{asked.prompt_tokens}"
        )
    return found


def announcement(asked: Asked) -> str:
    """Said before anything is asked: what will run, where."""
    place = "this machine" if asked.where == LOCAL else f"the host {asked.where}"
    return printable(
        f"{asked.host}: the test sends four requests to {asked.url} and restarts the server once.\n"
        f"  restart command, run on {place}, without a shell: {shlex.join(asked.argv)}\n"
        "  Requests that are in the work then are lost. What the test's prompts leave in the cache "
        "stays there."
    )


def script_config(asked: Asked, api_key_file: str | None) -> dict[str, Any]:
    """What onhost/evidence_foreign.py is told; ``api_key_file`` is a path where it runs."""
    vocab = asked.vocab_size
    return {
        "api_base": asked.url,
        "metrics_url": asked.metrics_url,
        "cache_metrics_url": asked.cache_metrics_url,
        "storage_dir": asked.storage_dir,
        "model": asked.model,
        "api_key_file": api_key_file,
        "restart": asked.argv,
        "prompt_tokens": asked.prompt_tokens,
        "chunk_size": asked.chunk_size,
        "vocab": [SPECIAL_IDS, vocab - SPECIAL_IDS] if vocab is not None else None,
        "disrupt": asked.disrupt,
    }


def judge_and_keep(asked: Asked, text: str, thresholds: Thresholds | None = None) -> Report:
    """Judges what the script wrote and keeps the report.

    Raises ValueError: the evidence is not usable; OSError: the report could not be kept.
    """
    evidence = parse_foreign(text)
    verdict = judge_foreign(evidence, thresholds)
    report = make_report(asked.host, [(verdict, evidence)], datetime.now(UTC))
    write_report(reports_dir(), report)
    return report


def run_here(asked: Asked) -> Report:
    """The test from this machine. Raises ValueError or OSError with what went wrong."""
    check_writable(reports_dir())
    with tempfile.TemporaryDirectory() as folder:
        config, out = Path(folder, "config.json"), Path(folder, "evidence.json")
        config.touch(mode=0o600)
        config.write_text(json.dumps(script_config(asked, asked.api_key_file)))
        script = ONHOST / SCRIPTS[0]
        words = [sys.executable, str(script), "--config", str(config), "--out", str(out)]
        done = subprocess.run(words, check=False)
        if done.returncode not in (0, 3) or not out.exists():
            raise ValueError(f"no evidence could be collected (exit {done.returncode}), see above")
        return judge_and_keep(asked, out.read_text(encoding="utf-8"))


def to_json(asked: Asked) -> str:
    return json.dumps(asdict(asked))


def from_json(text: str) -> Asked:
    return Asked(**json.loads(text))
