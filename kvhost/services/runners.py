"""The runners of a host: the first, and those of `more_runners`, each with settings of its own.

Runners with one namespace share one cache server, so that what one has computed is served to the
other; the tier and its pruner are one for all. Pure functions of settings.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from kvhost.onhost.service_names import OPTIONAL
from kvhost.schema.runner_args import count_flag
from kvhost.settings import Settings

FIRST = "runner"


@dataclass(frozen=True)
class Runner:
    """One runner: name of its service, for people, its settings and the GPUs that it needs."""

    service: str
    title: str
    settings: Settings

    @property
    def ranks(self) -> int:
        return ranks(self.settings)

    @property
    def pipeline(self) -> int:
        return pipeline(self.settings)


def runners_of(settings: Settings) -> tuple[Runner, ...]:
    """All runners of a host, the first one first; the settings of each hold its own values."""
    found = [Runner(FIRST, "the runner", settings)]
    for entry in settings.more_runners:
        given = {
            key: value
            for key, value in entry.model_dump(exclude={"name"}).items()
            if value is not None
        }
        # GPUs and shares are of one runner: what an entry leaves out is not the first one's
        own = settings.model_copy(
            update={"more_runners": [], "gpus": [], "gpu_memory_share": None, **given}
        )
        found.append(Runner(f"{FIRST}-{entry.name}", f"the runner {entry.name}", own))
    return tuple(found)


def asked_runner(settings: Settings) -> Runner:
    """The runner that the restart test asks and restarts."""
    name = FIRST if settings.verify_runner is None else f"{FIRST}-{settings.verify_runner}"
    return next(one for one in runners_of(settings) if one.service == name)


def ranks(settings: Settings) -> int:
    """GPUs (on a CPU: worker processes) of one runner: tensor times pipeline parallelism."""
    return settings.tensor_parallel_size * pipeline(settings)


def pipeline(settings: Settings) -> int:
    """Stages of pipeline parallelism, which only runner_extra_args can ask for."""
    return count_flag(settings.runner_extra_args, "pipeline-parallel-size", "pp")


def config_name(service: str) -> str:
    """Name of the file with vLLM's configuration of a runner."""
    return f"vllm{service.removeprefix(FIRST)}.yaml"


def of_a_runner(name: str) -> bool:
    """Whether a file of etc/ with that name is of a service that a host may be without: its
    description, its configuration or its unit."""
    return OPTIONAL.fullmatch(name) is not None


def left_over(there: Collection[str], wanted: Collection[str], etc: str) -> list[str]:
    """Descriptions, configurations and units in ``etc`` of services that the settings have no more:
    without its description services.py takes a service away, and stops it."""
    named = {path: path.rpartition("/") for path in there if path not in wanted}
    return sorted(
        path for path, (folder, _, name) in named.items() if folder == etc and of_a_runner(name)
    )


def whose_config(name: str) -> str | None:
    """The runner that a file of that name is the configuration of; None of another file."""
    if not (name.startswith("vllm") and name.endswith(".yaml")):
        return None
    return FIRST + name.removeprefix("vllm").removesuffix(".yaml")
