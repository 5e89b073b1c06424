"""Settings of GPUs, and of further runners beside the first: which exist, what each may be.

A further runner takes from the settings of its host what its entry leaves out. Which services come
of it is in kvhost/services/runners.py.
"""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator

from kvhost.schema import values as _values
from kvhost.schema.drives import DriveSettings
from kvhost.schema.field import Flat, setting
from kvhost.schema.problems import Refusal

_GPUS = "GPUs and further runners"
_EXAMPLE_GPU = "GPU-5d1c2f4e-0a1b-2c3d-4e5f-60718293a4b5"  # made up
_NAME = re.compile(r"[a-z][a-z0-9]{0,15}")
_UUID = re.compile(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
#: names of notes that lie beside the services' own, or of services
_TAKEN = ("cache", "runner", "pruner", "supervisord", "other")


def runner_name(value: str) -> str:
    """The end of a unit's and of a file's name. Raises `Refusal`."""
    if not _NAME.fullmatch(value) or value in _TAKEN:
        raise Refusal(
            "a name is a small letter and up to 15 more or digits, and none of kvhost's own "
            f"({', '.join(_TAKEN)})",
            "second",
        )
    return value


def gpu_uuids(values: list[str]) -> list[str]:
    """UUIDs as nvidia-smi -L prints them: an index may be another card after a boot, or where
    CUDA_DEVICE_ORDER differs. Raises `Refusal`."""
    for value in values:
        if not _UUID.fullmatch(value):
            raise Refusal(
                "a GPU is named by its UUID, as nvidia-smi -L prints it (a MIG slice is not in "
                "this version)",
                [_EXAMPLE_GPU],
            )
    if len(set(values)) < len(values):
        raise Refusal("one GPU is named twice", list(dict.fromkeys(values)))
    return values


_Gpus = Annotated[list[str], AfterValidator(gpu_uuids)]


class MoreRunner(Flat):
    """One further runner. What is None is as with the first runner of the host."""

    name: Annotated[str, AfterValidator(runner_name)]
    api_port: Annotated[int, AfterValidator(_values.port)]
    served_model_name: Annotated[str, AfterValidator(_values.served_model_name)] | None = None
    gpus: _Gpus | None = None
    gpu_memory_share: float | None = None
    engine_kv_gib: int | None = None


class RunnerSettings(DriveSettings):
    """The part of the settings that says on what, and how many times, a model is served."""

    tensor_parallel_size: int = setting(
        _GPUS,
        1,
        "GPUs that one model is divided among (tensor parallelism); another number begins a new "
        "cache.",
        unit="GPUs",
        example=2,
        ge=1,
        le=64,
    )
    gpus: _Gpus = setting(
        _GPUS,
        [],
        "GPUs that the first runner may use, by UUID; without it CUDA chooses.",
        example=[_EXAMPLE_GPU],
    )
    gpu_memory_share: float | None = setting(
        _GPUS,
        None,
        "Part of each of its GPUs' memory that the first runner takes; without it, vLLM's 0.92, "
        "and needed of each runner on a GPU that two share.",
        unit="fraction of the memory",
        example=0.45,
        gt=0,
        le=0.95,
    )
    more_runners: list[MoreRunner] = setting(
        _GPUS,
        [],
        "Further runners of the same model beside the first, which share its cache server and its "
        "tier: each has a name and an api_port, and may have served_model_name, gpus, "
        "gpu_memory_share and engine_kv_gib of its own.",
        example=[{"name": "second", "api_port": 8001}],
    )
    verify_runner: str | None = setting(
        _GPUS,
        None,
        "Name of the further runner that the restart test asks and restarts; without it, the first "
        "runner.",
        example="second",
        reaches_host=False,
    )
