"""prepare() for the runner Ollama, which has no lock, no engine of Python's and no tier."""

from __future__ import annotations

import hashlib
import json
import shlex
from pathlib import Path
from typing import Any

from pyinfra import host
from pyinfra.api import FactBase
from typing_extensions import override

from deploys.common.context import REPO, Run
from deploys.common.facts import script_text, scripts, with_siblings
from deploys.common.reasons import end_of
from deploys.common.runlock import is_dead
from deploys.common.sent import sent
from kvhost.drives.order import drive_order
from kvhost.engine.locks import tools_digest
from kvhost.engine.packages import drive_packages
from kvhost.ollama.plan import OllamaInputs, digest, make_ollama_plan
from kvhost.ollama.server import adopted, lock_of, models_dir, services
from kvhost.plan.drives import claim_of
from kvhost.plan.host import choose_python
from kvhost.plan.types import PlanInputs
from kvhost.report import HostReport
from kvhost.schema.ollama import archive_parts
from kvhost.schema.values import SENT, is_sent
from kvhost.settings import Settings, settings_digest

#: of the tools that kvhost's own services are started with
PYTHONS = ("3.11", "3.12", "3.13")


class OllamaText(FactBase[str]):
    """What onhost/ollama_report.py prints, in one round trip; it and what it needs travel along."""

    @override
    def command(self, argv: tuple[str, ...]) -> str:
        return sent(with_siblings("ollama_report.py"), shlex.join(argv))

    @staticmethod
    @override
    def default() -> str:
        return ""


def archive_on_host(settings: Settings) -> str | None:
    """Where the archive lies on the host, or its URL; None where a unit is adopted."""
    if settings.ollama_archive is None:
        return None
    target, sha256 = archive_parts(settings.ollama_archive)
    return f"{settings.paths.bundle}/ollama/{sha256[:16]}" if is_sent(target) else target


def against_sent(settings: Settings) -> str | None:
    """What stands against an archive of the controller's: its bytes are looked at here."""
    target, sha256 = archive_parts(settings.ollama_archive or "")
    if not is_sent(target):
        return None
    path = Path(target.removeprefix(SENT)).expanduser()
    found = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                found.update(block)
    except OSError as error:
        return f"{path} on the controller: {error.strerror}"
    if found.hexdigest() != sha256:
        return f"{path} on the controller has the digest {found.hexdigest()}, not {sha256}"
    return None


def look(settings: Settings, env: str) -> dict[str, Any]:
    """The host's answer; parts that could not be had are unreadable."""
    argv: tuple[str, ...] = ()
    place, store = archive_on_host(settings), models_dir(settings)
    if place is not None:
        target, sha256 = archive_parts(settings.ollama_archive or "")
        if is_sent(target):
            return {"unit": None, "archive": None, "models": None}
        argv = ("--archive", place, "--sha256", sha256, "--env", env)
    elif store is not None:
        argv = ("--models", store)
    text = host.get_fact(OllamaText, argv=argv)
    try:
        found = json.loads(text.strip().splitlines()[-1])
        return {"unit": found["unit"], "archive": found["archive"], "models": found["models"]}
    except (ValueError, LookupError, TypeError):
        why = {"status": "unreadable", "why": end_of(text, 300) or "no answer", "data": None}
        return {"unit": why, "archive": why if place else None, "models": None}


def gpus_of(report: HostReport) -> int:
    """NVIDIA GPUs that nvidia-smi lists."""
    smi = report.gpu.data.nvidia.smi if report.gpu.data else None
    return len(smi.lines) if smi and smi.exit == 0 else 0


def packages_of(settings: Settings, python: str) -> tuple[str, ...]:
    """Debian packages: setpriv; and what the tools and a claimed drive need."""
    name = python.rpartition("/")[2]
    venv = (f"{name}-venv",) if python.startswith("/usr/bin/") else ()
    tools = () if adopted(settings) else ("ca-certificates", *venv)
    return ("util-linux", *tools, *drive_packages(settings))


def prepare_ollama(
    settings: Settings, report: HostReport, run_id: str, *, key: bool = False
) -> Run:
    """The run with its plan; whether it is refused stands there. ``key``: one for the API is set
    on the controller."""
    machine = report.arch.data.machine if report.arch.data else "unknown"
    lock, tools = lock_of(settings, machine), tools_digest(REPO / "locks")
    python = choose_python(settings, report, PYTHONS)
    path = python.path if python and not adopted(settings) else "/usr/bin/python3"
    wanted = packages_of(settings, path)
    states = {k: v for k, v in (report.packages.data or {}).items() if k in wanted}
    if report.packages.data is not None:
        packages = report.packages.model_copy(update={"data": states})
        report = report.model_copy(update={"packages": packages})
    texts = {f"{settings.paths.bin}/{p.name}": script_text(p) for p in scripts()}
    for one in services(settings, settings.paths, gpus=gpus_of(report)):
        texts[f"{settings.paths.etc}/{one.name}.json"] = one.launch_spec(settings.paths)
    run_lock = report.kvhost.data.run_lock.data if report.kvhost.data else None
    facts = PlanInputs(
        lock_name=lock.name,
        lock_digest=lock.digest,
        lock_pythons=PYTHONS,
        lock_arch=machine,
        download_bytes=lock.download_bytes,
        env_disk_bytes=lock.disk_bytes,
        third_party=None,
        tools_digest=tools,
        settings_digest=settings_digest(settings),
        model=None,
        builtin_digest="",
        builtin_bytes=0,
        rendered={path: digest(text) for path, text in texts.items()},
        lock_is_stale=is_dead(run_lock) if run_lock else None,
    )
    more = OllamaInputs(
        look(settings, f"{settings.paths.envs}/{lock.digest[:16]}"),
        against_sent(settings) if not adopted(settings) else None,
        key,
    )
    plan = make_ollama_plan(settings, report, facts, more)
    claimed = claim_of(settings, report).claimed
    return Run(
        host=host.name,
        run_id=run_id,
        settings=settings,
        report=report,
        plan=plan,
        lock=lock,
        tools_digest=tools,
        python=path,
        api_key=None,
        with_key=False,
        hf_token=None,
        drive_order=drive_order(settings, claimed) if claimed else None,
    )
