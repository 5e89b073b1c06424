"""The runner waits for its GPUs, and not for ever; a script in the place of nvidia-smi."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvhost.services.runners import ranks
from kvhost.settings import Settings

SCRIPT = Path(__file__).parents[1] / "kvhost/onhost/gpu_gate.py"
CARD = "echo 'GPU {n}: NVIDIA H100 80GB HBM3 (UUID: GPU-5a1d0000-0000-0000-0000-00000000000{n})'"
LOST = "echo 'Unable to determine the device handle for GPU1: 0000:1B:00.0: Unknown Error'"


@dataclass
class Told:
    code: int
    said: str
    seconds: float


def gate(tmp_path: Path, script: str | None, *more: str, expect: int, wait: float = 0) -> Told:
    """Runs it with ``script`` as the body of nvidia-smi; $N counts its calls from 1."""
    if script is not None:
        program = tmp_path / "nvidia-smi"
        count = f"echo x >> {tmp_path}/calls; N=$(/usr/bin/wc -l < {tmp_path}/calls)"
        program.write_text(f"#!/bin/sh\n{count}\n{script}\n")
        program.chmod(0o755)
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--expect", str(expect), "--wait", str(wait), *more],
        env={**os.environ, "PATH": str(tmp_path)}, capture_output=True, text=True, check=False,
        timeout=60,
    )  # fmt: skip
    return Told(done.returncode, done.stderr, time.monotonic() - began)


def cards(*numbers: int) -> str:
    return "\n".join(CARD.format(n=n) for n in numbers)


def test_enough_are_there_at_once(tmp_path: Path) -> None:
    told = gate(tmp_path, cards(0, 1), expect=2, wait=30)
    assert (told.code, told.said) == (0, "2 GPUs are ready\n")
    assert told.seconds < 5


def test_a_card_that_comes_late_is_waited_for(tmp_path: Path) -> None:
    late = f"{cards(0)}\n[ $N -lt 3 ] || {{ {cards(1)}; }}"
    told = gate(tmp_path, late, expect=2, wait=30)
    assert told.code == 0
    assert told.said.startswith("waiting: 1 of 2 GPUs are ready")
    assert told.said.count("waiting") == 1  # once, not once a second


def test_a_driver_that_is_still_loading_is_waited_for(tmp_path: Path) -> None:
    loading = f"[ $N -ge 2 ] || {{ echo 'No devices were found'; exit 6; }}\n{cards(0)}"
    assert gate(tmp_path, loading, expect=1, wait=30).code == 0


@pytest.mark.parametrize(
    ("script", "why"),
    [
        (cards(0), "1 of 2 GPUs are ready"),
        (f"{cards(0)}\n{LOST}", "Unknown Error"),
        (f"{cards(0, 1)}\nexit 15", "nvidia-smi ends with 15"),
        ("echo 'No devices were found'", "No devices were found"),
        (None, "there is no nvidia-smi"),
    ],
)
def test_it_ends_with_what_is_missing(tmp_path: Path, script: str | None, why: str) -> None:
    told = gate(tmp_path, script, expect=2, wait=1.5)
    assert told.code == 1
    last = told.said.splitlines()[-1]
    assert last.startswith("after 2 s ")
    assert why in last
    assert 1 < told.seconds < 10


def test_a_gpu_that_is_named_must_be_among_them(tmp_path: Path) -> None:
    both = f"{CARD.format(n=0)}; {CARD.format(n=1)}"
    named = ["--uuid", "GPU-5a1d0000-0000-0000-0000-000000000001"]
    assert gate(tmp_path, both, *named, expect=1).code == 0
    told = gate(tmp_path, CARD.format(n=0), *named, expect=1)
    assert told.code == 1
    assert "GPU-5a1d0000-0000-0000-0000-000000000001 not among them: 1 of 1 GPUs" in told.said


@pytest.mark.parametrize(
    ("given", "gpus"),
    [
        ({}, 1),
        ({"tensor_parallel_size": 4}, 4),
        ({"tensor_parallel_size": 2, "runner_extra_args": ["--pipeline-parallel-size", "3"]}, 6),
    ],
)
def test_how_many_the_engine_needs(given: dict[str, Any], gpus: int) -> None:
    assert ranks(Settings(**given)) == gpus
