"""The GPU in the plan: what it says, what it refuses, what fits into its memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvhost.plan.accelerator import decision_of
from kvhost.plan.lock import choose_lock
from kvhost.plan.make import ModelNeed, Plan, make_plan
from kvhost.settings import Settings
from tests.plan_cases import FACTS, GIB, NVIDIA, absent, changed, ok, plan
from tests.report_tools import as_root, put
from tests.test_driver import BY_ID, MATRIX, REPO, facts_of, smi_xml

GOOD = BY_ID["two 4090 without NVSwitch, where the fabric manager has nothing to do"]
OLD = BY_ID["driver 570 under torch for CUDA 13"]
H200 = BY_ID["H200 jobs in containers, CUDA error 802"]


def on_gpu(
    case: dict[str, Any], host: dict[str, Any] | None = None, need: ModelNeed | None = None,
    **settings: Any,
) -> Plan:  # fmt: skip
    """The plan as prepare makes it, of a healthy host with a recorded GPU."""
    report = changed({"gpu": ok(NVIDIA), "pid1.container": case.get("container"), **(host or {})})
    driver = changed({}).driver.model_validate(ok(facts_of(case)))
    report = report.model_copy(update={"driver": driver})
    wanted = Settings(**settings)
    lock, refusals = choose_lock(wanted, report, MATRIX)
    facts = replace(
        FACTS, lock_name=lock.name, lock_refusals=refusals, lock_state=lock.state, cuda=lock.cuda,
        driver=decision_of(report, lock, MATRIX), model=need or FACTS.model,
    )  # fmt: skip
    return make_plan(wanted, report, facts)


def codes(got: Plan) -> list[str]:
    return [refusal.code for refusal in got.refusals]


@pytest.mark.parametrize("accelerator", ["auto", "cuda"])
def test_a_good_driver_is_adopted(accelerator: str) -> None:
    got = on_gpu(GOOD, accelerator=accelerator)
    assert codes(got) == []
    (action,) = [action for action in got.actions if action.stage == "accelerator"]
    assert (action.state, action.what) == (
        "keep", "driver 580.65.06 as it is, 2 x NVIDIA GeForce RTX 4090"
    )  # fmt: skip
    assert [note for note in got.notes if "resolved and never run" in note]
    assert [note for note in got.notes if "Persistence mode is off" in note]


def test_what_stands_against_the_gpu_is_refused_and_never_the_cpu_taken_instead() -> None:
    got = on_gpu(OLD)
    assert codes(got) == ["driver_too_old"]
    assert got.refusals[0].stage == "accelerator"
    assert codes(on_gpu(H200)) == ["fabric_manager_missing"]
    cpu = on_gpu(OLD, accelerator="cpu")
    assert codes(cpu) == []
    assert [note for note in cpu.notes if "will not be used: NVIDIA at PCI" in note]


def test_cuda_without_a_gpu() -> None:
    none = {**GOOD, "pci": [], "smi": None, "proc": ""}
    nothing: dict[str, Any] = {"gpu.nvidia.pci": []}
    assert codes(on_gpu(none, nothing, accelerator="cuda")) == ["no_gpu"]
    got = on_gpu(none, nothing)
    assert codes(got) == []
    assert "no NVIDIA GPU was found here" in str(got.actions)


def test_facts_that_are_not_there_are_refused() -> None:
    for part in ({"status": "unreadable", "why": "it hangs", "data": None}, absent()):
        report = changed({"gpu": ok(NVIDIA)})
        driver = report.driver.model_validate(part)
        report = report.model_copy(update={"driver": driver})
        lock, _ = choose_lock(Settings(), report, MATRIX)
        facts = replace(FACTS, cuda=lock.cuda, driver=decision_of(report, lock, MATRIX))
        got = make_plan(Settings(), report, facts)
        assert codes(got) == ["unreadable"]
        assert got.refusals[0].found == part["why"]
    unknown = {"gpu": {"status": "unreadable", "why": "no /sys", "data": None}}
    assert codes(plan(unknown)) == ["unreadable"]


def test_a_gpu_host_needs_no_memory_for_the_engines_own_kv_nor_avx2() -> None:
    host = {"memory.available": int(5.5 * GIB), "cpus.flags": []}
    assert codes(on_gpu(GOOD, host)) == []
    assert codes(plan(host)) == ["no_avx2", "ram_too_small"]


def args(*words: str) -> dict[str, Any]:
    return {"runner_extra_args": list(words)}


def test_more_gpus_than_there_are() -> None:
    large = {"memory.available": 64 * GIB}
    got = on_gpu(GOOD, large, tensor_parallel_size=4)
    assert codes(got) == ["too_few_gpus"]
    assert got.refusals[0].found == "2 in nvidia-smi"
    assert codes(on_gpu(GOOD, large, tensor_parallel_size=2, **args("-pp", "2"))) == [
        "too_few_gpus"
    ]


ROOM = int(24564 * (1 << 20) * 0.92) - int(1.5 * GIB)  # of one RTX 4090


@pytest.mark.parametrize(
    "need, settings, words",
    [
        (ModelNeed(ROOM - 32768 * 8192, 8192, 40960), {}, None),
        (ModelNeed(ROOM - 32768 * 8192 + 1, 8192, 40960), {}, "max_model_len = 32767"),
        (ModelNeed(ROOM - 32768 * 8192 + 1, 8192, 40960), {}, "kv_cache_dtype = 'fp8'"),
        (ModelNeed(16 * GIB, 1 << 18, 40960), {}, "KV 8 GiB for 32768 tokens"),
        (ModelNeed(16 * GIB, 1 << 18, 40960), {"max_model_len": 8192}, None),
        (ModelNeed(40 * GIB, 1 << 17, 40960), {}, "the cache keeps KV, never weights"),
        (ModelNeed(40 * GIB, 1 << 17, 40960), {}, "20.6 GiB of 24 GiB: 92% of it"),
        (ModelNeed(32 * GIB, 1 << 16, 40960), {}, "or more of the 2 GPUs"),
        (ModelNeed(32 * GIB, 1 << 16, 40960), {"tensor_parallel_size": 2}, None),
        (ModelNeed(32 * GIB, 1 << 16, 40960), args("-pp=2"), None),
        (ModelNeed(32 * GIB, 1 << 16, 40960), args("--pipeline_parallel_size=2"), None),
        (
            ModelNeed(80 * GIB, 1 << 16, 40960),
            {"tensor_parallel_size": 2},
            "on each of 2 GPUs: weights 40",
        ),
        (ModelNeed(18 * GIB, 1 << 16, 40960), {"gpu_memory_share": 0.8}, "80% of it"),
        (ModelNeed(18 * GIB, 1 << 16, 40960), {}, None),
        (ModelNeed(18 * GIB, 1 << 16, 40960), args("-pp", "1.5"), None),
        (ModelNeed(18 * GIB, 1 << 16, 40960), args("--seed", "1", "--max-num-seqs"), None),
    ],
)
def test_what_fits_into_the_gpu(
    need: ModelNeed, settings: dict[str, Any], words: str | None
) -> None:
    host = {"memory.available": 128 * GIB}
    got = on_gpu(GOOD, host, need, verify_prompt_tokens=4096, **settings)
    assert codes(got) == (["model_too_large_for_gpu"] if words else [])
    # what fits is said, with the same figures
    assert any(note.startswith("GPU memory of ") for note in got.notes) is (words is None)
    if words:
        refusal = got.refusals[0]
        assert words in f"{refusal.needed} {refusal.found} {refusal.fix}"


def test_what_the_model_takes_of_the_gpus_is_said() -> None:
    need = ModelNeed(32 * GIB, 1 << 16, 40960)
    got = on_gpu(GOOD, {"memory.available": 128 * GIB}, need, tensor_parallel_size=2)
    (note,) = [note for note in got.notes if note.startswith("GPU memory of ")]
    assert "of 24 GiB on each of 2 GPUs hold weights 16 GiB and KV" in note
    assert "one request of 32768 tokens takes 1 GiB." in note


# The whole way: settings, the scripts on the host, the lock, the decision, the plan


GPU_HOST = """
set -eu
mount -t tmpfs none /sys/bus/pci
cp -r "$1/pci/." /sys/bus/pci/
mount -t tmpfs none /proc/driver
mkdir /proc/driver/nvidia
cp "$1/version" /proc/driver/nvidia/
exec "$2" -m kvhost.cli plan --json --data base_dir=/var/lib/kvhost-no-such-host
"""


@as_root
def test_a_machine_that_looks_like_one_with_two_gpus(tmp_path: Path) -> None:
    """In a mount namespace of its own: kernel files of a GPU host, and a double of nvidia-smi."""
    (tmp_path / "pci/drivers/nvidia").mkdir(parents=True)
    for bus in ("01", "02"):
        top = tmp_path / f"pci/devices/0000:{bus}:00.0"
        for name, value in (("vendor", "0x10de"), ("class", "0x030000"), ("device", "0x2684")):
            put(top / name, value + "\n")
        (top / "driver").symlink_to("../../drivers/nvidia")
    put(tmp_path / "version", GOOD["proc"] + "\n")
    said = put(tmp_path / "smi.xml", smi_xml(GOOD["smi"]))
    put(tmp_path / "programs/nvidia-smi", f"#!/bin/sh\ncat {said}\n").chmod(0o755)
    tmp_path.chmod(0o755)
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", GPU_HOST, "sh", tmp_path, sys.executable],
        capture_output=True, text=True, check=False, timeout=120, cwd=REPO,
        env={**os.environ, "PATH": f"{tmp_path}/programs:{os.environ['PATH']}"},
    )  # fmt: skip
    assert done.stdout, done.stderr[-4000:]
    [told] = json.loads(done.stdout).values()
    of_gpu = [row for row in told["refusals"] if row["stage"] in ("accelerator", "engine")]
    # what else stands against this very machine (ports, memory) is not asked here
    assert [row for row in of_gpu if row["code"] != "no_python"] == []
    words = [row["what"] for row in told["actions"]]
    assert "driver 580.65.06 as it is, 2 x NVIDIA GeForce RTX 4090" in words
    assert [what for what in words if what.startswith("engine cu13-0.32.0-")]
    assert [what for what in words if "gcc" in what and "libc6-dev" in what]
