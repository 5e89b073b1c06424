"""What is written to a host with the runner Ollama."""

from __future__ import annotations

import re

from deploys.common.context import Run
from deploys.common.ollama import gpus_of
from deploys.common.rendered import supervisord_conf
from kvhost.ollama.dropin import dropin_text
from kvhost.ollama.server import adopted, services
from kvhost.services.service import Service, unit_file
from kvhost.services.units import unit_text

#: files of etc/ that describe a service of kvhost's
DESCRIBES = re.compile(
    r"(cache|runner|slots|pruner|runner-\w+)\.json|kvhost-[\w-]+\.service|vllm[\w-]*\.yaml"
    r"|supervisord\.conf|model-digest|ollama\.conf"
)


def drop_in_source(run: Run) -> str:
    """Path on the host of the text that ollama_unit.py puts beside the unit."""
    return f"{run.paths.etc}/ollama.conf"


def services_of(run: Run) -> tuple[Service, ...]:
    return services(run.settings, run.paths, gpus=gpus_of(run.report))


def texts_of(run: Run) -> dict[str, str]:
    """Path -> content of all that describes the server; the units' copies are services.py's."""
    paths, described = run.paths, services_of(run)
    if adopted(run.settings):
        return {drop_in_source(run): dropin_text(run.settings, paths)}
    texts = {f"{paths.etc}/{one.name}.json": one.launch_spec(paths) for one in described}
    if not run.systemd:
        return {**texts, f"{paths.etc}/supervisord.conf": supervisord_conf(run, described)}
    gpu = gpus_of(run.report) > 0
    for one in described:
        text = unit_text(one, run.settings, paths, gpu=gpu)
        texts[f"{paths.etc}/{unit_file(one.name)}"] = text
    return texts


def gone_files(run: Run) -> list[str]:
    """Files in etc/ of another runner, or of the other way to have Ollama, by the report."""
    etc, wanted = f"{run.paths.etc}/", texts_of(run)
    names = {path.removeprefix(etc): path for path in run.files if path.startswith(etc)}
    return [p for n, p in names.items() if DESCRIBES.fullmatch(n) and p not in wanted]
